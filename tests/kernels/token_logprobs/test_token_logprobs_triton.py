"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile
from consistent_kernels.token_logprobs.spec import NUM_WARPS, SMALLEST_DELTA, VOCAB_TILE

POINTERS = {
    "logits_ptr": "*fp32",
    "temperature_ptr": "*fp32",
    "banned_ptr": "*u8",
    "partials_ptr": "*fp32",
}
SIZES = {"logits_stride": "i32", "valid_vocab": "i32", "tiles": "i32", "rows": "i32"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("banned", [False, True])
def test_token_logprobs_cross_compiles(arch: int, entropy: bool, banned: bool) -> None:
    from consistent_kernels.token_logprobs.triton import (
        _merge_fwd_kernel,
        _tile_partials_fwd_kernel,
    )

    variant = {"HAS_BANNED": banned, "HAS_ENTROPY": entropy, "SMALLEST": SMALLEST_DELTA}
    options = {"arch": arch, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    cubin = cross_compile(
        _tile_partials_fwd_kernel,
        signature={**POINTERS, **SIZES},
        constexprs={**variant, "TILE": VOCAB_TILE, "LEVELS": 10},
        **options,
    )
    assert cubin.startswith(b"\x7fELF")
    outputs = {"logprob_ptr": "*fp32", "logsumexp_ptr": "*fp32", "entropy_ptr": "*fp32"}
    cubin = cross_compile(
        _merge_fwd_kernel,
        signature={
            **POINTERS,
            **SIZES,
            **outputs,
            "ids_ptr": "*i64",
            "vocab": "i32",
            "k": "i32",
        },
        constexprs={**variant, "MERGE_BLOCK": 256, "IDS_BLOCK": 16},
        **options,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("out", "has_entropy"), [("*bf16", True), ("*fp32", False)])
def test_grad_logits_cross_compiles(arch: int, out: str, has_entropy: bool) -> None:
    from consistent_kernels.token_logprobs.triton_bwd import (
        _BLOCK,
        _NUM_WARPS,
        _grad_logits_bwd_kernel,
    )

    rows = ("temperature_ptr", "lse_ptr", "entropy_ptr", "grad_logprob_ptr", "grad_lse_ptr")
    cubin = cross_compile(
        _grad_logits_bwd_kernel,
        arch=arch,
        signature={
            "logits_ptr": "*fp32",
            "ids_ptr": "*i64",
            "banned_ptr": "*u8",
            "out_ptr": out,
            "grad_entropy_ptr": "*fp32",
            **dict.fromkeys(rows, "*fp32"),
            **dict.fromkeys(("logits_stride", "vocab", "valid_vocab"), "i32"),
        },
        constexprs={
            "HAS_BANNED": True,
            "HAS_ENTROPY": has_entropy,
            "SMALLEST": SMALLEST_DELTA,
            "BLOCK": _BLOCK,
        },
        num_warps=_NUM_WARPS,
    )
    assert cubin.startswith(b"\x7fELF")
