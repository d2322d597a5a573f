"""Sparse MLA of DeepSeek-V3.2 and V4: the forward, decode from the FP8 cache, and the backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.blocks.paging import PagedBatch
from consistent_kernels.blocks.workspace import EntryWorkspace
from consistent_kernels.kv_cache_fp8 import (
    V4,
    V32,
    KVLayout,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.sparse_attention import (
    sparse_attention,
    sparse_attention_bwd,
    sparse_attention_fp8,
)
from consistent_kernels.sparse_attention.spec import FP8_IMPLEMENTATIONS, IMPLEMENTATIONS

OP = "sparse_attention"
_PAGE = 64
_VALUE = 512
_NO_CPU = "vLLM has no sparse MLA on a CPU"
_NO_BACKWARD = "stock vLLM has no backward"
_DECODE = (
    "stock decode reads FP8 inside its attention kernel, with splits that follow the batch; ours "
    "gathers to bf16 and runs the prefill kernel, so that prefill and decode are one arithmetic"
)
_DIRECT = (
    "the kernel is stock's; ours runs it without the splits that follow the batch, so few queries "
    "leave multiprocessors idle"
)
_FORWARD = {
    "flash_mla": "stock's prefill calls the same kernel; what is added is padding of the indices",
    "triton": "the program where FlashMLA's binary is absent: entries go through registers, "
    "without FlashMLA's pipeline of asynchronous copies",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """One model's shapes: heads, columns of the indices, cache layout."""

    name: str
    heads: int
    columns: int
    layout: KVLayout
    sinks: bool


_FORMS = (Form("v32", 128, 2048, V32, False), Form("v4", 64, 640, V4, True))


def cases(setting: Setting) -> Iterator[Case]:
    """Forward over a bf16 workspace, unified FP8 decode, backward."""
    for form in _FORMS:
        if setting.small:
            form = dataclasses.replace(form, heads=4, columns=64)
        for queries in setting.rows():
            if queries <= 256:
                yield from _forward(setting, form, queries)
                yield from _decode(setting, form, queries)
        yield from _backward(setting, form, 5 if setting.small else 1024)


def _inputs(
    setting: Setting, form: Form, queries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q, indices of entries of a context four times as long, sinks)."""
    q = setting.normal(queries, form.heads, form.layout.width, seed=1)
    generator = torch.Generator(setting.device).manual_seed(2)
    context = 4 * form.columns
    scores = torch.rand((queries, context), generator=generator, device=setting.device)
    chosen = scores.topk(form.columns, dim=1).indices.sort(1, descending=True).values
    sinks = setting.normal(form.heads, seed=3, dtype=torch.float32) if form.sinks else None
    return q, chosen.to(torch.int32), sinks


def _shape(form: Form, queries: int) -> str:
    return f"{form.name} queries={queries} heads={form.heads} k={form.columns}"


def _run(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    impl: str,
    rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[2] ** -0.5
    return sparse_attention(
        q[rows], kv, indices[rows], scale=scale, d_v=_VALUE, sinks=sinks, impl=impl
    )


def _implementations(setting: Setting) -> list[str]:
    return setting.implementations(IMPLEMENTATIONS)


def _forward(setting: Setting, form: Form, queries: int) -> Iterator[Case]:
    q, indices, sinks = _inputs(setting, form, queries)
    kv = setting.normal(4 * form.columns, form.layout.width, seed=4)
    for impl in _implementations(setting):
        run = functools.partial(_run, q, kv, indices, sinks, impl)
        yield Case(
            op="sparse_attention",
            shape=_shape(form, queries),
            impl=impl,
            ours=functools.partial(run, slice(0, queries)),
            stock=_stock_forward(q, kv, indices, sinks),
            relations=functools.partial(check_rows, run, queries),
            reason=_FORWARD[impl] if setting.device == "cuda" else _NO_CPU,
        )


def _decode(setting: Setting, form: Form, queries: int) -> Iterator[Case]:
    """Every query its own request with a context of 4 k entries in FP8 pages.

    Through a bf16 workspace (gather, then the sparse forward, as a block does it), and straight
    from the pages.
    """
    q, positions, sinks = _inputs(setting, form, queries)
    context = 4 * form.columns
    pages = context // _PAGE
    cache = new_cache(queries * pages, _PAGE, form.layout, setting.device)
    other = "reference" if setting.device == "cpu" else "triton"
    kv = setting.normal(context, form.layout.width, seed=5)
    slots = torch.arange(context, dtype=torch.int64, device=setting.device)
    for request in range(queries):
        write_kv_fp8(kv, cache, slots + request * context, layout=form.layout, impl=other)
    table = torch.arange(queries * pages, dtype=torch.int32, device=setting.device)
    table = table.view(queries, pages)
    requests = torch.arange(queries, dtype=torch.int32, device=setting.device)
    workspace = EntryWorkspace(form.layout, queries, form.columns, setting.device)
    batch = PagedBatch(requests, requests, requests, table, _PAGE, context)
    for impl in _implementations(setting):
        run = functools.partial(_unified, q, cache, positions, batch, sinks, workspace, impl, other)
        yield Case(
            op="sparse_attention_fp8_decode",
            shape=_shape(form, queries),
            impl=impl,
            ours=functools.partial(run, slice(0, queries)),
            stock=_stock_decode(q, cache, positions, sinks, context),
            relations=functools.partial(check_rows, run, queries),
            reason=_DECODE if setting.device == "cuda" else _NO_CPU,
        )

    first = torch.arange(queries, dtype=torch.int32, device=setting.device)[:, None] * context
    slots = positions + first
    for impl in setting.implementations(FP8_IMPLEMENTATIONS):
        run = functools.partial(_direct, q, cache, slots, sinks, impl)
        yield Case(
            op="sparse_attention_fp8",
            shape=_shape(form, queries),
            impl=impl,
            ours=functools.partial(run, slice(0, queries)),
            stock=_stock_decode(q, cache, positions, sinks, context),
            relations=functools.partial(check_rows, run, queries),
            reason=_DIRECT if setting.device == "cuda" else _NO_CPU,
        )


def _direct(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    sinks: torch.Tensor | None,
    impl: str,
    rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[2] ** -0.5
    return sparse_attention_fp8(q[rows], cache, slots[rows], scale=scale, sinks=sinks, impl=impl)


def _unified(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    batch: PagedBatch,
    sinks: torch.Tensor | None,
    workspace: EntryWorkspace,
    impl: str,
    other: str,
    rows: slice,
) -> torch.Tensor:
    some = dataclasses.replace(batch, requests=batch.requests[rows])
    scale = q.shape[2] ** -0.5

    def attention(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        return sparse_attention(
            q, kv, indices, scale=scale, d_v=_VALUE, sinks=sinks, out=out, impl=impl
        )[0]

    return workspace.attend(q[rows], [(cache, positions[rows])], some, other, attention, _VALUE)


def _backward(setting: Setting, form: Form, queries: int) -> Iterator[Case]:
    q, indices, sinks = _inputs(setting, form, queries)
    kv = setting.normal(4 * form.columns, form.layout.width, seed=6)
    grad = setting.normal(queries, form.heads, _VALUE, seed=7)
    scale = q.shape[2] ** -0.5
    for impl in [name for name in _implementations(setting) if name != "flash_mla"]:
        out, lse = _run(q, kv, indices, sinks, impl, slice(None))
        call = functools.partial(
            sparse_attention_bwd, grad, q, kv, indices, out, lse, scale=scale, sinks=sinks,
            impl=impl,
        )  # fmt: skip
        yield Case(
            op="sparse_attention_bwd",
            shape=_shape(form, queries),
            impl=impl,
            ours=call,
            stock=None,
            relations=functools.partial(_check_runs, call),
            reason=_NO_BACKWARD,
            graph=False,
        )


def _check_runs(call: Callable[[], tuple[torch.Tensor | None, ...]]) -> None:
    from consistent_kernels.testing import assert_bitwise_equal

    for first, again in zip(call(), call(), strict=True):
        if first is not None:
            assert_bitwise_equal(again, first, "a second run")


def _stock_forward(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sinks: torch.Tensor | None
) -> Callable[[], Any] | None:
    if q.device.type == "cpu":
        return None
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    return functools.partial(
        flash_mla_sparse_fwd, q, kv.unsqueeze(1), indices.unsqueeze(1), q.shape[2] ** -0.5,
        attn_sink=sinks,
    )  # fmt: skip


def _stock_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    context: int,
) -> Callable[[], Any] | None:
    if q.device.type == "cpu":
        return None
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    queries = len(q)
    first = torch.arange(queries, dtype=torch.int32, device=q.device)[:, None] * context
    metadata, _ = get_mla_metadata()
    return functools.partial(
        flash_mla_with_kvcache, q=q.unsqueeze(1), k_cache=cache.unsqueeze(-2), block_table=None,
        head_dim_v=_VALUE, cache_seqlens=None, tile_scheduler_metadata=metadata,
        is_fp8_kvcache=True, indices=(positions + first).unsqueeze(1),
        softmax_scale=q.shape[2] ** -0.5, attn_sink=sinks,
    )  # fmt: skip
