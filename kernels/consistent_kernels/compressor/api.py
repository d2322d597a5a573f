"""Public compressor: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.compressor.reference import (
    compress_bwd_ref,
    compress_ref,
    compressor_state_ref,
)
from consistent_kernels.compressor.spec import IMPLEMENTATIONS
from consistent_kernels.compressor.windows import CompressorParameters
from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.index_range import check_range
from consistent_kernels.kv_cache_fp8 import INDEXER, LAYOUTS, V4, KVLayout, write_kv_fp8
from consistent_kernels.kv_cache_fp8.api import check_cache
from consistent_kernels.rotary.parameters import RopeParameters
from consistent_kernels.rotary.tables import rope_tables

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NO_BOUND = 1 << 31

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "compress(Tensor state, Tensor rows, Tensor positions, Tensor weight, str rope, int ratio, "
    "bool overlap, float norm_eps, ScalarType dtype, str impl) -> Tensor"
)
_LIBRARY.define(
    "compress_to_cache(Tensor state, Tensor rows, Tensor positions, Tensor weight, "
    "Tensor(a!) cache, Tensor slots, str rope, int ratio, bool overlap, float norm_eps, "
    "str layout, str impl) -> ()"
)
_LIBRARY.define(
    "compressor_state(Tensor kv_score, Tensor position_bias, Tensor positions, str impl) -> Tensor"
)
_LIBRARY.define(
    "write_compressor_state(Tensor kv_score, Tensor position_bias, Tensor positions, "
    "Tensor(a!) cache, Tensor slots, str impl) -> ()"
)


def _compress(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    rope: str,
    ratio: int,
    overlap: bool,
    norm_eps: float,
    dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    count("compress", impl)
    params = CompressorParameters(ratio, overlap, weight.shape[0], norm_eps)
    tables = rope_tables(rope, state.device)
    if impl == "reference":
        _check_entry_range("compress", state, rows, positions, tables[0].shape[0])
        return compress_ref(state, rows, positions, weight, *tables, params, dtype)
    require_cuda("compress", impl, state)
    from consistent_kernels.compressor.triton import compress_fwd

    return compress_fwd(state, rows, positions, weight, *tables, params, dtype)


def _compress_to_cache(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    rope: str,
    ratio: int,
    overlap: bool,
    norm_eps: float,
    layout: str,
    impl: str,
) -> None:
    count("compress_to_cache", impl)
    params = CompressorParameters(ratio, overlap, weight.shape[0], norm_eps)
    tables = rope_tables(rope, state.device)
    if impl == "reference":
        kept = (slots >= 0).nonzero().view(-1)
        slots, rows, positions = slots[kept], rows[kept], positions[kept]
        check_range("compress_to_cache", "slots", slots, 0, cache.shape[0] * cache.shape[1])
        _check_entry_range("compress_to_cache", state, rows, positions, tables[0].shape[0])
        entries = compress_ref(state, rows, positions, weight, *tables, params, torch.bfloat16)
        write_kv_fp8(entries, cache, slots, layout=LAYOUTS[layout], impl=impl)
        return
    require_cuda("compress_to_cache", impl, state)
    from consistent_kernels.compressor.triton import compress_to_cache_fwd

    compress_to_cache_fwd(
        state, rows, positions, weight, *tables, cache, slots, params, LAYOUTS[layout]
    )


def _check_entry_range(
    op: str, state: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, max_position: int
) -> None:
    count = state.shape[0]
    check_range(op, "rows", rows, -1, count, f"-1 or a row of state below {count}")
    check_range(
        op, "positions", positions, 0, max_position, f"below rope.max_position {max_position}"
    )


def _compressor_state(
    kv_score: torch.Tensor, position_bias: torch.Tensor, positions: torch.Tensor, impl: str
) -> torch.Tensor:
    count("compressor_state", impl)
    if impl == "reference":
        check_range("compressor_state", "positions", positions, 0, _NO_BOUND)
    # One fp32 addition an element: PyTorch's has the bits of any program's.
    return compressor_state_ref(kv_score, position_bias, positions)


def _write_compressor_state(
    kv_score: torch.Tensor,
    position_bias: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    impl: str,
) -> None:
    count("write_compressor_state", impl)
    if impl == "reference":
        op, kept = "write_compressor_state", (slots >= 0).nonzero().view(-1)
        check_range(op, "slots", slots, -_NO_BOUND, len(cache), f"negative or below {len(cache)}")
        check_range(op, "positions", positions[kept], 0, _NO_BOUND)
        state = compressor_state_ref(kv_score, position_bias, positions)
        cache.index_copy_(0, slots[kept].long(), state[kept])
        return
    require_cuda("write_compressor_state", impl, cache)
    from consistent_kernels.compressor.triton import write_state_fwd

    write_state_fwd(kv_score, position_bias, positions, cache, slots)


_LIBRARY.impl("compress", _compress, "CompositeExplicitAutograd")
_LIBRARY.impl("compress_to_cache", _compress_to_cache, "CompositeExplicitAutograd")
_LIBRARY.impl("compressor_state", _compressor_state, "CompositeExplicitAutograd")
_LIBRARY.impl("write_compressor_state", _write_compressor_state, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::compress", lib=_LIBRARY)
def _(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    rope: str,
    ratio: int,
    overlap: bool,
    norm_eps: float,
    dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    return state.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)


@torch.library.register_fake("consistent_kernels::compress_to_cache", lib=_LIBRARY)
def _(*_: object) -> None:
    return None


@torch.library.register_fake("consistent_kernels::compressor_state", lib=_LIBRARY)
def _(kv_score: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(kv_score.shape, dtype=kv_score.dtype, device=kv_score.device)


@torch.library.register_fake("consistent_kernels::write_compressor_state", lib=_LIBRARY)
def _(*_: object) -> None:
    return None


def _check_fp32(op: str, name: str, value: torch.Tensor, width: int) -> None:
    if value.dim() != 2 or value.dtype != torch.float32 or value.shape[1] != width:
        raise invalid(op, name, f"float32 [n, {width}]", f"{value.dtype} {tuple(value.shape)}")


def _check_integers(op: str, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype not in (torch.int32, torch.int64) or tuple(value.shape) != shape:
        raise invalid(op, name, f"integers of shape {shape}", f"{value.dtype} {tuple(value.shape)}")


def _check_state(
    op: str,
    kv_score: torch.Tensor,
    position_bias: torch.Tensor,
    positions: torch.Tensor,
    impl: str,
) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if position_bias.dim() != 2 or position_bias.dtype != torch.float32 or not len(position_bias):
        raise invalid(
            op,
            "position_bias",
            "float32 [ratio, W], a ratio of at least 1",
            f"{position_bias.dtype} {tuple(position_bias.shape)}",
        )
    _check_fp32(op, "kv_score", kv_score, 2 * position_bias.shape[1])
    _check_integers(op, "positions", positions, (kv_score.shape[0],))
    require_device(op, kv_score.device, position_bias=position_bias, positions=positions)


def _check_entries(
    op: str,
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    rope: RopeParameters,
    params: CompressorParameters,
    impl: str,
) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    _check_fp32(op, "state", state, 2 * params.state_width)
    if not state.is_contiguous():
        raise invalid(op, "state", "contiguous", f"strides {state.stride()}")
    if rows.dtype != torch.int32:
        raise invalid(op, "rows", "torch.int32", rows.dtype)
    if rows.dim() != 2:
        raise invalid(op, "rows", f"[E, {params.tokens}]", tuple(rows.shape))
    _check_integers(op, "rows", rows, (rows.shape[0], params.tokens))
    _check_integers(op, "positions", positions, (rows.shape[0],))
    if tuple(weight.shape) != (params.head_dim,):
        raise invalid(op, "weight", f"of shape ({params.head_dim},)", tuple(weight.shape))
    if not weight.is_floating_point():
        raise invalid(op, "weight", "of a float dtype", weight.dtype)
    require_device(op, state.device, rows=rows, positions=positions, weight=weight)
    if rope.rotary_dim > params.head_dim:
        raise invalid(op, "rope.rotary_dim", f"at most {params.head_dim}", rope.rotary_dim)


def compressor_state(
    kv_score: torch.Tensor, position_bias: torch.Tensor, positions: torch.Tensor, *, impl: str
) -> torch.Tensor:
    """What a token leaves for the entries it takes part in: kv | score + position_bias.

    Args:
        kv_score: [T, 2 W] fp32, kv in the first W columns; W is head_dim, twice that with overlap.
        position_bias: [ratio, W] fp32 (`ape` in vLLM); its row is position % ratio.
        positions: [T] integers inside the request.
        impl: "reference" or "triton".

    Returns:
        [T, 2 W] fp32.

    Raises:
        InvalidInputError: shape or dtype.
    """
    _check_state("compressor_state", kv_score, position_bias, positions, impl)
    return torch.ops.consistent_kernels.compressor_state(kv_score, position_bias, positions, impl)


def compressor_state_bwd(
    grad_state: torch.Tensor, positions: torch.Tensor, ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `compressor_state`: (grad_kv_score [T, 2 W], grad_position_bias [ratio, W]).

    Raises:
        InvalidInputError: shape or dtype.
    """
    op, shape = "compressor_state_bwd", tuple(grad_state.shape)
    if len(shape) != 2 or shape[1] % 2 or not grad_state.is_floating_point():
        raise invalid(
            op, "grad_state", "floats [T, 2 W], an even width", f"{grad_state.dtype} {shape}"
        )
    _check_integers(op, "positions", positions, shape[:1])
    require_device(op, grad_state.device, positions=positions)
    if ratio < 1:
        raise invalid(op, "ratio", "at least 1", ratio)
    width = grad_state.shape[1] // 2
    place = torch.nn.functional.one_hot(positions.long() % ratio, ratio).to(grad_state.dtype)
    grad_state = grad_state.contiguous()
    # A product with a 0-1 matrix: an order that does not follow the scheduling of atomics.
    return grad_state, place.t() @ grad_state[:, width:]


def write_compressor_state(
    kv_score: torch.Tensor,
    position_bias: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    impl: str,
) -> None:
    """cache[slots[t]] = compressor_state of token t, where slots[t] is not negative.

    Args:
        cache: [N, 2 W] fp32 contiguous, the pages of all requests as rows.
        slots: [T] integers; the rest as in `compressor_state`.
    """
    op = "write_compressor_state"
    _check_state(op, kv_score, position_bias, positions, impl)
    _check_fp32(op, "cache", cache, kv_score.shape[1])
    _check_integers(op, "slots", slots, (kv_score.shape[0],))
    require_device(op, kv_score.device, cache=cache, slots=slots)
    if not cache.is_contiguous():
        raise invalid(op, "cache", "contiguous", f"strides {cache.stride()}")
    torch.ops.consistent_kernels.write_compressor_state(
        kv_score, position_bias, positions, cache, slots, impl
    )


def compress(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    *,
    rope: RopeParameters,
    params: CompressorParameters,
    dtype: torch.dtype = torch.bfloat16,
    impl: str,
) -> torch.Tensor:
    """Form compressed entries: softmax-weighted sum over a window's tokens, RMS norm, rotation.

    c = sum_j softmax_j(s_j) kv_j per column over the tokens of a window (with overlap: the window
    before in the first series of columns, its own in the second); entry = round(rotate(c rstd w)).

    Source: DeepSeek-V4 (CSA, HCA); vLLM `compress_norm_rope_store_triton`, up to the quantization,
    which `kv_cache_fp8` does on the result.

    Args:
        state: [N, 2 W] fp32 contiguous, from `compressor_state`, packed or as the rows of pages.
        rows: [E, tokens] int32, rows of state, from `packed_windows` or `paged_windows`; -1 for a
            token that does not exist. Rows that none names are never read. The reference
            refuses a row out of range; on CUDA nobody looks.
        positions: [E] integers: of the first own token of each window, (position // ratio) * ratio,
            below rope.max_position.
        weight: [head_dim], any float dtype (used as fp32).
        rope: its rotary_dim last columns are rotated in adjacent pairs.
        dtype: of the entries.
        impl: "reference" (any device) or "triton" (CUDA; head_dim a power of two).

    Returns:
        [E, head_dim]; zeros where a row of `rows` names nothing.

    Numerics:
        An entry's bits depend on its tokens alone: not on whether they came in one prefill, in
        chunks or one by one, nor on where the state lies.

    Raises:
        InvalidInputError: shape, dtype or layout; with "reference" a row or position out of range.
        UnsupportedError: unknown impl, or a head_dim that it does not serve.
    """
    _check_entries("compress", state, rows, positions, weight, rope, params, impl)
    if dtype not in _DTYPES:
        raise invalid("compress", "dtype", "bfloat16, float16 or float32", dtype)
    return torch.ops.consistent_kernels.compress(
        state, rows, positions, weight, rope.key, params.ratio, params.overlap, params.norm_eps,
        dtype, impl,
    )  # fmt: skip


def compress_to_cache(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    rope: RopeParameters,
    params: CompressorParameters,
    layout: KVLayout,
    impl: str,
) -> None:
    """Form bf16 entries and store them in their FP8 cache: `compress`, then `write_kv_fp8`.

    The same bytes as the two calls, by one kernel, for no entry goes through memory.

    Source: vLLM `compress_norm_rope_store_triton`.

    Args:
        state, rows, positions, weight, rope, params: as in `compress`.
        cache: [blocks, block_size, token_bytes] uint8, of a layout as wide as head_dim.
        slots: [E] integers, where each entry goes; an entry of a negative slot is not formed.
        layout: V4 or INDEXER, in the scale format "ue8m0".
        impl: "reference" or "triton".

    Raises:
        InvalidInputError: shape, dtype or layout.
        UnsupportedError: unknown impl, a layout that is not as wide as head_dim.
    """
    op = "compress_to_cache"
    _check_entries(op, state, rows, positions, weight, rope, params, impl)
    if layout not in (V4, INDEXER) or layout.width != params.head_dim:
        given = f"layout {layout.name!r} for entries of {params.head_dim} columns"
        raise UnsupportedError(op, given, ["v4 for 512 columns", "indexer for 128"])
    check_cache(op, cache, layout)
    _check_integers(op, "slots", slots, (rows.shape[0],))
    require_device(op, state.device, cache=cache, slots=slots)
    torch.ops.consistent_kernels.compress_to_cache(
        state, rows, positions, weight, cache, slots, rope.key, params.ratio, params.overlap,
        params.norm_eps, layout.name, impl,
    )  # fmt: skip


def compress_bwd(
    grad_entries: torch.Tensor,
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    *,
    rope: RopeParameters,
    params: CompressorParameters,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `compress` in fp32; both implementations use the PyTorch form.

    A token takes part in one entry of each series, as `packed_windows` builds them.

    Returns:
        (grad_state [N, 2 W] fp32, grad_weight [head_dim] fp32).
    """
    _check_entries("compress_bwd", state, rows, positions, weight, rope, params, impl)
    shape = (rows.shape[0], params.head_dim)
    if tuple(grad_entries.shape) != shape or not grad_entries.is_floating_point():
        given = f"{grad_entries.dtype} of shape {tuple(grad_entries.shape)}"
        raise invalid("compress_bwd", "grad_entries", f"floats of shape {shape}", given)
    require_device("compress_bwd", state.device, grad_entries=grad_entries)
    tables = rope_tables(rope.key, state.device)
    if impl == "reference":
        _check_entry_range("compress_bwd", state, rows, positions, tables[0].shape[0])
    return compress_bwd_ref(
        grad_entries.contiguous(), state, rows, positions, weight, *tables, params
    )
