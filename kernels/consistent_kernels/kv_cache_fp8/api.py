"""Public FP8 cache: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.kv_cache_fp8.layout import (
    BLOCK_ALIGNMENT,
    INDEXER,
    LAYOUTS,
    V4,
    KVLayout,
)
from consistent_kernels.kv_cache_fp8.reference import (
    gather_kv_fp8_ref,
    physical_slots,
    read_slots_ref,
    write_kv_fp8_ref,
)
from consistent_kernels.kv_cache_fp8.spec import IMPLEMENTATIONS
from consistent_kernels.kv_cache_fp8.workspace import workspace_indices

_SCALE_FORMATS = {"v32": ("fp32",), "v4": ("ue8m0",), "indexer": ("fp32", "ue8m0")}

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "write_kv_fp8(Tensor kv, Tensor(a!) cache, Tensor slot_mapping, str layout, "
    "str scale_format, str impl) -> ()"
)
_LIBRARY.define(
    "gather_kv_fp8(Tensor cache, Tensor positions, Tensor requests, Tensor? block_table, "
    "Tensor? starts, Tensor(a!) out, Tensor(b!)? indices, int first_row, str layout, str impl) "
    "-> ()"
)


def _write_kv_fp8(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    scale_format: str,
    impl: str,
) -> None:
    count("write_kv_fp8", impl)
    if impl == "reference":
        _check_below("write_kv_fp8", "slot_mapping", slot_mapping, cache.shape[0] * cache.shape[1])
        write_kv_fp8_ref(kv, cache, slot_mapping, LAYOUTS[layout], scale_format)
        return
    require_cuda("write_kv_fp8", impl, cache)
    from consistent_kernels.kv_cache_fp8.triton import write_kv_fp8_fwd

    write_kv_fp8_fwd(kv, cache, slot_mapping, LAYOUTS[layout], scale_format)


def _gather_kv_fp8(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    first_row: int,
    layout: str,
    impl: str,
) -> None:
    count("gather_kv_fp8", impl)
    if impl == "reference":
        _check_reach("gather_kv_fp8", cache, positions, requests, block_table, starts)
        args = (cache, positions, requests, block_table, starts, LAYOUTS[layout])
        out.copy_(gather_kv_fp8_ref(*args))
        if indices is not None:
            rows = workspace_indices(positions)
            indices.copy_(torch.where(rows >= 0, rows + first_row, -1))
        return
    require_cuda("gather_kv_fp8", impl, cache)
    from consistent_kernels.kv_cache_fp8.triton import gather_kv_fp8_fwd

    arguments = (cache, positions, requests, block_table, starts, out, indices, first_row)
    if impl == "cuda" and layout == V4.name:
        from consistent_kernels.kv_cache_fp8.cuda import gather_v4_fwd

        gather_v4_fwd(*arguments)
    else:
        gather_kv_fp8_fwd(*arguments, LAYOUTS[layout])


def _check_below(op: str, name: str, index: torch.Tensor, bound: int) -> None:
    if index.numel() and int(index.max()) >= bound:
        raise invalid(op, name, f"below {bound}", int(index.max()))


def _check_not_negative(op: str, name: str, index: torch.Tensor) -> None:
    if index.numel() and int(index.min()) < 0:
        raise invalid(op, name, "at least 0 where a position names an entry", int(index.min()))


def _check_reach(
    op: str,
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> None:
    """Raise where an index points outside; reads values, so not for a GPU's step."""
    places = block_table if block_table is not None else starts
    _check_below(op, "requests", requests, len(places))
    known = positions >= 0
    _check_not_negative(op, "requests", requests[known.any(1)])
    slots = cache.shape[0] * cache.shape[1]
    if block_table is not None:
        _check_below(op, "positions", positions, block_table.shape[1] * cache.shape[1])
    reached = physical_slots(positions, requests, block_table, starts, cache.shape[1])
    name = "block_table" if starts is None else "starts"
    _check_below(op, name, reached, slots)
    _check_not_negative(op, name, reached[known])


_LIBRARY.impl("write_kv_fp8", _write_kv_fp8, "CompositeExplicitAutograd")
_LIBRARY.impl("gather_kv_fp8", _gather_kv_fp8, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::write_kv_fp8", lib=_LIBRARY)
def _(kv: torch.Tensor, *_: object) -> None:
    return None


@torch.library.register_fake("consistent_kernels::gather_kv_fp8", lib=_LIBRARY)
def _(cache: torch.Tensor, *_: object) -> None:
    return None


def new_cache(
    blocks: int, block_size: int, layout: KVLayout, device: torch.device | str
) -> torch.Tensor:
    """Return a zeroed cache [blocks, block_size, token_bytes] uint8 (a trainer's private copy).

    Raises:
        InvalidInputError: a size that is none.
    """
    if blocks < 0 or block_size < 1:
        given = f"{blocks}, {block_size}"
        raise invalid("new_cache", "blocks, block_size", "at least 0 and 1", given)
    shape = (blocks, block_size, layout.token_bytes)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def check_cache(op: str, cache: torch.Tensor, layout: KVLayout, name: str = "cache") -> None:
    if cache.dim() != 3 or cache.dtype != torch.uint8 or cache.shape[2] != layout.token_bytes:
        raise invalid(
            op,
            name,
            f"uint8 of shape [blocks, block_size, {layout.token_bytes}] for {layout.name}",
            f"{cache.dtype} of shape {tuple(cache.shape)}",
        )
    step, size = cache.stride(0), cache.shape[1]
    packed = cache.stride()[1:] == (layout.token_bytes, 1)
    if not packed or step < size * layout.token_bytes or step % BLOCK_ALIGNMENT:
        raise invalid(
            op,
            name,
            f"packed inside a block, blocks a multiple of {BLOCK_ALIGNMENT} bytes apart",
            f"strides {tuple(cache.stride())}",
            "Take a block size that is a multiple of 16",
        )


def _check_index(op: str, name: str, index: torch.Tensor, dims: int, like: torch.Tensor) -> None:
    if index.dim() != dims or index.dtype not in (torch.int32, torch.int64):
        raise invalid(op, name, f"{dims}-D int32 or int64", f"{index.dim()}-D {index.dtype}")
    if index.device != like.device:
        raise invalid(op, name, f"on {like.device}", index.device)


def write_kv_fp8(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: KVLayout,
    impl: str,
    scale_format: str | None = None,
) -> None:
    """Quantize rows and store them in their slots; a negative slot is skipped.

    Source: vLLM's concat_and_cache_ds_mla and indexer_k_quant_and_cache (csrc/cache_kernels.cu)
    and quantize_and_insert_k_cache (V4), the same bytes for finite rows; see `spec.SPEC`.

    Args:
        kv: [T, layout.width] bf16, unit column stride: latent or nope part first, RoPE part last.
        cache: [blocks, block_size, token_bytes] uint8; blocks may be padded.
        slot_mapping: [T] int32 or int64, block * block_size + offset, or -1.
        layout: V32, V4 or INDEXER.
        impl: "reference" (any device), "triton" or "cuda" (CUDA; Triton's write); the same bytes.
        scale_format: None for the layout's own; INDEXER takes "fp32" or "ue8m0" (the model's
            `scale_fmt`) and defaults to "ue8m0".

    Numerics:
        A row's bytes depend on that row alone.

    Raises:
        InvalidInputError: shape, dtype, layout or device; with "reference" also a slot beyond the
            cache (on a GPU that would cost a synchronization: there it is the caller's to hold).
        UnsupportedError: unknown impl or scale_format.
    """
    op = "write_kv_fp8"
    require_implementation(op, impl, IMPLEMENTATIONS)
    formats = _SCALE_FORMATS[layout.name]
    scale_format = scale_format or formats[-1]
    if scale_format not in formats:
        raise UnsupportedError(op, f"scale_format {scale_format!r} for {layout.name}", formats)
    check_cache(op, cache, layout)
    if kv.dim() != 2 or kv.dtype != torch.bfloat16 or kv.shape[1] != layout.width:
        given = f"{kv.dtype} of shape {tuple(kv.shape)}"
        raise invalid(op, "kv", f"bfloat16 of shape [T, {layout.width}]", given)
    if kv.stride(1) != 1:
        raise invalid(op, "kv", "of unit column stride", tuple(kv.stride()))
    if kv.device != cache.device:
        raise invalid(op, "kv", f"on {cache.device}", kv.device)
    _check_index(op, "slot_mapping", slot_mapping, 1, cache)
    if len(slot_mapping) > len(kv):
        raise invalid(op, "slot_mapping", f"at most {len(kv)} slots", len(slot_mapping))
    torch.ops.consistent_kernels.write_kv_fp8(
        kv[: len(slot_mapping)], cache, slot_mapping, layout.name, scale_format, impl
    )


def gather_kv_fp8(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    *,
    layout: KVLayout,
    impl: str,
    block_table: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    first_row: int = 0,
) -> torch.Tensor:
    """Dequantized rows at positions of their requests: round(q * s) to bf16, zeros for -1.

    The one way from the cache to attention, in prefill, decode and training. Selected entries:
    positions [T, k] from `sparse_topk`. Whole contexts: positions [B, longest] with -1 beyond a
    request's length.

    Source: vLLM's cp_gather_and_upconvert_fp8_kv_cache and dequantize_and_gather_k_cache.

    Args:
        cache: [blocks, block_size, token_bytes] uint8.
        positions: [R, K] int32, inside the request; negative ones read nothing.
        requests: [R] int32, each row's request.
        layout: V32, V4 or INDEXER.
        impl: "reference", "triton" or "cuda" (V4 in CUDA C++, the others in Triton); the same bits.
        block_table: [B, max blocks] int32 of paged requests; entries that no position needs may
            hold anything.
        starts: [B], instead of a block table: first slot of each request in a contiguous cache.
        out: [R, K, width] bf16 contiguous to write into (a workspace), or None.
        indices: [R, K] int32 of unit column stride to write `workspace_indices(positions)` into,
            plus `first_row` where not -1, or None: what names the rows of `out` to attention where
            `out` begins at row `first_row` of the workspace.

    Returns:
        [R, K, width] bf16: `out`, or a new tensor.

    Raises:
        InvalidInputError: shape, dtype, layout or device; both or neither of block_table, starts;
            with "reference" also an index out of range.
        UnsupportedError: unknown impl.
    """
    op = "gather_kv_fp8"
    require_implementation(op, impl, IMPLEMENTATIONS)
    check_cache(op, cache, layout)
    _check_places(op, cache, positions, requests, block_table, starts)
    shape = (*positions.shape, layout.width)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=cache.device)
    elif out.shape != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        given = f"{out.dtype} of shape {tuple(out.shape)}, contiguous={out.is_contiguous()}"
        raise invalid(op, "out", f"contiguous bfloat16 of shape {shape}", given)
    require_device(op, cache.device, out=out)
    if indices is not None:
        if indices.dtype != torch.int32 or indices.shape != positions.shape:
            given = f"{indices.dtype} {tuple(indices.shape)}"
            raise invalid(op, "indices", f"int32 of shape {tuple(positions.shape)}", given)
        if indices.stride(1) != 1 or indices.device != cache.device:
            given = f"strides {indices.stride()} on {indices.device}"
            raise invalid(op, "indices", f"of unit column stride on {cache.device}", given)
    torch.ops.consistent_kernels.gather_kv_fp8(
        cache, positions, requests, block_table, starts, out, indices, first_row, layout.name, impl
    )
    return out


def _check_places(
    op: str,
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> None:
    _check_index(op, "positions", positions, 2, cache)
    _check_index(op, "requests", requests, 1, cache)
    if len(requests) != len(positions):
        raise invalid(op, "requests", f"of shape ({len(positions)},)", tuple(requests.shape))
    if (block_table is None) == (starts is None):
        given = "both" if starts is not None else "neither"
        raise invalid(op, "block_table, starts", "one of the two", given)
    if block_table is not None:
        _check_index(op, "block_table", block_table, 2, cache)
        if block_table.stride(1) != 1:
            raise invalid(op, "block_table", "of unit column stride", block_table.stride())
    else:
        _check_index(op, "starts", starts, 1, cache)


def gather_indexer_k(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexer keys of given positions as they are stored; bytes only, so on any device in PyTorch.

    Args:
        cache, positions, requests, block_table, starts: as in `gather_kv_fp8`; no -1.

    Returns:
        (k [R, K, 128] float8_e4m3fn, scale [R, K] fp32).

    Raises:
        InvalidInputError: as `gather_kv_fp8`; on a CPU an index out of range, -1 among them.
    """
    op = "gather_indexer_k"
    check_cache(op, cache, INDEXER)
    _check_places(op, cache, positions, requests, block_table, starts)
    if cache.device.type == "cpu":
        if positions.numel() and int(positions.min()) < 0:
            raise invalid(op, "positions", "at least 0", int(positions.min()))
        _check_reach(op, cache, positions, requests, block_table, starts)
    slots = physical_slots(positions, requests, block_table, starts, cache.shape[1])
    values, scale, _ = read_slots_ref(cache, slots.flatten(), INDEXER)
    shape = positions.shape
    return values.view(torch.float8_e4m3fn).view(*shape, INDEXER.width), scale.reshape(shape)


def round_trip_kv_fp8(
    kv: torch.Tensor, *, layout: KVLayout, impl: str, block_size: int = 64
) -> torch.Tensor:
    """Rows as attention reads them back: written to a private contiguous cache and gathered.

    What a trainer does with every layer's kv; the same kernels as the engine's, so the same bits.

    Args:
        kv: [T, layout.width] bf16.
        block_size: of the private cache; moves no bits.

    Returns:
        [T, layout.width] bf16.
    """
    if block_size < 1:
        raise invalid("round_trip_kv_fp8", "block_size", "at least 1", block_size)
    tokens = len(kv)
    cache = new_cache(max(1, -(-tokens // block_size)), block_size, layout, kv.device)
    slots = torch.arange(tokens, dtype=torch.int32, device=kv.device)
    write_kv_fp8(kv, cache, slots, layout=layout, impl=impl)
    zero = torch.zeros(1, dtype=torch.int32, device=kv.device)
    rows = gather_kv_fp8(cache, slots[None], zero, layout=layout, impl=impl, starts=zero)
    return rows[0]
