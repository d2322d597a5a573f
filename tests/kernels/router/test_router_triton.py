"""The Triton program of the router: compiled for GPUs that are not here, and interpreted."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted
from router_cases import MODELS

from consistent_kernels.router.spec import NUM_WARPS
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

INTERPRETED = """
import torch
from router_cases import MODELS, case, correction_bias, hazard_logits
from consistent_kernels.router.triton import router_fwd
from consistent_kernels.router import RouterParameters, router

cases = {name: case(name, 12, "cpu", seed=3) for name in MODELS}
for p in (
    RouterParameters(1, 1, "sigmoid", renormalize=True),
    RouterParameters(5, 5, "softmax", renormalize=False),
    RouterParameters(8, 2, "sigmoid", renormalize=True, num_groups=8, top_groups=4),
    RouterParameters(21, 5, "sigmoid", renormalize=True, num_groups=7, top_groups=3),
):
    bias = correction_bias(p.num_experts, "cpu") if p.scoring == "sigmoid" else None
    cases[str(p)] = hazard_logits(12, p.num_experts, "cpu", seed=3), bias, p
for name, (logits, bias, p) in cases.items():
    if p.scoring == "sqrtsoftplus":
        continue  # the interpreter has no libdevice
    logits[4, ::3] = float("nan")
    logits[9, ::2] = float("-inf")
    logits[5] = float("nan")
    valid = torch.arange(12) != 7
    expected = router(logits, bias, parameters=p, valid=valid, impl="reference")
    ids, weights = router_fwd(logits, bias, None, valid, p)
    # exp is another one, so a near tie may fall otherwise: none of these inputs has one.
    assert torch.equal(ids, expected[0]), (name, ids, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=0, equal_nan=True)
    safe = expected[0].clamp(min=0)
    forced, again = router_fwd(logits, None, safe, valid, p)
    assert torch.equal(forced, ids)
    assert torch.equal(again.nan_to_num(7), weights.nan_to_num(7))
print("same")
"""


def test_router_interpreted_matches_reference() -> None:
    # Triton's interpreter runs the kernel in NumPy: addresses, masks and choices, not a GPU's bits.
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", MODELS)
def test_router_cross_compiles(arch: int, name: str) -> None:
    from consistent_kernels.router.triton import _router_fwd_kernel, constexprs

    pointers = {
        "logits_ptr": "*fp32",
        "bias_ptr": "*fp32",
        "forced_ptr": "*i32",
        "valid_ptr": "*i8",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
    }
    numbers = {"logits_stride": "i32", "scale": "fp32", "floor": "fp32"}
    forced = name == "deepseek-v4"
    cubin = cross_compile(
        _router_fwd_kernel,
        arch=arch,
        signature=pointers | numbers,
        constexprs=constexprs(MODELS[name])
        | {"HAS_BIAS": not forced, "FORCED": forced, "HAS_VALID": True},
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")
