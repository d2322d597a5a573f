"""Index scores of DeepSeek-V3.2 (64 heads), against DeepGEMM as vLLM's indexer calls it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.indexer import indexer_schedule, indexer_scores, indexer_scores_paged
from consistent_kernels.indexer.spec import IMPLEMENTATIONS
from consistent_kernels.kv_cache_fp8 import INDEXER, gather_indexer_k, new_cache
from consistent_kernels.testing import assert_bitwise_equal

OP = "indexer"
_PAGE = 64
_DECODE = ((1, 64, 256), (4096, 32768, 131072), 64)
_PREFILL = ((512,), (4096, 32768), 64)
_SMALL = ((1, 5), (130,), 16)
_NO_CPU = "vLLM has no such kernel on a CPU"
_REASONS = {
    "triton": "the warps that multiply also load the keys; DeepGEMM, which stock calls, copies "
    "them ahead asynchronously",
    "deep_gemm": "the kernel is stock's; what is added is the call around it",
}


def cases(setting: Setting) -> Iterator[Case]:
    """Decode at full contexts of one length; prefill of one request's last queries."""
    small = setting.small
    for rows_of, lengths, heads in (_SMALL if small else _DECODE,):
        for length in lengths:
            for rows in rows_of:
                yield from decode(setting, rows, length, heads)
    for rows_of, lengths, heads in (_SMALL if small else _PREFILL,):
        for length in lengths:
            for rows in rows_of:
                yield from _prefill(setting, rows, length, heads)


def _queries(setting: Setting, rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = setting.hazards(rows, heads, 128, seed=rows).to(torch.float8_e4m3fn)
    return q, setting.normal(rows, heads, seed=rows, dtype=torch.float32)


def _filled_cache(setting: Setting, blocks: int) -> torch.Tensor:
    cache = new_cache(blocks, _PAGE, INDEXER, setting.device)
    flat = cache.view(blocks, -1)
    keys = torch.arange(_PAGE * 128, device=setting.device)
    page = torch.arange(blocks, device=setting.device)[:, None]
    # Finite e4m3 bytes that differ from key to key and from page to page.
    flat[:, : _PAGE * 128] = ((keys * 2654435761 + page * 40503) >> 7) % 0x70
    scales = torch.linspace(0.01, 1.0, _PAGE, device=setting.device)
    flat[:, _PAGE * 128 :] = scales.view(torch.uint8)
    return cache


def decode(setting: Setting, rows: int, length: int, heads: int) -> Iterator[Case]:
    """One query of each of `rows` requests of `length` keys in pages."""
    q, weights = _queries(setting, rows, heads)
    pages = -(-length // _PAGE)
    cache = _filled_cache(setting, rows * pages)
    table = torch.arange(rows * pages, dtype=torch.int32, device=setting.device).view(rows, pages)
    requests = torch.arange(rows, dtype=torch.int32, device=setting.device)
    lens = torch.full_like(requests, length)
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(_paged, q, weights, cache, table, requests, lens, length, impl)
        # A step's schedule serves all layers, as in vLLM.
        schedule = indexer_schedule(lens, impl=impl)
        step = functools.partial(_step, q, weights, cache, table, lens, schedule, length, impl)
        yield Case(
            op="indexer_scores_paged",
            shape=f"decode rows={rows} keys={length} H={heads}",
            impl=impl,
            ours=step,
            stock=_stock_decode(q, weights, cache, table, lens, length),
            relations=functools.partial(
                _paged_is_packed, run, rows, q, weights, cache, table, impl
            ),
            reason=_REASONS[impl] if setting.device == "cuda" else _NO_CPU,
        )


def _prefill(setting: Setting, rows: int, length: int, heads: int) -> Iterator[Case]:
    q, weights = _queries(setting, rows, heads)
    cache = _filled_cache(setting, -(-length // _PAGE))
    places = torch.arange(length, dtype=torch.int32, device=setting.device)[None]
    zero = torch.zeros(1, dtype=torch.int32, device=setting.device)
    k, scale = gather_indexer_k(cache, places, zero, starts=zero)
    starts = zero.expand(rows).contiguous()
    ends = torch.full_like(starts, length)
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(_packed, q, weights, k[0], scale[0], starts, ends, impl)
        yield Case(
            op=OP,
            shape=f"prefill rows={rows} keys={length} H={heads}",
            impl=impl,
            ours=functools.partial(run, slice(0, rows)),
            stock=_stock_prefill(q, weights, k[0], scale[0], starts, ends),
            relations=functools.partial(check_rows, run, rows),
            reason=_REASONS[impl] if setting.device == "cuda" else _NO_CPU,
        )


def _paged(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lens: torch.Tensor,
    columns: int,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return indexer_scores_paged(
        q[rows], weights[rows], cache, table, requests[rows], lens[rows], columns=columns, impl=impl
    )


def _step(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    schedule: torch.Tensor | None,
    columns: int,
    impl: str,
) -> torch.Tensor:
    return indexer_scores_paged(
        q, weights, cache, table, None, lens, columns=columns, impl=impl, schedule=schedule
    )


def _packed(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return indexer_scores(q[rows], weights[rows], k, scale, starts[rows], ends[rows], impl=impl)


def _paged_is_packed(
    run: functools.partial,
    rows: int,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    impl: str,
) -> None:
    check_rows(run, rows)
    last = rows - 1
    scores = run(slice(last, rows))
    places = torch.arange(scores.shape[1], dtype=torch.int32, device=q.device)[None]
    zero = torch.zeros(1, dtype=torch.int32, device=q.device)
    k, scale = gather_indexer_k(cache, places, zero, block_table=table[last:])
    end = torch.full_like(zero, scores.shape[1])
    packed = indexer_scores(q[last:], weights[last:], k[0], scale[0], zero, end, impl=impl)
    assert_bitwise_equal(scores, packed, "paged against packed")


def _stock_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    columns: int,
) -> functools.partial | None:
    if q.device.type == "cpu":
        return None
    from vllm.utils import deep_gemm

    lens = lens[:, None].contiguous()
    # vLLM computes the schedule once a step, for all layers.
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, _PAGE, deep_gemm.get_num_sms())
    return functools.partial(
        deep_gemm.fp8_fp4_paged_mqa_logits,
        (q[:, None], None),
        cache[:, :, None],
        weights,
        lens,
        table,
        schedule,
        max_model_len=columns,
        clean_logits=False,
    )


def _stock_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> functools.partial | None:
    if q.device.type == "cpu":
        return None
    from vllm.utils import deep_gemm

    return functools.partial(
        deep_gemm.fp8_fp4_mqa_logits,
        (q, None),
        (k, scale),
        weights,
        starts,
        ends,
        clean_logits=False,
    )
