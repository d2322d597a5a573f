"""Writing to and reading from the FP8 KV caches, against vLLM's kernels for the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    LAYOUTS,
    V4,
    V32,
    KVLayout,
    gather_kv_fp8,
    new_cache,
    round_trip_kv_fp8,
    write_kv_fp8,
)
from consistent_kernels.kv_cache_fp8.spec import IMPLEMENTATIONS

OP = "kv_cache_fp8"
_PAGE = 64
_NO_CPU = "vLLM has no such kernel on a CPU"
_SELECTED = {"v32": 2048, "v4": 512}


def cases(setting: Setting) -> Iterator[Case]:
    """The write of a step's tokens; the read of every query's selected entries."""
    for layout in LAYOUTS.values():
        for rows in setting.rows():
            yield from _writes(setting, layout, rows)
    for layout in (V32, V4):
        for queries in setting.rows():
            if queries <= 256:  # more queries than that read whole contexts
                yield from reads(setting, layout, queries)


def _writes(setting: Setting, layout: KVLayout, rows: int) -> Iterator[Case]:
    kv = setting.hazards(rows, layout.width, seed=rows)
    blocks = -(-rows // _PAGE) + 1
    slots = torch.arange(rows, dtype=torch.int64, device=setting.device).flip(0) + 7
    for impl in setting.implementations(IMPLEMENTATIONS):
        if impl == "cuda":  # Triton's write
            continue
        cache = new_cache(blocks, _PAGE, layout, setting.device)
        write = functools.partial(write_kv_fp8, kv, cache, slots, layout=layout, impl=impl)
        read_back = functools.partial(_round_trip, kv, layout, impl)
        yield Case(
            op="write_kv_fp8",
            shape=f"{layout.name} tokens={rows}",
            impl=impl,
            ours=write,
            stock=_stock_write(kv, new_cache(blocks, _PAGE, layout, setting.device), slots, layout),
            relations=functools.partial(check_rows, read_back, rows),
            reason=None if setting.device == "cuda" else _NO_CPU,
        )


def reads(setting: Setting, layout: KVLayout, queries: int) -> Iterator[Case]:
    """The selected entries of some queries, each from a context of four times as many."""
    k = 7 if setting.small else _SELECTED[layout.name]
    context = 4 * k
    pages = -(-context // _PAGE)
    cache = new_cache(queries * pages, _PAGE, layout, setting.device)
    table = torch.arange(queries * pages, dtype=torch.int32, device=setting.device)
    table = table.view(queries, pages)
    # Every fourth entry on average, in descending position, as the top-k gives them.
    places = torch.arange(context, dtype=torch.int32, device=setting.device).flip(0)
    positions = places.view(k, 4)[:, 1].expand(queries, k).contiguous()
    requests = torch.arange(queries, dtype=torch.int32, device=setting.device)
    for impl in setting.implementations(IMPLEMENTATIONS):
        if impl == "cuda" and layout is not V4:  # Triton's read
            continue
        out = torch.empty((queries, k, layout.width), dtype=torch.bfloat16, device=setting.device)
        read = functools.partial(_gather, cache, positions, requests, table, layout, impl)
        yield Case(
            op="gather_kv_fp8",
            shape=f"{layout.name} queries={queries} k={k}",
            impl=impl,
            ours=functools.partial(read, slice(0, queries), out),
            stock=_stock_read(cache, table, k, layout),
            relations=functools.partial(check_rows, read, queries),
            reason="stock decode reads FP8 in its attention kernel; its prefill upconverts as many "
            "neighbouring rows, which is what is timed",
        )


def _round_trip(kv: torch.Tensor, layout: KVLayout, impl: str, rows: slice) -> torch.Tensor:
    return round_trip_kv_fp8(kv[rows], layout=layout, impl=impl)


def _gather(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    table: torch.Tensor,
    layout: KVLayout,
    impl: str,
    rows: slice,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return gather_kv_fp8(
        cache,
        positions[rows],
        requests[rows],
        layout=layout,
        impl=impl,
        block_table=table,
        out=out,
    )


def _stock_write(
    kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout
) -> Callable[[], Any] | None:
    if kv.device.type == "cpu":
        return None
    import vllm._custom_ops as ops
    from vllm.models.deepseek_v4.common.ops.cache_utils import quantize_and_insert_k_cache

    if layout is V32:
        parts = kv[:, :512].contiguous(), kv[:, 512:].contiguous()
        one = torch.ones(1, device=kv.device)
        call = ops.concat_and_cache_mla
        return functools.partial(call, *parts, cache, slots, "fp8_ds_mla", one)
    if layout is INDEXER:
        call = ops.indexer_k_quant_and_cache
        return functools.partial(call, kv, cache, slots, 128, "ue8m0")
    flat = cache.view(cache.shape[0], -1)
    return functools.partial(quantize_and_insert_k_cache, kv, flat, slots, block_size=_PAGE)


def _stock_read(
    cache: torch.Tensor, table: torch.Tensor, k: int, layout: KVLayout
) -> Callable[[], Any] | None:
    if cache.device.type == "cpu":
        return None
    import vllm._custom_ops as ops
    from vllm.models.deepseek_v4.common.ops.cache_utils import dequantize_and_gather_k_cache_triton

    requests = len(table)
    lens = torch.full((requests,), k, dtype=torch.int32, device=cache.device)
    out = torch.empty((requests, k, layout.width), dtype=torch.bfloat16, device=cache.device)
    if layout is V32:
        starts = torch.arange(requests, dtype=torch.int32, device=cache.device) * k
        return functools.partial(
            ops.cp_gather_and_upconvert_fp8_kv_cache,
            cache,
            out.view(requests * k, layout.width),
            table,
            lens,
            starts,
            requests,
        )
    return functools.partial(
        dequantize_and_gather_k_cache_triton, out, cache, lens, None, table, _PAGE, 0
    )
