"""The FP8 caches in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.kv_cache_fp8.layout import KVLayout
from consistent_kernels.kv_cache_fp8.spec import FP8_MAX, MIN_AMAX, MIN_NORMAL


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # On CUDA, dividing by a Python number multiplies by its reciprocal.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def group_scales(amax: torch.Tensor, layout: KVLayout, scale_format: str) -> torch.Tensor:
    """fp32 scales of groups with the given fp32 maxima of magnitudes."""
    top = _constant(FP8_MAX, amax)
    if layout.name == "v32":
        return (amax / top).clamp_min(MIN_NORMAL)
    scale = amax.clamp_min(MIN_AMAX) / top
    if scale_format == "fp32":
        return scale
    bits = scale.view(torch.int32)
    # An infinite maximum stays infinite: exponent 255, mantissa 0.
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).int()
    return (exponent << 23).view(torch.float32)


def quantize_kv_ref(
    kv: torch.Tensor, layout: KVLayout, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the FP8 part of rows.

    Args:
        kv: [T, width] bf16.

    Returns:
        (q [T, fp8_values] uint8, the e4m3 bytes; s [T, groups] fp32).
    """
    x = kv[:, : layout.fp8_values].float().unflatten(1, (layout.groups, layout.group))
    amax = torch.where(x.isnan(), _constant(0.0, x), x.abs()).amax(-1)
    scale = group_scales(amax, layout, scale_format)
    scaled = x / scale[:, :, None]
    values = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # The cast of a NaN keeps its sign on CPU; PTX's conversion gives 0x7f.
    return values.masked_fill(scaled.isnan(), 0x7F).flatten(1), scale


def dequantize_kv_ref(values: torch.Tensor, scale: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """round(q * s) [..., fp8_values] bf16.

    Args:
        values: [..., fp8_values] e4m3 bytes; scale: [..., groups] fp32.
    """
    q = values.view(torch.float8_e4m3fn).float().unflatten(-1, (layout.groups, layout.group))
    product = q * scale[..., None]
    # One NaN on every device: casts differ in its bits.
    rounded = product.to(torch.bfloat16).masked_fill(product.isnan(), float("nan"))
    return rounded.flatten(-2)


def _parts(
    cache: torch.Tensor, layout: KVLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [blocks, block_size, bytes] of the e4m3 values, the bf16 values and the scales."""
    blocks, size, _ = cache.shape
    token_step, bf16_at, scale_step, scale_at = layout.offsets(size)
    step, first = cache.stride(0), cache.storage_offset()

    def part(at: int, token: int, count: int) -> torch.Tensor:
        return cache.as_strided((blocks, size, count), (step, token, 1), first + at)

    return (
        part(0, token_step, layout.fp8_values),
        part(bf16_at, token_step, 2 * layout.bf16_values),
        part(scale_at, scale_step, layout.scale_room),
    )


def write_kv_fp8_ref(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    scale_format: str,
) -> None:
    """Quantize rows and store their bytes; a negative slot is skipped.

    Args:
        kv: [T, width] bf16; cache: [blocks, block_size, token_bytes] uint8; slot_mapping: [T].
    """
    kept = slot_mapping >= 0
    slots, kv = slot_mapping[kept].to(torch.int64), kv[kept]
    where = torch.div(slots, cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]
    values_part, bf16_part, scale_part = _parts(cache, layout)
    values, scale = quantize_kv_ref(kv, layout, scale_format)
    values_part[where] = values
    if layout.bf16_values:
        bf16_part[where] = kv[:, layout.fp8_values :].contiguous().view(torch.uint8)
    # A lone group has any stride it likes and still counts as contiguous: a copy has stride 1.
    stored = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if layout.scale_bytes == 1:
        stored = scale.new_zeros((len(scale), layout.scale_room), dtype=torch.uint8)
        stored[:, : layout.groups] = (scale.view(torch.int32) >> 23).to(torch.uint8)
    scale_part[where] = stored


def read_slots_ref(
    cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q [n, fp8_values] uint8, s [n, groups] fp32, bf16 part [n, bf16_values]) of slots."""
    where = torch.div(slots, cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]
    values_part, bf16_part, scale_part = _parts(cache, layout)
    values, rope = values_part[where], bf16_part[where]
    rope = rope.view(torch.bfloat16) if layout.bf16_values else rope.bfloat16()
    stored = scale_part[where][:, : layout.groups * layout.scale_bytes].contiguous()
    if layout.scale_bytes == 4:
        return values, stored.view(torch.float32), rope
    # 2^(e - 127); the exponent 0 stands for 2^-127, which is subnormal.
    exponent = stored.to(torch.int32)
    bits = torch.where(exponent == 0, torch.full_like(exponent, 1 << 22), exponent << 23)
    return values, bits.view(torch.float32), rope


def physical_slots(
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
    block_size: int,
) -> torch.Tensor:
    """Slots of positions inside their requests; negative stays negative.

    Args:
        positions: [R, K]; requests: [R].
        block_table: [B, blocks] of paged requests, or None.
        starts: [B] first slot of contiguous requests, where block_table is None.
    """
    known = positions >= 0
    position = positions.to(torch.int64).clamp_min(0)
    request = requests.to(torch.int64).clamp_min(0)[:, None].expand_as(position)
    if block_table is None:
        slots = starts.to(torch.int64)[request] + position
    else:
        block = torch.div(position, block_size, rounding_mode="floor")
        # An absent entry reads block 0, which its row throws away.
        block = torch.where(known, block, torch.zeros_like(block))
        slots = block_table.to(torch.int64)[request, block] * block_size + position % block_size
    return torch.where(known, slots, torch.full_like(slots, -1))


def gather_kv_fp8_ref(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
    layout: KVLayout,
) -> torch.Tensor:
    """Rows of the given positions, dequantized; zeros where a position is negative.

    Args:
        positions: [R, K]; requests: [R]; block_table, starts: as in `physical_slots`.

    Returns:
        [R, K, width] bf16.
    """
    slots = physical_slots(positions, requests, block_table, starts, cache.shape[1]).flatten()
    out = torch.zeros((slots.numel(), layout.width), dtype=torch.bfloat16, device=cache.device)
    known = slots >= 0
    values, scale, rope = read_slots_ref(cache, slots[known], layout)
    out[known] = torch.cat([dequantize_kv_ref(values, scale, layout), rope], dim=1)
    return out.view(*positions.shape, layout.width)
