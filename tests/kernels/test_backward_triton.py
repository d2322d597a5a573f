"""Triton backwards of norm, SiLU and rotary: interpreted against fp64, compiled, repeatable."""

from __future__ import annotations

import pytest
import torch
from interpreted import output_interpreted

from consistent_kernels.rms_norm import rms_norm_bwd
from consistent_kernels.rms_norm.triton_bwd import _rms_norm_bwd_kernel
from consistent_kernels.rotary import RopeParameters, rotary_bwd
from consistent_kernels.silu_and_mul import silu_and_mul_bwd
from consistent_kernels.silu_and_mul.triton_bwd import _silu_and_mul_bwd_kernel
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations, norm_weight
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

EPS = 1e-6

# The formulas in fp64 of the same inputs; bounds as in each op's grad_matches_reference, with a
# program count that makes programs take several tiles, and a last tile that is not full. Results
# are fp32: Triton's interpreter cuts off where a GPU rounds to bf16.
RMS_NORM = """
import torch
from consistent_kernels.rms_norm import triton_bwd
from consistent_kernels.rms_norm.reference import rms_norm_bwd_ref
from consistent_kernels.testing import hazard_activations, norm_weight

triton_bwd._PROGRAMS = 3
for rows, size in ((1, 576), (33, 576), (70, 128), (5, 4096)):
    for dtype in (torch.float32,):
        x = hazard_activations((rows, size), seed=1, dtype=dtype)
        grad_y = hazard_activations((rows, size), seed=2, dtype=dtype)
        extra = hazard_activations((rows, 2 * size), seed=3, dtype=dtype)[:, :size]
        weight = norm_weight(size, seed=4, dtype=dtype)
        for grad_sum in (None, extra):
            grad_x, grad_weight = triton_bwd.rms_norm_bwd(grad_y, x, weight, 1e-6, grad_sum)
            x64, g64, w64 = x.double(), grad_y.double(), weight.double()
            rstd = torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-6)
            n64 = x64 * rstd
            h64 = g64 * w64
            exact = rstd * (h64 - n64 * (h64 * n64).mean(-1, keepdim=True))
            if grad_sum is not None:
                exact = exact + grad_sum.double()
            scale = exact.abs().amax(-1, keepdim=True)
            unit = 2**-24
            assert grad_x.dtype == dtype and grad_weight.dtype == torch.float32
            near = scale * (2 * unit + size * 2**-24)
            assert bool(((grad_x.double() - exact).abs() <= near).all())
            magnitude = (g64 * n64).abs().sum(0)
            near = (grad_weight.double() - (g64 * n64).sum(0)).abs()
            assert bool((near <= magnitude * (rows + 64) * 2**-24 + 1e-30).all())
            without = rms_norm_bwd_ref(grad_y, x, weight, 1e-6)[0]
            assert grad_sum is None or not torch.equal(grad_x, without), "control: the sum counts"
print("norm within bounds")
"""

SILU = """
import torch
from consistent_kernels.silu_and_mul.reference import silu_and_mul_bwd_ref
from consistent_kernels.silu_and_mul.triton_bwd import silu_and_mul_bwd
from consistent_kernels.testing import hazard_activations

for rows, size in ((1, 320), (3, 1030)):
    fused = hazard_activations((rows, 2 * size), seed=1).float() / 8
    for dtype in (torch.float32,):
        gate, up = fused.to(dtype).chunk(2, dim=-1)
        grad_y = hazard_activations((rows, size), seed=2, dtype=dtype)
        g, u, gy = gate.double(), up.double(), grad_y.double()
        s = torch.sigmoid(g)
        exact = gy * u * s * (1 + g * (1 - s)), gy * g * s
        unit = 2**-24
        slack = (g.abs() + 16) * 2**-23
        floor = gy.abs() * (1 + u.abs()) * 2**-118 + 2**-126
        grad_gate, grad_up = silu_and_mul_bwd(grad_y, gate, up)
        assert grad_gate.dtype == grad_up.dtype == dtype and grad_gate.is_contiguous()
        near = exact[1].abs() * (unit + slack) + floor
        assert bool(((grad_up.double() - exact[1]).abs() <= near).all())
        size_gate = (gy * u).abs() * s * (1 + g.abs())
        near = exact[0].abs() * unit + size_gate * slack + floor
        assert bool(((grad_gate.double() - exact[0]).abs() <= near).all())
print("silu within bounds")
"""

ROTARY = """
import torch
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.rotary.reference import rotary_ref
from consistent_kernels.rotary.api import rope_tables
from consistent_kernels.rotary.triton import rotary_fwd

for width, rotated in ((64, 64), (80, 32)):
    cos, sin = rope_tables(RopeParameters(width, rotated, 1e4, 64), torch.device("cpu"))
    q, k = torch.randn(7, 5, width), torch.randn(7, 2, width)
    positions = torch.tensor([0, 1, 2, 63, 5, 5, 9])
    expected = rotary_ref(positions, q, k, cos, -sin)
    for actual, want in zip(rotary_fwd(positions, q, k, cos, -sin), expected):
        assert torch.equal(actual, want)
    assert not torch.equal(rotary_fwd(positions, q, k, cos, sin)[0], expected[0])
print("rotary turned back")
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [(RMS_NORM, "norm within"), (SILU, "silu within"), (ROTARY, "rotary turned back")],
    ids=["rms_norm", "silu_and_mul", "rotary"],
)
def test_backward_interpreted_matches_fp64(script: str, said: str) -> None:
    assert said in output_interpreted(script, timeout=120)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [128, 576, 4096, 8192])
@pytest.mark.parametrize("has_sum", [False, True])
def test_rms_norm_backward_cross_compiles(arch: int, size: int, has_sum: bool) -> None:
    columns = 1 << (size - 1).bit_length()
    constants = {"H": size, "COLUMNS": columns, "ROWS": max(1, 4096 // columns)}
    constants |= {"HAS_SUM": has_sum}
    types = {
        name: "*bf16" if name.endswith("_ptr") else "i32"
        for name in _rms_norm_bwd_kernel.arg_names
        if name not in constants
    }
    types |= {"partial_ptr": "*fp32", "eps": "fp32"}
    warps = 4 if columns <= 1024 else 8
    cubin = cross_compile(
        _rms_norm_bwd_kernel, arch=arch, signature=types, constexprs=constants, num_warps=warps
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_silu_and_mul_backward_cross_compiles(arch: int) -> None:
    types = {
        name: "*bf16" if name.endswith("_ptr") else "i32"
        for name in _silu_and_mul_bwd_kernel.arg_names
        if name != "BLOCK"
    }
    cubin = cross_compile(
        _silu_and_mul_bwd_kernel, arch=arch, signature=types, constexprs={"BLOCK": 1024}
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton program needs a CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("shape", [(5000, 4096), (3000, 40, 128)])
    def test_rms_norm_backward_is_near_the_reference_and_repeats(self, shape: tuple) -> None:
        x, grad_y, grad_sum = (hazard_activations(shape, seed=n, device="cuda") for n in (1, 2, 3))
        weight = norm_weight(shape[-1], seed=4, device="cuda")
        once = rms_norm_bwd(grad_y, x, weight, EPS, impl="triton", grad_sum=grad_sum)
        again = rms_norm_bwd(grad_y, x, weight, EPS, impl="triton", grad_sum=grad_sum)
        for first, second in zip(once, again, strict=True):
            assert_bitwise_equal(first, second)
        other = rms_norm_bwd(grad_y, x, weight, EPS, impl="reference", grad_sum=grad_sum)
        scale = other[0].float().abs().amax(-1, keepdim=True)
        assert bool(((once[0].float() - other[0].float()).abs() <= scale * 2**-7).all())
        size = (grad_y.float().abs() * weight.float().abs()).reshape(-1, shape[-1]).sum(0)
        assert bool(((once[1] - other[1]).abs() <= size * 2**-10).all())

    def test_elementwise_backwards_repeat(self) -> None:
        gate, up, grad = (hazard_activations((999, 1536), seed=n, device="cuda") for n in (5, 6, 7))
        once = silu_and_mul_bwd(grad, gate, up, impl="triton")
        for first, second in zip(
            once, silu_and_mul_bwd(grad, gate, up, impl="triton"), strict=True
        ):
            assert_bitwise_equal(first, second)
        rope = RopeParameters(128, 128, 1e6, 4096)
        positions = torch.arange(999, device="cuda")
        q, k = (hazard_activations((999, h, 128), seed=8, device="cuda") for h in (32, 8))
        for actual, expected in zip(
            rotary_bwd(positions, q, k, rope=rope, impl="triton"),
            rotary_bwd(positions, q, k, rope=rope, impl="reference"),
            strict=True,
        ):
            error = (actual.float() - expected.float()).abs()
            assert bool(
                (error <= expected.float().abs() * 2**-7 + q.float().abs().max() * 2**-20).all()
            )
