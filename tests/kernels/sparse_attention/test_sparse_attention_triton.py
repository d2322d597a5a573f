"""The Triton programs of sparse attention: compiled for absent GPUs, and interpreted."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.sparse_attention.spec import (
    BACKWARD_TILE,
    BLOCK_HEADS,
    ENTRY_TILE,
    NUM_STAGES,
    NUM_WARPS,
)
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

KINDS = {
    "*bf16": {"q_ptr", "kv_ptr", "out_ptr", "grad_q_ptr"},
    "*i32": {"indices_ptr"},
    "*i64": {"order_ptr", "bounds_ptr"},
    "fp32": {"scale"},
}


def signature_of(kernel: object, constexprs: dict[str, object]) -> dict[str, str]:
    def kind(name: str) -> str:
        for text, names in KINDS.items():
            if name in names:
                return text
        return "*fp32" if name.endswith("_ptr") else "i32"

    return {name: kind(name) for name in kernel.arg_names if name not in constexprs}


@pytest.mark.parametrize(
    ("arch", "heads", "rope"), [(arch, 128, 64) for arch in ARCHITECTURES] + [(90, 64, 0)]
)
def test_sparse_attention_cross_compiles(arch: int, heads: int, rope: int) -> None:
    from consistent_kernels.sparse_attention import triton, triton_bwd

    common = {"H": heads, "DV": 512, "DR": rope, "BLOCK_H": BLOCK_HEADS}
    forward = common | {"HAS_SINK": rope == 0, "TILE": ENTRY_TILE, "TILE_LEVELS": 6}
    backward = common | {"TILE": BACKWARD_TILE}
    for kernel, constexprs in (
        (triton._sparse_attention_fwd_kernel, forward),
        (triton_bwd._sparse_attention_bwd_q_kernel, backward),
        (triton_bwd._sparse_attention_bwd_pairs_kernel, backward),
    ):
        signature = signature_of(kernel, constexprs)
        if kernel is not triton._sparse_attention_fwd_kernel:
            signature["grad_ptr"] = "*bf16"
        cubin = cross_compile(
            kernel,
            arch=arch,
            signature=signature,
            constexprs=constexprs,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        assert cubin.startswith(b"\x7fELF")
    sums = {"WIDTH": 512 + rope, "BLOCK": triton_bwd.SUM_BLOCK}
    signature = signature_of(triton_bwd._add_pairs_kernel, sums)
    cubin = cross_compile(
        triton_bwd._add_pairs_kernel, arch=arch, signature=signature, constexprs=sums, num_warps=1
    )
    assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import torch
from sparse_attention_cases import make_case
from consistent_kernels.sparse_attention.backward import sparse_attention_bwd_ref
from consistent_kernels.sparse_attention.reference import sparse_attention_ref
from consistent_kernels.sparse_attention.triton import sparse_attention_fwd
from consistent_kernels.sparse_attention.triton_bwd import sparse_attention_bwd_triton
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

for rope, sinks, heads in ((16, False, 3), (0, True, 66)):
    # fp16, for the interpreter takes bf16 for integers.
    case = make_case(
        tokens=3, heads=heads, d_v=32, rope=rope, entries=60, columns=70, sinks=sinks,
        dtype=torch.float16,
    )
    arguments = (*case.arguments, case.sinks, case.scale, case.d_v)
    out, lse = sparse_attention_fwd(*arguments)
    expected, expected_lse = sparse_attention_ref(*arguments)
    # P and the result are rounded to fp16 (2^-11 each); sums differ in fp32 order only.
    reach = float(case.kv.abs().max())
    assert float((out.float() - expected.float()).abs().max()) <= 4 * 2**-11 * reach
    seen = expected_lse < float("inf")
    assert torch.equal(lse < float("inf"), seen)
    assert float((lse - expected_lse)[seen].abs().max()) <= 1e-3
    alone = sparse_attention_fwd(case.q[2:3], case.kv, case.indices[2:3], *arguments[3:])
    assert_bitwise_equal(alone[0], out[2:3])
    grad = hazard_activations(tuple(out.shape), seed=5, dtype=torch.float16)
    back = (grad, *case.arguments, expected, expected_lse, case.sinks, case.scale)
    for actual, value in zip(
        sparse_attention_bwd_triton(*back), sparse_attention_bwd_ref(*back), strict=True
    ):
        if value is not None:
            top = float(value.float().abs().max())
            assert float((actual.float() - value.float()).abs().max()) <= 8 * 2**-11 * top
    clean = sparse_attention_bwd_triton(*back)
    grad[1] = case.q[1] = float("nan")  # query 1 names nothing
    for actual, value in zip(sparse_attention_bwd_triton(*back), clean, strict=True):
        if value is not None:
            assert_bitwise_equal(actual, value)
print("equal")
"""


def test_sparse_attention_interpreted_matches_reference() -> None:
    assert output_interpreted(INTERPRETED).strip() == "equal"
