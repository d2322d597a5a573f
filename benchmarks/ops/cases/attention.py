"""Attention: decode from pages, prefill, and the KV write, against vLLM's FlashAttention 3."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.attention import (
    AttentionParameters,
    attention_paged,
    attention_varlen,
    plan_attention,
    write_kv,
)
from consistent_kernels.attention.spec import FLASH_HEAD_DIMS, IMPLEMENTATIONS
from consistent_kernels.testing import assert_bitwise_equal

OP = "attention"
_BLOCK = 16
_HEADS = {
    "32/8 D=128": AttentionParameters(32, 8, 128, 128**-0.5),
    "9/3 D=64": AttentionParameters(9, 3, 64, 64**-0.5),
}
_SHORT = ((1, 650), (256, 650))
_LONG = ((1, 8192), (1, 32768), (8, 32768), (64, 8192), (256, 2048))
_DECODE = {"32/8 D=128": _SHORT + _LONG, "9/3 D=64": (*_SHORT, (64, 8192))}
_PREFILL = {"32/8 D=128": (8, 4096), "9/3 D=64": (8, 4096)}
_REASONS = {
    "triton": "the program for sliding windows and GPUs without FlashAttention 3: one tile of 64 "
    "rows in every phase, no splits that follow the batch",
    "flash_attn": "keys are split at multiples of 4,096 whatever the batch, where stock spreads "
    "few requests over the chip; at head dim 64 prefill runs decode's tile",
}
_CHECKED = (1, 16, 65, 777, 2049, 4097)


@dataclasses.dataclass
class Pages:
    """Random keys and values of equal-length requests, in shuffled pages."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor


def cases(setting: Setting) -> Iterator[Case]:
    """Decode at each (requests x keys), one prefill, one write; relations once per head shape."""
    for name, params in _HEADS.items():
        if setting.small and params.head_dim != 64:
            continue
        for impl in setting.implementations(IMPLEMENTATIONS):
            if impl == "flash_attn" and params.head_dim not in FLASH_HEAD_DIMS:
                continue
            relations = functools.partial(_relations, setting, params, impl)
            for requests, keys in ((2, 70),) if setting.small else _DECODE[name]:
                yield _decode(setting, name, params, impl, requests, keys, relations)
            requests, length = (2, 70) if setting.small else _PREFILL[name]
            yield _prefill(setting, name, params, impl, requests, length, relations)
    yield from _writes(setting)


def _decode(
    setting: Setting,
    name: str,
    params: AttentionParameters,
    impl: str,
    requests: int,
    keys: int,
    relations: Any,
) -> Case:
    pages = _pages(setting, params, requests, keys)
    q = setting.normal(requests, params.num_heads, params.head_dim, seed=2)
    seq_lens = torch.full((requests,), keys, dtype=torch.int32, device=setting.device)
    cu = torch.arange(requests + 1, dtype=torch.int32, device=setting.device)
    return Case(
        op="attention_decode",
        shape=f"{requests} x {keys} keys, {name}",
        impl=impl,
        ours=functools.partial(
            attention_paged,
            q,
            pages.k,
            pages.v,
            pages.block_table,
            seq_lens,
            cu,
            params=params,
            impl=impl,
            max_query_len=1,
            max_seq_len=keys,
        ),
        stock=functools.partial(
            _stock, setting.device, params, q, pages, cu, 1, keys, seqused_k=seq_lens
        ),
        relations=relations,
        reason=_REASONS.get(impl),
    )


def _prefill(
    setting: Setting,
    name: str,
    params: AttentionParameters,
    impl: str,
    requests: int,
    length: int,
    relations: Any,
) -> Case:
    q, k, v = _qkv(setting, params, requests * length)
    cu = torch.arange(requests + 1, dtype=torch.int32, device=setting.device) * length
    # Lengths are read once a batch, as a trainer does; stock is told them.
    plan = plan_attention(cu, params=params, num_tokens=len(q), impl=impl, cu_seqlens_k=cu)
    return Case(
        op="attention_prefill",
        shape=f"{requests} x {length} tokens, {name}",
        impl=impl,
        ours=functools.partial(
            attention_varlen, q, k, v, cu, cu, params=params, impl=impl, plan=plan
        ),
        stock=functools.partial(
            _stock, setting.device, params, q, (k, v), cu, length, length, cu_seqlens_k=cu
        ),
        relations=relations,
        reason=_REASONS.get(impl),
        # A program may plan its launches from the lengths, on the host; training is not captured.
        graph=False,
    )


def _writes(setting: Setting) -> Iterator[Case]:
    params = _HEADS["9/3 D=64" if setting.small else "32/8 D=128"]
    rows = max(setting.rows())
    _, k, v = _qkv(setting, params, rows)
    blocks = rows // _BLOCK + 2
    shape = (blocks, _BLOCK, params.num_kv_heads, params.head_dim)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(setting.device)
    scale = torch.ones(1, device=setting.device)
    for impl in setting.implementations(IMPLEMENTATIONS):
        for m in setting.rows():
            caches = [torch.zeros(shape, dtype=k.dtype, device=setting.device) for _ in range(2)]
            ours = functools.partial(write_kv, k[:m], v[:m], *caches, slots[:m], impl=impl)
            yield Case(
                op="write_kv",
                shape=f"M={m} heads={params.num_kv_heads} D={params.head_dim}",
                impl=impl,
                ours=ours,
                stock=functools.partial(
                    _stock_write, setting.device, k[:m], v[:m], *caches, slots[:m], scale
                ),
                relations=functools.partial(
                    _written, ours, [(k[:m], caches[0]), (v[:m], caches[1])], slots[:m]
                ),
            )


def _qkv(setting: Setting, params: AttentionParameters, tokens: int) -> list[torch.Tensor]:
    heads = (params.num_heads, params.num_kv_heads, params.num_kv_heads)
    return [
        setting.normal(tokens, count, params.head_dim, seed=seed)
        for seed, count in enumerate(heads, start=11)
    ]


def _pages(setting: Setting, params: AttentionParameters, requests: int, keys: int) -> Pages:
    per_request = -(-keys // _BLOCK)
    blocks = requests * per_request
    shape = (blocks, _BLOCK, params.num_kv_heads, params.head_dim)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks))
    return Pages(
        setting.normal(*shape, seed=21),
        setting.normal(*shape, seed=22),
        order.view(requests, per_request).to(torch.int32).to(setting.device),
    )


def _relations(setting: Setting, params: AttentionParameters, impl: str) -> None:
    """R2 over sequences, R3 and R12: decode from pages = chunk from pages = packed prefill."""
    lengths = (1, 17, 70) if setting.small else _CHECKED
    q, k, v = _qkv(setting, params, sum(lengths))
    begin = [0, *itertools.accumulate(lengths)]
    whole = _varlen(q, k, v, begin, params, impl)
    for first, last in itertools.pairwise(begin):
        alone = _varlen(*(x[first:last] for x in (q, k, v)), [0, last - first], params, impl)
        assert_bitwise_equal(alone, whole[first:last], f"a sequence of {last - first} alone")
    table, caches = _filled(setting, params, k, v, lengths, impl)
    for queries in (1, 16, 100):
        rows, cu = [], [0]
        for length, start in zip(lengths, begin, strict=False):
            rows += range(start + max(length - queries, 0), start + length)
            cu.append(len(rows))
        out, _ = attention_paged(
            q[rows],
            *caches,
            table,
            torch.tensor(lengths, dtype=torch.int32, device=setting.device),
            torch.tensor(cu, dtype=torch.int32, device=setting.device),
            params=params,
            impl=impl,
            max_query_len=queries,
            max_seq_len=max(lengths),
        )
        assert_bitwise_equal(out, whole[rows], f"the last {queries} queries from pages")

    def run(part: slice) -> torch.Tensor:  # one-query rows: decode in smaller batches
        count = part.stop - part.start
        ends = torch.tensor(lengths, dtype=torch.int32, device=setting.device)
        last = torch.tensor(begin[1:], device=setting.device) - 1
        out, _ = attention_paged(
            q[last[part]],
            *caches,
            table[part],
            ends[part],
            torch.arange(count + 1, dtype=torch.int32, device=setting.device),
            params=params,
            impl=impl,
            max_query_len=1,
            max_seq_len=max(lengths),
        )
        return out

    check_rows(run, len(lengths), (1, 2))


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begin: Sequence[int],
    params: AttentionParameters,
    impl: str,
) -> torch.Tensor:
    cu = torch.tensor(begin, dtype=torch.int32, device=q.device)
    return attention_varlen(q, k, v, cu, cu, params=params, impl=impl)[0]


def _filled(
    setting: Setting,
    params: AttentionParameters,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    impl: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Pages in descending order, unused slots NaN."""
    need = [-(-length // _BLOCK) for length in lengths]
    table = torch.zeros(len(lengths), max(need), dtype=torch.int32)
    free = iter(range(sum(need), 0, -1))
    slots = []
    for row, (count, length) in enumerate(zip(need, lengths, strict=True)):
        table[row, :count] = torch.tensor(list(itertools.islice(free, count)))
        slots += [int(table[row, t // _BLOCK]) * _BLOCK + t % _BLOCK for t in range(length)]
    shape = (sum(need) + 1, _BLOCK, params.num_kv_heads, params.head_dim)
    caches = [
        torch.full(shape, float("nan"), dtype=k.dtype, device=setting.device) for _ in range(2)
    ]
    write_kv(k, v, *caches, torch.tensor(slots, device=setting.device), impl=impl)
    return table.to(setting.device), caches


def _written(
    write: functools.partial[None],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    slots: torch.Tensor,
) -> None:
    write()
    for source, cache in pairs:
        assert_bitwise_equal(cache.flatten(0, 1)[slots], source, "slots after a write")


def _stock(
    device: str,
    params: AttentionParameters,
    q: torch.Tensor,
    keys: Pages | tuple[torch.Tensor, torch.Tensor],
    cu: torch.Tensor,
    max_query: int,
    max_keys: int,
    **lengths: torch.Tensor,
) -> torch.Tensor:
    paged = isinstance(keys, Pages)
    k, v = (keys.k, keys.v) if paged else keys
    if device == "cpu":
        return _stock_cpu(params, q, k.flatten(0, -3), v.flatten(0, -3))
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=max_query,
        cu_seqlens_q=cu,
        max_seqlen_k=max_keys,
        softmax_scale=params.scale,
        causal=True,
        block_table=keys.block_table if paged else None,
        fa_version=3,
        **lengths,
    )


def _stock_cpu(
    params: AttentionParameters, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(
        *heads, scale=params.scale, enable_gqa=True
    )


def _stock_write(
    device: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    if device == "cpu":
        k_cache.flatten(0, 1)[slots] = k
        v_cache.flatten(0, 1)[slots] = v
        return
    from vllm import _custom_ops

    _custom_ops.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", scale, scale)
