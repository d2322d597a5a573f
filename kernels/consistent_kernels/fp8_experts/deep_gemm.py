"""FP8 experts by DeepGEMM's grouped GEMMs, in the contiguous or the masked layout.

Rows go to aligned places, through the first GEMM, the activation, the second GEMM, and back to
their slots, without waiting for the device. Rows of a tile do not meet, so a row has the bits of
the dense `fp8_gemm_nt` in either layout (H200: shown by the tests).
"""

from __future__ import annotations

import torch

from consistent_kernels.alignment import aligned
from consistent_kernels.errors import NumericsError, UnsupportedError
from consistent_kernels.experts.deep_gemm import calls
from consistent_kernels.experts.deep_gemm_places import Places, expert_places
from consistent_kernels.experts.deep_gemm_rows import from_places
from consistent_kernels.fp8_experts.deep_gemm_rows import (
    Quantized,
    activate_and_quantize,
    to_places,
)
from consistent_kernels.fp8_linear.deep_gemm import check_supported
from consistent_kernels.fp8_linear.probe import probe_operands
from consistent_kernels.quantization import quantize_rows, tma_aligned_scales
from consistent_kernels.vendored import deep_gemm

LAYOUTS = ("contiguous", "masked")
"""Experts one after the other, each from a multiple of 128, or [E, capacity] places."""

PROBED_ROWS = (1, 16, 64, 257)
"""Row counts whose bits the start-up probe holds against those of LARGEST_ROWS."""

LARGEST_ROWS = 1024

_started: set[tuple[object, ...]] = set()


def grouped_gemm(
    x: Quantized, weight: Quantized, places: Places, scale_format: str
) -> torch.Tensor:
    """y[p] = fp8_gemm(x[p], weight[expert of p]) for the places in use; the others are undefined.

    Args:
        x: values and scale of the rows in their places.
        weight: values [E, N, K] and scale [E, ceil(N / 128), K / 128].
        places: from `expert_places`.

    Returns:
        [places, N] bf16.
    """
    experts, columns, inner = weight[0].shape
    y = torch.empty((x[0].shape[0], columns), dtype=torch.bfloat16, device=x[0].device)
    # Blackwell packs exponents; the cast of a power of two is exact.
    options = {"disable_ue8m0_cast": scale_format != "ue8m0"}
    library = deep_gemm()
    if places.capacity is not None:
        shape = (experts, places.capacity)
        rows, out = (x[0].view(*shape, inner), x[1]), y.view(*shape, columns)
        # The last number is a hint from which the library picks a tile.
        hint = max(1, places.place.numel() // experts)
        library.m_grouped_fp8_gemm_nt_masked(rows, weight, out, places.count, hint, **options)
        return y
    first = 0
    for size in calls(x[0].shape[0]):
        part = slice(first, first + size)
        rows = (x[0][part], tma_aligned_scales(x[1][part]))
        library.m_grouped_fp8_gemm_nt_contiguous(
            rows, weight, y[part], places.expert[part], **options
        )
        first += size
    return y


def start(weight: Quantized, scale_format: str, layouts: tuple[str, ...] = LAYOUTS) -> None:
    """Raise unless a row's bits follow neither the layout nor the number of rows; once a shape.

    It waits for the device, so call it, or the op, once before any graph capture. The first use of
    a shape compiles kernels, which DeepGEMM keeps on disk; `deep_gemm_start.prepare` over
    `Fp8GroupedGemmShape`s compiles a model's in parallel and probes more row counts.

    Args:
        weight: values [E, N, K] and scale, as served.
        layouts: which to hold against contiguous rows in one call.

    Raises:
        NumericsError: names the layout and the number of rows that differ.
    """
    experts, columns, inner = weight[0].shape
    device = weight[0].device
    key = (experts, columns, inner, scale_format, device, layouts)
    if key in _started:
        return
    values, scale, *_ = probe_operands(LARGEST_ROWS, columns, inner, device)
    ids = (torch.arange(LARGEST_ROWS, dtype=torch.int32, device=device) * 7 % experts)[:, None]

    def run(rows: int, layout: str) -> torch.Tensor:
        places = expert_places(ids[:rows], experts, masked=layout == "masked")
        x = to_places(values[:rows], scale[:rows], places, slots=1)
        return from_places(grouped_gemm(x, weight, places, scale_format), places)

    expected = run(LARGEST_ROWS, "contiguous")
    for layout in layouts:
        for rows in PROBED_ROWS:
            actual = run(rows, layout)
            if not torch.equal(actual.view(torch.int16), expected[:rows].view(torch.int16)):
                raise NumericsError(
                    f"fp8_experts: DeepGEMM's rows for weights ({experts}, {columns}, {inner}) in "
                    f"the {layout} layout with {rows} rows have other bits than with "
                    f"{LARGEST_ROWS} contiguous ones. Use impl 'triton' here and report it"
                )
    _started.add(key)


def fp8_expert_outputs_deep_gemm(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    scale_format: str,
    layout: str = "contiguous",
) -> torch.Tensor:
    """As `consistent_kernels.fp8_experts.fp8_expert_outputs`; slots that go nowhere are zero.

    Args:
        x: [T, H] bf16.
        layout: "contiguous", or "masked" (ids of a token must be distinct then).

    Raises:
        UnsupportedError: x is not bf16, or a shape, device or format that DeepGEMM does not serve.
        NumericsError: the start-up probe found that bits follow the batch.
    """
    if x.dtype != torch.bfloat16:
        raise UnsupportedError("fp8_experts (deep_gemm)", str(x.dtype), ["torch.bfloat16"])
    if layout not in LAYOUTS:
        raise UnsupportedError("fp8_experts (deep_gemm)", f"layout {layout!r}", LAYOUTS)
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    for weight in (w13, w2):
        check_supported(*weight.shape[1:], x.dtype, scale_format, major)
    tokens, slots = ids.shape
    columns = w2.shape[1]
    if not tokens:
        return x.new_empty((0, slots, columns))
    flat = aligned(ids.int().contiguous())
    places = expert_places(flat, w2.shape[0], masked=layout == "masked")
    start((w13, w13_scale), scale_format, (layout,))
    start((w2, w2_scale), scale_format, (layout,))
    values, scale = quantize_rows(x, scale_format=scale_format, impl="triton")
    rows = to_places(values, scale, places, slots)
    gate_up = grouped_gemm(rows, (w13, w13_scale), places, scale_format)
    hidden = activate_and_quantize(gate_up, places, scale_format, limit)
    down = grouped_gemm(hidden, (w2, w2_scale), places, scale_format)
    return from_places(down, places).view(tokens, slots, columns)
