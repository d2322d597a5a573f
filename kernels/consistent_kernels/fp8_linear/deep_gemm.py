"""FP8 linear by DeepGEMM's `fp8_gemm_nt`, out of vLLM's wheel.

DeepGEMM picks its tile by the number of rows, never a split of K, and promotes every 128 columns
into fp32 accumulators in ascending order. Its bits on an H200 did not depend on M; a probe shows it
on each machine and for each weight shape, and a difference is a refusal.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from consistent_kernels.alignment import aligned
from consistent_kernels.deep_gemm_start import parts
from consistent_kernels.errors import NumericsError, UnsupportedError
from consistent_kernels.fp8_linear.probe import Operands, probe_operands, rows_that_differ
from consistent_kernels.fp8_linear.spec import (
    BLOCK_K,
    DEEP_GEMM_COLUMNS,
    LARGEST_ROWS,
    PROBED_ROWS,
)
from consistent_kernels.quantization.layout import tma_aligned_scales
from consistent_kernels.vendored import deep_gemm

_HOPPER, _BLACKWELL = 9, 10


def check_supported(
    columns: int, inner: int, out_dtype: torch.dtype, scale_format: str, major: int
) -> None:
    """Raise unless DeepGEMM serves this shape on a GPU of compute capability `major`.x.

    Args:
        columns, inner: N, K of the weight.
        out_dtype: bf16 only.
        scale_format: "fp32" on Hopper alone; Blackwell reads power-of-two scales.

    Raises:
        UnsupportedError: names everything that does not fit, and what would.
    """
    problems = []
    if major not in (_HOPPER, _BLACKWELL):
        problems.append(f"compute capability {major}.x")
    if columns % DEEP_GEMM_COLUMNS or inner % BLOCK_K:
        problems.append(f"weight ({columns}, {inner})")
    if out_dtype != torch.bfloat16:
        problems.append(f"out_dtype {out_dtype}")
    if major == _BLACKWELL and scale_format != "ue8m0":
        problems.append(f"scale_format {scale_format!r} on compute capability 10.x")
    if problems:
        raise UnsupportedError(
            "fp8_linear (deep_gemm)",
            ", ".join(problems),
            (
                f"N in multiples of {DEEP_GEMM_COLUMNS} and K of {BLOCK_K}, torch.bfloat16 out, "
                "compute capability 9.x, or 10.x with ue8m0 scales",
                "impl 'triton'",
            ),
        )


def multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    scale_format: str,
) -> torch.Tensor:
    """`fp8_gemm_nt` in calls of few sizes (see `deep_gemm_start.PIECES`), unprobed.

    Arguments as in `fp8_gemm_deep_gemm`.
    """
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    for part in parts(x.shape[0]):
        _library().fp8_gemm_nt(
            (aligned(x[part]), tma_aligned_scales(x_scale[part])),
            (weight, weight_scale),
            y[part],
            # Blackwell packs exponents; the cast of a power of two is exact.
            disable_ue8m0_cast=scale_format != "ue8m0",
        )
    return y


@functools.cache
def _library() -> Any:
    return deep_gemm()


@functools.cache
def start(
    columns: int,
    inner: int,
    out_dtype: torch.dtype,
    scale_format: str,
    device: torch.device,
) -> None:
    """Raise unless DeepGEMM serves this shape with bits that do not follow the batch; cached.

    The first use of a shape compiles kernels (DeepGEMM keeps them on disk), so the probe is also
    the warm-up of that shape.

    `consistent_kernels.deep_gemm_start.prepare` over `Fp8GemmShape`s compiles a whole model's
    kernels in parallel and probes more row counts; after it this takes milliseconds.

    Raises:
        UnsupportedError: names what does not fit.
        NumericsError: names the row counts that differ.
    """
    check_supported(columns, inner, out_dtype, scale_format, _capability(device))

    def run(operands: Operands) -> torch.Tensor:
        return multiply(*operands, scale_format)

    operands = probe_operands(LARGEST_ROWS, columns, inner, device)
    differ = rows_that_differ(run, operands, PROBED_ROWS)
    if differ:
        raise NumericsError(
            f"fp8_linear: DeepGEMM's rows for weight ({columns}, {inner}) in calls of {differ} "
            f"have other bits than in one of {LARGEST_ROWS}. Use impl 'triton' here and report it"
        )


@dataclasses.dataclass(frozen=True, order=True)
class Fp8GemmShape:
    """One weight shape, for `consistent_kernels.deep_gemm_start.prepare`.

    Attributes:
        columns, inner: N, K.
        max_rows: the largest M to probe.
        scale_format: "fp32" or "ue8m0".
    """

    columns: int
    inner: int
    max_rows: int
    scale_format: str

    def operands(self, rows: int, device: torch.device, *, blank: bool = False) -> Operands:
        """Return `probe_operands` of this shape, or uninitialized ones where `blank`."""
        if blank:
            x_scale = torch.empty((rows, self.inner // BLOCK_K), device=device, dtype=torch.float32)
            blocks = (-(-self.columns // BLOCK_K), self.inner // BLOCK_K)
            x = torch.empty((rows, self.inner), dtype=torch.float8_e4m3fn, device=device)
            weight = x.new_empty((self.columns, self.inner))
            return x, x_scale, weight, x_scale.new_empty(blocks)
        return probe_operands(rows, self.columns, self.inner, device)

    def run(self, operands: Operands, rows: slice) -> torch.Tensor:
        """Return the library's result for these rows."""
        x, x_scale, weight, weight_scale = operands
        return multiply(x[rows], x_scale[rows], weight, weight_scale, self.scale_format)


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def fp8_gemm_deep_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    scale_format: str,
) -> torch.Tensor:
    """y = round(x W^T); arguments as in `fp8_gemm_ref`.

    Args:
        x_scale: best from `quantize_rows(..., tma_aligned=True)`; copied otherwise.
        scale_format: what both scales hold.
    """
    start(*weight.shape, out_dtype, scale_format, weight.device)
    return multiply(x, x_scale, weight, weight_scale, scale_format)
