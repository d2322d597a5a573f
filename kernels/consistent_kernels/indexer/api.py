"""Public index scores: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.index_range import check_range
from consistent_kernels.indexer.layout import new_scores
from consistent_kernels.indexer.reference import indexer_scores_ref, row_scores_ref
from consistent_kernels.indexer.spec import HEAD_DIM, IMPLEMENTATIONS
from consistent_kernels.kv_cache_fp8 import INDEXER, gather_indexer_k
from consistent_kernels.quantization import quantize_rows
from consistent_kernels.quantization.spec import IMPLEMENTATIONS as QUANTIZATIONS

_MIN_TRITON_HEADS = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "indexer_scores(Tensor q, Tensor weights, Tensor k, Tensor k_scale, Tensor starts, "
    "Tensor ends, str impl) -> Tensor"
)
_LIBRARY.define(
    "indexer_scores_paged(Tensor q, Tensor weights, Tensor cache, Tensor block_table, "
    "Tensor? requests, Tensor context_lens, Tensor? schedule, int columns, str impl) -> Tensor"
)
_LIBRARY.define(
    "fold_indexer_weights(Tensor weights, Tensor q_scale, float softmax_scale, float head_scale) "
    "-> Tensor"
)


def _fold_indexer_weights(
    weights: torch.Tensor, q_scale: torch.Tensor, softmax_scale: float, head_scale: float
) -> torch.Tensor:
    folded = weights.float() * q_scale * softmax_scale * head_scale
    return folded.contiguous()  # a compiled graph asserts the strides of the fake


_LIBRARY.impl("fold_indexer_weights", _fold_indexer_weights, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::fold_indexer_weights", lib=_LIBRARY)
def _(weights: torch.Tensor, q_scale: torch.Tensor, *_: float) -> torch.Tensor:
    return torch.empty_like(q_scale)


def _scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    impl: str,
) -> torch.Tensor:
    count("indexer_scores", impl)
    if impl == "reference":
        wrong = (starts < 0) | (ends < starts) | (ends > len(k))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            given = f"{int(starts[row])}, {int(ends[row])} in row {row}"
            expected = f"0 <= start <= end <= {len(k)}"
            raise invalid("indexer_scores", "starts, ends", expected, given)
        return indexer_scores_ref(q, weights, k, k_scale, starts, ends)
    if impl == "deep_gemm":
        from consistent_kernels.indexer.deep_gemm import indexer_scores_deep_gemm

        return indexer_scores_deep_gemm(q, weights, k, k_scale, starts, ends)
    require_cuda("indexer_scores", impl, q)
    from consistent_kernels.indexer.triton import indexer_scores_fwd

    return indexer_scores_fwd(q, weights, k, k_scale, starts, ends)


def _scores_paged(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor | None,
    context_lens: torch.Tensor,
    schedule: torch.Tensor | None,
    columns: int,
    impl: str,
) -> torch.Tensor:
    count("indexer_scores_paged", impl)
    if impl == "deep_gemm":
        from consistent_kernels.indexer.deep_gemm import indexer_scores_paged_deep_gemm

        return indexer_scores_paged_deep_gemm(
            q, weights, cache, block_table, requests, context_lens, schedule, columns
        )
    if requests is None:
        requests = torch.arange(len(q), dtype=torch.int32, device=q.device)
    if impl == "reference":
        _check_pages(cache, block_table, requests, context_lens, columns)
        scores = new_scores(q, columns, paged=True).fill_(float("-inf"))
        for row, length in enumerate(context_lens.tolist()):
            place = torch.arange(length, device=q.device)[None]
            k, k_scale = gather_indexer_k(
                cache, place, requests[row : row + 1], block_table=block_table
            )
            scores[row, : place.shape[1]] = row_scores_ref(q[row], weights[row], k[0], k_scale[0])
        return scores
    require_cuda("indexer_scores_paged", impl, q)
    from consistent_kernels.indexer.triton import indexer_scores_paged_fwd

    return indexer_scores_paged_fwd(q, weights, cache, block_table, requests, context_lens, columns)


_LIBRARY.impl("indexer_scores", _scores, "CompositeExplicitAutograd")
_LIBRARY.impl("indexer_scores_paged", _scores_paged, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::indexer_scores", lib=_LIBRARY)
def _(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, *_: object) -> torch.Tensor:
    return new_scores(q, k.shape[0], paged=False)


@torch.library.register_fake("consistent_kernels::indexer_scores_paged", lib=_LIBRARY)
def _(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor | None,
    context_lens: torch.Tensor,
    schedule: torch.Tensor | None,
    columns: int,
    impl: str,
) -> torch.Tensor:
    return new_scores(q, columns, paged=True)


def _check_queries(op: str, q: torch.Tensor, weights: torch.Tensor, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if q.dim() != 3 or q.dtype != torch.float8_e4m3fn or q.shape[2] != HEAD_DIM:
        given = f"{q.dtype} of shape {tuple(q.shape)}"
        raise invalid(op, "q", f"float8_e4m3fn of shape [T, H, {HEAD_DIM}]", given)
    heads = q.shape[1]
    if heads == 0:
        raise invalid(op, "q", f"[T, H, {HEAD_DIM}] with at least one head", tuple(q.shape))
    if impl == "triton" and (heads < _MIN_TRITON_HEADS or heads & (heads - 1)):
        raise invalid(op, "heads", f"a power of two from {_MIN_TRITON_HEADS} for triton", heads)
    if weights.dtype != torch.float32 or weights.shape != q.shape[:2]:
        given = f"{weights.dtype} of shape {tuple(weights.shape)}"
        raise invalid(op, "weights", f"float32 of shape {tuple(q.shape[:2])}", given)
    if weights.device != q.device:
        raise invalid(op, "weights", f"on {q.device}", weights.device)


def _check_pages(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    context_lens: torch.Tensor,
    columns: int,
) -> None:
    """Raise where a length, a request or a page that a key needs points outside; on the host."""
    op, size = "indexer_scores_paged", cache.shape[1]
    bound = min(columns, block_table.shape[1] * size)
    check_range(op, "context_lens", context_lens, 0, bound + 1)
    check_range(op, "requests", requests, 0, len(block_table))
    used = -(-context_lens.long() // size)
    needed = torch.arange(block_table.shape[1], device=used.device) < used[:, None]
    pages = torch.where(needed, block_table[requests.long()], 0)
    check_range(op, "block_table[requests]", pages, 0, max(len(cache), 1))


def _check_rows(op: str, name: str, index: torch.Tensor, q: torch.Tensor) -> None:
    if index.shape != q.shape[:1] or index.dtype not in (torch.int32, torch.int64):
        given = f"{index.dtype} of shape {tuple(index.shape)}"
        raise invalid(op, name, f"int32 or int64 of shape {tuple(q.shape[:1])}", given)
    if index.device != q.device:
        raise invalid(op, name, f"on {q.device}", index.device)


def quantize_indexer_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    softmax_scale: float,
    head_scale: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the indexer's queries and fold their scales into the head weights.

    Source: vLLM's Indexer.forward (models/deepseek_v2.py): per_token_group_quant_fp8 with UE8M0
    scales, then weights * q_scale * softmax_scale * head_scale. The scales are powers of two. The
    kernels that join this with the rotation give the same bytes but for heads whose largest value
    lies below their floor or ours: 1e-4 in V4's, 448e-10 here (V3.2's has 1e-10).

    Args:
        q: [T, H, 128] bf16, after RoPE; weights: [T, H], any float dtype (used as fp32).
        softmax_scale: 128^-0.5; head_scale: H^-0.5.
        impl: of `quantize_rows`.

    Returns:
        (q [T, H, 128] float8_e4m3fn, weights [T, H] fp32). Neither is differentiable.

    Raises:
        InvalidInputError: shape, dtype or device. UnsupportedError: unknown impl.
    """
    op = "quantize_indexer_q"
    require_implementation(op, impl, QUANTIZATIONS)
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or q.dtype not in _FLOATS:
        given = f"{q.dtype} of shape {tuple(q.shape)}"
        expected = f"bfloat16, float16 or float32 of shape [T, H, {HEAD_DIM}]"
        raise invalid(op, "q", expected, given)
    if weights.shape != q.shape[:2] or not weights.is_floating_point():
        given = f"{weights.dtype} of shape {tuple(weights.shape)}"
        raise invalid(op, "weights", f"floats of shape {tuple(q.shape[:2])}", given)
    require_device(op, q.device, weights=weights)
    tokens, heads, dim = q.shape
    with torch.no_grad():
        values, scale = quantize_rows(
            q.reshape(tokens * heads, dim), scale_format="ue8m0", impl=impl
        )
        folded = torch.ops.consistent_kernels.fold_indexer_weights(
            weights, scale.view(tokens, heads), softmax_scale, head_scale
        )
    return values.view(tokens, heads, dim), folded


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    impl: str,
) -> torch.Tensor:
    """score[t, j] = s_k[j] * sum_h w[t, h] * relu(q[t, h] . k[j]) over packed keys.

    Source: the lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556); DeepGEMM's fp8_mqa_logits.
    Prefill and training. Not differentiable: by default no gradient flows into the indexer.

    Args:
        q: [T, H, 128] float8_e4m3fn; weights: [T, H] fp32; both from `quantize_indexer_q`.
        k: [N, 128] float8_e4m3fn; k_scale: [N] fp32; the keys of all requests one after another.
        starts, ends: [T] int32 or int64: the keys that a query sees, as rows of k.
        impl: "reference" (any device), "triton" (CUDA; H a power of two from 16) or "deep_gemm"
            (CUDA; H 32, 64 or 128; pages of 64), which a probe must have found to give one set of
            bits here.

    Returns:
        [T, N] fp32, for `sparse_topk` with the same starts and ends. Columns outside a row's range
        may hold anything.

    Numerics:
        A score's bits depend on its query and its key alone; equal to `indexer_scores_paged`.

    Raises:
        InvalidInputError: shape, dtype, layout or device; with "reference" also a range outside k.
        UnsupportedError: unknown impl, or one that this machine cannot run.
        MissingBinaryError: "deep_gemm" without vLLM's CUDA wheel.
    """
    op = "indexer_scores"
    _check_queries(op, q, weights, impl)
    if k.dim() != 2 or k.dtype != torch.float8_e4m3fn or k.shape[1] != HEAD_DIM:
        given = f"{k.dtype} of shape {tuple(k.shape)}"
        raise invalid(op, "k", f"float8_e4m3fn of shape [N, {HEAD_DIM}]", given)
    if k_scale.dtype != torch.float32 or k_scale.shape != k.shape[:1]:
        given = f"{k_scale.dtype} of shape {tuple(k_scale.shape)}"
        raise invalid(op, "k_scale", f"float32 of shape {tuple(k.shape[:1])}", given)
    if k.device != q.device or k_scale.device != q.device:
        raise invalid(op, "k, k_scale", f"on {q.device}", f"{k.device}, {k_scale.device}")
    _check_rows(op, "starts", starts, q)
    _check_rows(op, "ends", ends, q)
    return torch.ops.consistent_kernels.indexer_scores(q, weights, k, k_scale, starts, ends, impl)


def indexer_scores_paged(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor | None,
    context_lens: torch.Tensor,
    *,
    columns: int,
    impl: str,
    schedule: torch.Tensor | None = None,
) -> torch.Tensor:
    """`indexer_scores` over keys in pages, columns being positions; the same bits. Decode.

    Source: DeepGEMM's fp8_paged_mqa_logits.

    Args:
        q, weights: as in `indexer_scores`.
        cache: [blocks, block_size, 132] uint8, layout INDEXER of kv_cache_fp8.
        block_table: [B, max blocks] int32; entries that no key needs may hold anything.
        requests: [T], each query's request; None where row t of block_table is that of query t.
        context_lens: [T] keys that a query sees, from position 0.
        columns: bound of context_lens known on the host (max_model_len).
        impl: as in `indexer_scores`.
        schedule: from `indexer_schedule` of the same context_lens, once a step for all layers; None
            computes it here.

    Returns:
        [T, columns] fp32, for `sparse_topk` with starts 0 and ends context_lens.

    Numerics, Raises: as `indexer_scores`; with "reference" also a length, request or page that is
        out of range.
    """
    op = "indexer_scores_paged"
    _check_queries(op, q, weights, impl)
    if cache.dim() != 3 or cache.dtype != torch.uint8 or cache.shape[2] != INDEXER.token_bytes:
        given = f"{cache.dtype} of shape {tuple(cache.shape)}"
        raise invalid(
            op, "cache", f"uint8 of shape [blocks, block_size, {INDEXER.token_bytes}]", given
        )
    if cache.stride(0) % 16 or cache.stride()[1:] != (INDEXER.token_bytes, 1):
        raise invalid(
            op,
            "cache",
            "packed inside a block, blocks a multiple of 16 bytes apart",
            f"strides {tuple(cache.stride())}",
        )
    if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        given = f"{block_table.dim()}-D {block_table.dtype} of strides {block_table.stride()}"
        raise invalid(op, "block_table", "2-D int32 of unit column stride", given)
    if requests is not None:
        _check_rows(op, "requests", requests, q)
    elif len(block_table) < len(q):
        raise invalid(op, "block_table", f"of at least {len(q)} rows", tuple(block_table.shape))
    _check_rows(op, "context_lens", context_lens, q)
    require_device(op, q.device, cache=cache, block_table=block_table, schedule=schedule)
    if columns < 0:
        raise invalid(op, "columns", "at least 0", columns)
    return torch.ops.consistent_kernels.indexer_scores_paged(
        q, weights, cache, block_table, requests, context_lens, schedule, columns, impl
    )


def indexer_schedule(context_lens: torch.Tensor, *, impl: str) -> torch.Tensor | None:
    """Return how `indexer_scores_paged` of "deep_gemm" spreads its work; None for the others.

    It follows the lengths alone and moves no bit, so one serves all layers of a step.

    Args:
        context_lens: [T], as there.
    """
    require_implementation("indexer_schedule", impl, IMPLEMENTATIONS)
    if impl != "deep_gemm":
        return None
    from consistent_kernels.indexer.deep_gemm import paged_schedule

    return paged_schedule(context_lens)
