"""What stock vLLM must be told to start where FlashInfer is installed without its sources."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rollout.variants import Variant

FP8_SWITCH = "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"

_SOURCE = Path(
    "data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/fp8_blockscale_gemm",
    "fp8_blockscale_gemm.cu",
)
_COMPILED = "flashinfer_jit_cache"
"""The package of FlashInfer's compiled kernels."""


def startable(variants: Sequence[Variant], block_fp8: bool) -> list[Variant]:
    """Return the variants, those of stock's kernels with the variables that they need to start.

    On Hopper vLLM's block-FP8 linear calls FlashInfer for fewer than 32 rows and DeepGEMM for more
    (vllm/model_executor/kernels/linear/scaled_mm/flashinfer.py). It takes FlashInfer to be there
    where its Python package is, and fails in graph capture where that finds nothing to compile.
    With the switch off DeepGEMM serves all rows; those of 32 and more are served as before. Rows
    of a result name the variable (`stock_environment`).

    Args:
        block_fp8: whether the model is quantized in blocks.
    """
    if not block_fp8 or has_fp8_source():
        return list(variants)
    return [
        variant
        if variant.consistent
        else dataclasses.replace(variant, environment=variant.environment | {FP8_SWITCH: "0"})
        for variant in variants
    ]


def has_fp8_source() -> bool:
    """Whether FlashInfer can serve FP8 linears, or is not installed, so that nothing asks it to."""
    if importlib.util.find_spec(_COMPILED) is not None:
        return True
    found = importlib.util.find_spec("flashinfer")
    folders = (found.submodule_search_locations or []) if found else []
    return not folders or any((Path(folder) / _SOURCE).is_file() for folder in folders)
