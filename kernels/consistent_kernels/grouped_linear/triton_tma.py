"""Grouped linear in Triton with TMA: programs that stay, and load a tile while one is stored.

The sums are those of `triton.py`: K ascending in the steps of the MMA instruction, one fp32
accumulator an element. What differs is the way of the bytes: with few columns in (V3.2's k_up has
two steps of K) a tile of the other kernel spends its time on starting and ending. It runs where
`spec.TILES_BY_INNER` names a `TmaTile`, and the probe has found the base tile's bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from consistent_kernels.alignment import aligned
from consistent_kernels.errors import invalid
from consistent_kernels.grouped_linear.spec import TmaTile


@triton.jit(do_not_specialize=["M", "group_stride"])
def _grouped_linear_tma_fwd_kernel(
    x_desc,  # [M, (G - 1) * group_stride + K], tiles [BLOCK_M, BLOCK_K]
    w_desc,  # [G * N, K], tiles [BLOCK_N, BLOCK_K]
    y_desc,  # [M, G * N], tiles [BLOCK_M, BLOCK_N]
    M,
    group_stride,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    # A tile's columns are of one group, and its K ends where a group's ends: nothing is masked.
    tl.static_assert(N % BLOCK_N == 0)
    tl.static_assert(K % BLOCK_K == 0)
    row_blocks = tl.cdiv(M, BLOCK_M)
    tiles = row_blocks * (G * (N // BLOCK_N))
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        # Row blocks of the same columns follow each other: they share the weight in L2.
        row = (tile % row_blocks) * BLOCK_M
        column = (tile // row_blocks) * BLOCK_N
        first = (column // N) * group_stride
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            x = x_desc.load([row, first + start])
            w = w_desc.load([column, start])
            accumulator = tl.dot(x, w.T, accumulator, input_precision="ieee")
        y_desc.store([row, column], accumulator.to(y_desc.dtype))


def fits(tile: TmaTile, weight: torch.Tensor) -> bool:
    """Whether a tile takes weights [G, N, K] of two bytes: whole tiles of N and K alone."""
    columns, inner = weight.shape[1:]
    whole = columns % tile.block_n == 0 and inner % tile.block_k == 0
    return weight.dtype.itemsize == 2 and whole


def launch(x: torch.Tensor, weight: torch.Tensor, tile: TmaTile) -> torch.Tensor:
    """Return x W^T [M, G, N] for x [M, G, K] and weight [G, N, K] contiguous, of two bytes.

    Raises:
        InvalidInputError: the tile does not fit the weight.
    """
    if not fits(tile, weight):
        expected = f"multiples of {tile.block_n} x {tile.block_k} of two bytes"
        raise invalid("grouped_linear", "weight", expected, (weight.dtype, tuple(weight.shape)))
    rows, groups, inner = x.shape
    columns = weight.shape[1]
    y = torch.empty((rows, groups, columns), dtype=x.dtype, device=x.device)
    if not rows:
        return y
    width = (groups - 1) * x.stride(1) + inner
    strided = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= width
    if not strided or x.data_ptr() % 16:
        x = x.new_empty((rows, groups, inner)).copy_(x)
        width = groups * inner
    outputs = groups * columns
    operands = (
        (x, [rows, width], [x.stride(0), 1], [tile.block_m, tile.block_k]),
        (aligned(weight), [outputs, inner], [inner, 1], [tile.block_n, tile.block_k]),
        (y, [rows, outputs], [outputs, 1], [tile.block_m, tile.block_n]),
    )
    programs = tile.resident * _multiprocessors(x.device)
    tiles = -(-rows // tile.block_m) * (outputs // tile.block_n)
    _grouped_linear_tma_fwd_kernel[(min(programs, tiles),)](
        *(TensorDescriptor(*operand) for operand in operands), rows, x.stride(1),
        G=groups, N=columns, K=inner,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PROGRAMS=programs,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter: few programs, each with several tiles
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
