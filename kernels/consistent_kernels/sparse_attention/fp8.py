"""Sparse attention straight from FP8 caches: what gather and `sparse_attention` do, in one op."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.index_range import check_range
from consistent_kernels.kv_cache_fp8 import V4, V32, KVLayout, workspace_indices
from consistent_kernels.kv_cache_fp8.api import check_cache
from consistent_kernels.kv_cache_fp8.reference import dequantize_kv_ref, read_slots_ref
from consistent_kernels.sparse_attention.reference import padded_indices, sparse_attention_ref
from consistent_kernels.sparse_attention.spec import ENTRY_TILE, FP8_IMPLEMENTATIONS

Cache = tuple[torch.Tensor, torch.Tensor]
"""(pages [blocks, block_size, bytes] uint8, slots [T, K] int32)."""

_VALUE_WIDTH = 512
_NO_LIMIT = 1 << 62
_LAYOUTS = {layout.width: layout for layout in (V32, V4)}

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "sparse_attention_fp8(Tensor q, Tensor cache, Tensor slots, Tensor? extra_cache, "
    "Tensor? extra_slots, Tensor? sinks, float scale, str impl) -> (Tensor, Tensor)"
)


def read_slots_fp8(cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return the rows that `sparse_attention_fp8` reads: round(q * round_bf16(s)) to bf16.

    FlashMLA rounds a scale before it multiplies (csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh);
    `gather_kv_fp8` keeps it in fp32. V3.2's rows differ by up to 3 * 2^-8 of a value, and a whole
    group by one factor, which moves scores. V4's scales are powers of two: the two ways agree.

    Args:
        cache: pages in `layout`; slots: integers of any shape, negative reads zeros.

    Returns:
        [*slots.shape, width] bf16; plain PyTorch on any device, no bits depend on it.

    Raises:
        InvalidInputError: shape, dtype or layout; on a CPU a slot beyond the cache.
    """
    check_cache("read_slots_fp8", cache, layout)
    if slots.is_floating_point():
        raise invalid("read_slots_fp8", "slots", "integers", slots.dtype)
    flat, slot_count = slots.reshape(-1), cache.shape[0] * cache.shape[1]
    if cache.device.type == "cpu":
        check_range("read_slots_fp8", "slots", flat, -_NO_LIMIT, slot_count, f"below {slot_count}")
    out = torch.zeros((flat.numel(), layout.width), dtype=torch.bfloat16, device=cache.device)
    known = flat >= 0
    values, scale, rope = read_slots_ref(cache, flat[known].long(), layout)
    rounded = scale.to(torch.bfloat16).float()
    out[known] = torch.cat([dequantize_kv_ref(values, rounded, layout), rope], dim=1)
    return out.view(*slots.shape, layout.width)


def _sparse_attention_fp8(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    extra_cache: torch.Tensor | None,
    extra_slots: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    count("sparse_attention_fp8", impl)
    if impl == "flash_mla":
        require_cuda("sparse_attention_fp8", impl, q)
        from consistent_kernels.sparse_attention.fp8_flash_mla import sparse_attention_fp8_fwd

        extra = None if extra_cache is None else (extra_cache, extra_slots)
        return sparse_attention_fp8_fwd(q, (cache, slots), extra, sinks, scale, _VALUE_WIDTH)
    layout = _LAYOUTS[q.shape[2]]
    parts = [(cache, slots)] + ([] if extra_cache is None else [(extra_cache, extra_slots)])
    for name, (pages, columns) in zip(("slots", "slots of extra"), parts, strict=False):
        count_of = pages.shape[0] * pages.shape[1]
        what = f"-1 or a slot below {count_of}"
        check_range("sparse_attention_fp8", name, columns, -1, count_of, what)
    padded = [(pages, padded_indices(columns, ENTRY_TILE)) for pages, columns in parts]
    rows = torch.cat([read_slots_fp8(pages, columns, layout) for pages, columns in padded], dim=1)
    indices = workspace_indices(torch.cat([columns for _, columns in padded], dim=1))
    entries = rows.view(-1, layout.width)
    return sparse_attention_ref(q, entries, indices, sinks, scale, _VALUE_WIDTH)


_LIBRARY.impl("sparse_attention_fp8", _sparse_attention_fp8, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::sparse_attention_fp8", lib=_LIBRARY)
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _width = q.shape
    return (
        q.new_empty((tokens, heads, _VALUE_WIDTH)),
        q.new_empty((tokens, heads), dtype=torch.float32),
    )


def _check_cache(
    op: str, name: str, cache: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, layout: KVLayout
) -> None:
    check_cache(op, cache, layout, name)
    if slots.dim() != 2 or slots.dtype != torch.int32 or slots.shape[0] != len(q):
        raise invalid(
            op,
            f"slots of {name}",
            f"int32 [{len(q)}, K]",
            f"{slots.dtype} {tuple(slots.shape)}",
        )
    require_device(op, q.device, **{name: cache, f"slots of {name}": slots})


def sparse_attention_fp8(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    extra: Cache | None = None,
    sinks: torch.Tensor | None = None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_attention` over entries of FP8 caches, named by physical slots; d_v is 512.

    One read path for prefill, decode and training, as gather and `sparse_attention` are, but
    without a workspace. The two paths are two ops, with a spec each: one contract takes one of
    them. They differ in how a V3.2 entry is read (`read_slots_fp8`). The columns of `slots`, padded
    to whole tiles of 64, come before those of `extra`.

    Source: FlashMLA's sparse FP8 decode (vLLM `flash_mla_with_kvcache`), with a schedule of ours.

    Args:
        q: [T, H, 576] (V3.2) or [T, H, 512] (V4), bf16.
        cache: [blocks, block_size, 656 or 584] uint8, layout V32 or V4 of `kv_cache_fp8`.
        slots: [T, K] int32, page * block_size + offset; -1 names nothing.
        extra: a second (cache, slots), V4 alone: the window's, then the compressed entries'.
        sinks: [H] fp32 or None.
        impl: "reference" (any device) or "flash_mla" (SM90, SM100; at most 128 heads).

    Returns:
        (out [T, H, 512] bf16, lse [T, H] fp32), as `sparse_attention`.

    Raises:
        InvalidInputError: shape, dtype or device; with "reference" also a slot out of range.
        UnsupportedError: unknown impl, or a shape that it does not serve.
    """
    op = "sparse_attention_fp8"
    require_implementation(op, impl, FP8_IMPLEMENTATIONS)
    if q.dim() != 3 or q.dtype != torch.bfloat16 or q.shape[2] not in _LAYOUTS or not q.shape[1]:
        expected = "bfloat16 [T, H, 576 or 512] with at least one head"
        raise invalid(op, "q", expected, f"{q.dtype} {tuple(q.shape)}")
    layout = _LAYOUTS[q.shape[2]]
    _check_cache(op, "cache", cache, slots, q, layout)
    if extra is not None:
        if layout is not V4:
            raise invalid(op, "extra", "None for the V3.2 layout", "a second cache")
        _check_cache(op, "extra", *extra, q, layout)
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != q.shape[1:2]):
        raise invalid(op, "sinks", f"float32 [{q.shape[1]}]", f"{sinks.dtype} {tuple(sinks.shape)}")
    require_device(op, q.device, sinks=sinks)
    more = (None, None) if extra is None else extra
    return torch.ops.consistent_kernels.sparse_attention_fp8(
        q, cache, slots, *more, sinks, scale, impl
    )
