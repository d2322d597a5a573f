"""The FP8 caches in Triton: a maximum and elementwise arithmetic, so no order to choose.

bf16 values travel as 16-bit integers and are widened and rounded on their bits: the same bits in
every compiled form, NaN included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.errors import invalid
from consistent_kernels.kv_cache_fp8.layout import BLOCK_ALIGNMENT, KVLayout
from consistent_kernels.kv_cache_fp8.spec import (
    FP8_MAX,
    GATHER_DESCENDING,
    GATHER_VALUES,
    GATHER_VALUES_V4,
    GATHER_WARPS,
    MIN_AMAX,
    MIN_NORMAL,
)

_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_AMAX = tl.constexpr(MIN_AMAX)
_MIN_NORMAL = tl.constexpr(MIN_NORMAL)


@triton.jit
def widen(bits16):
    """bf16 bits (int16) to fp32."""
    return (bits16.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16_bits(x):
    """fp32 to bf16 bits (int16), nearest even; every NaN is 0x7fc0."""
    bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return tl.where(x == x, bits, 0x7FC0).to(tl.int16)


@triton.jit
def _power_of_two_above(scale):
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def slot_address(cache_ptr, slot, block_stride, BLOCK_SIZE: tl.constexpr):
    """(first byte of the slot's block, place of its token there)."""
    block = slot // BLOCK_SIZE
    return cache_ptr + block * block_stride, slot - block * BLOCK_SIZE


@triton.jit
def store_fp8_groups(
    x,  # [GROUPS_PADDED, GROUP] fp32, values of bf16
    columns,  # [GROUPS_PADDED, GROUP] of x
    inside,  # which of them are FP8 values
    block_ptr,
    token,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOKEN_STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_ROOM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SCALE_FLOOR_LAST: tl.constexpr,  # V3.2: the floor is on the scale, not on the maximum
    UE8M0: tl.constexpr,
):
    """Quantize a token's groups and store values and scales."""
    groups = tl.arange(0, GROUPS_PADDED)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax_bits = tl.max(tl.where(magnitude > 0x7F800000, 0, magnitude), axis=1)
    amax = amax_bits.to(tl.float32, bitcast=True)
    top = tl.full((GROUPS_PADDED,), _FP8_MAX, tl.float32)
    if SCALE_FLOOR_LAST:
        scale = tl.maximum(tl.div_rn(amax, top), _MIN_NORMAL)
    else:
        scale = tl.div_rn(tl.maximum(amax, _MIN_AMAX), top)
    if UE8M0:
        scale = _power_of_two_above(scale)
        # The reciprocal of a power of two is exact, so this is the quotient, for less.
        inverse = tl.div_rn(tl.full((GROUPS_PADDED,), 1.0, tl.float32), scale)
        scaled = x * inverse[:, None]
    else:
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], (GROUPS_PADDED, GROUP)))
    clamped = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
    values = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    values = tl.where(scaled == scaled, values, 0x7F).to(tl.uint8)
    tl.store(block_ptr + token * TOKEN_STEP + columns, values, mask=inside)
    scale_ptr = block_ptr + SCALE_AT + token * SCALE_STEP
    if SCALE_BYTES == 4:
        tl.store(scale_ptr.to(tl.pointer_type(tl.float32)) + groups, scale, groups < GROUPS)
    else:
        exponent = scale.to(tl.int32, bitcast=True) >> 23
        exponent = tl.where(groups < GROUPS, exponent, 0).to(tl.uint8)
        tl.store(scale_ptr + groups, exponent, mask=groups < SCALE_ROOM)


@triton.jit
def _write_kv_fp8_kernel(
    kv_ptr,  # [T, WIDTH] bf16 as int16, row stride kv_stride
    cache_ptr,  # bytes
    slot_ptr,  # [T]
    kv_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    FP8_VALUES: tl.constexpr,
    BF16_VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOKEN_STEP: tl.constexpr,
    BF16_AT: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_ROOM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SCALE_FLOOR_LAST: tl.constexpr,  # V3.2: the floor is on the scale, not on the maximum
    UE8M0: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        block_ptr, token = slot_address(cache_ptr, slot, block_stride, BLOCK_SIZE)
        groups = tl.arange(0, GROUPS_PADDED)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = columns < FP8_VALUES
        x = widen(tl.load(kv_ptr + row * kv_stride + columns, mask=inside, other=0))
        store_fp8_groups(
            x, columns, inside, block_ptr, token, GROUP, GROUPS, GROUPS_PADDED, TOKEN_STEP,
            SCALE_STEP, SCALE_AT, SCALE_ROOM, SCALE_BYTES, SCALE_FLOOR_LAST, UE8M0,
        )  # fmt: skip
        if BF16_VALUES > 0:
            rope = tl.arange(0, BF16_VALUES)
            kept = tl.load(kv_ptr + row * kv_stride + FP8_VALUES + rope)
            rope_ptr = (block_ptr + token * TOKEN_STEP + BF16_AT).to(tl.pointer_type(tl.int16))
            tl.store(rope_ptr + rope, kept)


# Bytes alone come out of it, the same in every compiled form.
@triton.jit(do_not_specialize=["first_row", "indices_stride"])
def _gather_kv_fp8_kernel(
    cache_ptr,  # bytes
    positions_ptr,  # [rows, k] int32, contiguous
    requests_ptr,  # [rows]
    table_ptr,  # [B, blocks] block ids, or [B] first slots
    out_ptr,  # [rows * k, WIDTH] bf16 as int16
    indices_ptr,  # [rows, k] int32, row stride indices_stride, or unused
    entries,
    k,
    table_stride,
    block_stride,
    indices_stride,
    first_row,
    BLOCK_SIZE: tl.constexpr,
    FP8_VALUES: tl.constexpr,
    BF16_VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKEN_STEP: tl.constexpr,
    BF16_AT: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PAGED: tl.constexpr,
    INDICES: tl.constexpr,
    ROWS: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    WIDTH: tl.constexpr = FP8_VALUES + BF16_VALUES
    program = tl.num_programs(0) - 1 - tl.program_id(0) if DESCENDING else tl.program_id(0)
    # 32 bits: 2^31 entries would take 512 GB of out, and a 64-bit division a hundred instructions.
    entry = program * ROWS + tl.arange(0, ROWS)
    inside = entry < entries
    position = tl.load(positions_ptr + entry, mask=inside, other=-1)
    known = position >= 0
    row = entry // k
    request = tl.load(requests_ptr + row, mask=known, other=0).to(tl.int64)
    if PAGED:
        page = position // BLOCK_SIZE
        page = tl.load(table_ptr + request * table_stride + page, mask=known, other=0)
        block_ptr = cache_ptr + page.to(tl.int64) * block_stride
        token = position % BLOCK_SIZE
    else:
        first = tl.load(table_ptr + request, mask=known, other=0).to(tl.int64)
        block_ptr, token = slot_address(cache_ptr, first + position, block_stride, BLOCK_SIZE)
    value_ptr = block_ptr + token * TOKEN_STEP
    scale_ptr = block_ptr + SCALE_AT + token * SCALE_STEP
    columns = tl.arange(0, GROUP)[None, :]
    # All loads before the first store: none waits for another.
    scales = ()
    if SCALE_BYTES == 4:
        for group in tl.static_range(GROUPS):
            place = scale_ptr.to(tl.pointer_type(tl.float32)) + group
            scales += (tl.load(place, mask=known, other=0.0),)
    else:
        # The exponents of a token, eight bytes at a multiple of eight.
        word = tl.load(scale_ptr.to(tl.pointer_type(tl.int64)), mask=known, other=0)
        for group in tl.static_range(GROUPS):
            exponent = (word >> (8 * group)).to(tl.int32) & 0xFF
            bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
            scales += (bits.to(tl.float32, bitcast=True),)
    values = ()
    for group in tl.static_range(GROUPS):
        place = value_ptr[:, None] + group * GROUP + columns
        values += (tl.load(place, mask=known[:, None], other=0),)
    if BF16_VALUES > 0:
        rope = tl.arange(0, BF16_VALUES)[None, :]
        rope_ptr = (value_ptr + BF16_AT).to(tl.pointer_type(tl.int16))
        kept = tl.load(rope_ptr[:, None] + rope, mask=known[:, None], other=0)
    if INDICES:
        place = indices_ptr + row.to(tl.int64) * indices_stride + (entry - row * k)
        tl.store(place, tl.where(known, first_row + entry, -1), mask=inside)
    out_row = out_ptr + entry.to(tl.int64) * WIDTH
    for group in tl.static_range(GROUPS):
        value = values[group].to(tl.float8e4nv, bitcast=True).to(tl.float32)
        value *= scales[group][:, None]
        place = out_row[:, None] + group * GROUP + columns
        tl.store(place, round_to_bf16_bits(value), mask=inside[:, None])
    if BF16_VALUES > 0:
        tl.store(out_row[:, None] + FP8_VALUES + rope, kept, mask=inside[:, None])


def _constants(layout: KVLayout, block_size: int) -> dict[str, int]:
    token_step, bf16_at, scale_step, scale_at = layout.offsets(block_size)
    return {
        "BLOCK_SIZE": block_size,
        "FP8_VALUES": layout.fp8_values,
        "BF16_VALUES": layout.bf16_values,
        "GROUP": layout.group,
        "GROUPS": layout.groups,
        "TOKEN_STEP": token_step,
        "BF16_AT": bf16_at,
        "SCALE_STEP": scale_step,
        "SCALE_AT": scale_at,
        "SCALE_BYTES": layout.scale_bytes,
    }


def gather_rows(layout: KVLayout) -> int:
    """Return the cache entries that one program reads."""
    values = GATHER_VALUES_V4 if layout.name == "v4" else GATHER_VALUES
    return max(32 * GATHER_WARPS * values // layout.group, 1)


def write_constants(layout: KVLayout, block_size: int, scale_format: str) -> dict[str, int]:
    """Return the constexprs of a kernel that writes entries."""
    return _constants(layout, block_size) | {
        "GROUPS_PADDED": triton.next_power_of_2(layout.groups),
        "SCALE_ROOM": layout.scale_room,
        "SCALE_FLOOR_LAST": layout.name == "v32",
        "UE8M0": scale_format == "ue8m0",
    }


def check_alignment(op: str, cache: torch.Tensor) -> None:
    # Here and not in the public function: a compiled graph's tensors have no address.
    if cache.data_ptr() % BLOCK_ALIGNMENT:
        given = f"address {cache.data_ptr():#x}"
        raise invalid(op, "cache", f"aligned to {BLOCK_ALIGNMENT} bytes", given)


def write_kv_fp8_fwd(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    scale_format: str,
) -> None:
    """Launch the write kernel; see `write_kv_fp8`."""
    check_alignment("write_kv_fp8", cache)
    if not len(slot_mapping):
        return
    _write_kv_fp8_kernel[(len(slot_mapping),)](
        kv.view(torch.int16),
        cache,
        slot_mapping.contiguous(),
        kv.stride(0),
        cache.stride(0),
        num_warps=4,
        enable_fp_fusion=False,
        **write_constants(layout, cache.shape[1], scale_format),
    )


def gather_kv_fp8_fwd(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    first_row: int,
    layout: KVLayout,
) -> None:
    """Launch the gather kernel; see `gather_kv_fp8`.

    Args:
        out: [R, K, width] bf16, contiguous.
        indices: [R, K] int32 of unit column stride, or None.
    """
    check_alignment("gather_kv_fp8", cache)
    entries = positions.numel()
    if not entries:
        return
    table = block_table if block_table is not None else starts.contiguous()
    rows = gather_rows(layout)
    _gather_kv_fp8_kernel[(triton.cdiv(entries, rows),)](
        cache,
        positions.contiguous(),
        requests.contiguous(),
        table,
        out.view(torch.int16),
        positions if indices is None else indices,
        entries,
        positions.shape[1],
        table.stride(0),
        cache.stride(0),
        0 if indices is None else indices.stride(0),
        first_row,
        PAGED=block_table is not None,
        INDICES=indices is not None,
        ROWS=rows,
        DESCENDING=GATHER_DESCENDING,
        num_warps=GATHER_WARPS,
        enable_fp_fusion=False,
        **_constants(layout, cache.shape[1]),
    )
