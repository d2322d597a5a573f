"""DeepGEMM's grouped FP8 GEMMs over places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch

from consistent_kernels.deep_gemm_start import parts
from consistent_kernels.experts import deep_gemm_grouped as bf16
from consistent_kernels.experts.deep_gemm_grouped import MASKED_HINT
from consistent_kernels.experts.deep_gemm_places import AnyPlaces, PackedPlaces
from consistent_kernels.fp8_experts.deep_gemm_packed import ALIGNMENTS, PACKED_ROWS
from consistent_kernels.fp8_experts.deep_gemm_rows import Quantized
from consistent_kernels.quantization import tma_aligned_scales
from consistent_kernels.vendored import deep_gemm

HOPPER = 9

NARROW_TILE, WIDE_TILE = 128, 192
"""Columns of a packed tile: see `tile_columns`. Others are stored through narrower swizzles: at 144
and 160 columns a layer took longer."""

CONTIGUOUS_ROWS = 16
"""Rows up to which "fastest" is the contiguous layout: its places are as few as their experts,
while the masked one has places of every expert."""


def is_packed(layout: str, rows: int, experts: int, device: torch.device) -> bool:
    """Return whether rows (tokens times slots) stand as `pack_and_quantize` puts them.

    That is what "fastest" is on Hopper for few rows: an H200 takes 181 and 198 us for the layer of
    Qwen3-30B-A3B at 64 and 256 tokens (masked 195 and 211). For very few DeepGEMM chooses the
    contiguous tile by how many there are (8 rows: 37 us, 46 packed).
    """
    most = min(PACKED_ROWS, ALIGNMENTS[-1] // 2 * experts)
    if layout != "fastest" or not CONTIGUOUS_ROWS < rows <= most or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def is_masked(layout: str, tokens: int, slots: int, experts: int) -> bool:
    """Return whether rows that are not packed are laid out in the masked layout.

    "fastest" is masked as in `experts`, for few tokens, but for very few: on an H200 that layer
    takes 40, 124, 261 and 274 us contiguous at 1, 8, 64 and 256 tokens, and 54, 112, 200 and 213 us
    masked.
    """
    few = tokens * slots <= CONTIGUOUS_ROWS
    return layout == "masked" or (not few and bf16.is_masked(layout, tokens, experts))


def tile_columns(columns: int, rows: int, experts: int) -> int:
    """Return the columns of a packed tile, in place of DeepGEMM's choice; no bit depends on it.

    Where the tiles of an expert are even in number, DeepGEMM runs two multiprocessors as a cluster
    that shares the weights of two row tiles. An expert of one row tile has nothing to share, and
    the two wait for each other. So tiles are wide where that makes their number odd, unless few
    rows leave experts empty, and wide tiles multiprocessors idle.
    """
    is_odd = -(-columns // WIDE_TILE) % 2 == 1
    return WIDE_TILE if is_odd and rows >= 2 * experts else NARROW_TILE


@contextlib.contextmanager
def _settings(library: ModuleType, alignment: int, columns: int) -> Iterator[None]:
    """DeepGEMM keeps these for a process: what another call sees is as before.

    Dependent launches (which vLLM turns on) took 2 us more a layer of 64 tokens.
    """
    before = library.get_mk_alignment_for_contiguous_layout(), library.get_pdl()
    library.set_mk_alignment_for_contiguous_layout(alignment)
    library.set_pdl(False)
    library.set_block_size_multiple_of((1, columns))
    try:
        yield
    finally:
        library.set_mk_alignment_for_contiguous_layout(before[0])
        library.set_pdl(before[1])
        library.set_block_size_multiple_of((1, 1))


def grouped_gemm(
    x: Quantized,
    weight: Quantized,
    places: AnyPlaces,
    scale_format: str,
) -> torch.Tensor:
    """y[p] = fp8_gemm(x[p], weight[expert of p]) for the places in use; the others are undefined.

    Args:
        x: values and scale of the rows in their places.
        weight: values [E, N, K] and scale [E, ceil(N / 128), K / 128].
        places: from `expert_places` or `pack_and_quantize`.

    Returns:
        [places, N] bf16.
    """
    experts, columns, inner = weight[0].shape
    y = torch.empty((x[0].shape[0], columns), dtype=torch.bfloat16, device=x[0].device)
    # Blackwell packs exponents; the cast of a power of two is exact.
    options = {"disable_ue8m0_cast": scale_format != "ue8m0"}
    library = deep_gemm()
    if isinstance(places, PackedPlaces):
        alignment = places.alignment
        with _settings(library, alignment, tile_columns(columns, places.place.numel(), experts)):
            library.m_grouped_fp8_gemm_nt_contiguous(
                x,
                weight,
                y,
                places.end,
                use_psum_layout=True,
                expected_m_for_psum_layout=alignment,
                **options,
            )
        return y
    if places.capacity is not None:
        shape = (experts, places.capacity)
        rows, out = (x[0].view(*shape, inner), x[1]), y.view(*shape, columns)
        library.m_grouped_fp8_gemm_nt_masked(
            rows, weight, out, places.count, MASKED_HINT, **options
        )
        return y
    for part in parts(x[0].shape[0]):
        rows = (x[0][part], tma_aligned_scales(x[1][part]))
        library.m_grouped_fp8_gemm_nt_contiguous(
            rows, weight, y[part], places.expert[part], **options
        )
    return y
