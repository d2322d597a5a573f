"""Calls of Triton programs whose small arguments may lie apart in memory, as views do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from consistent_kernels.blocks.layer_norm import index_layer_norm
from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_to_cache,
    write_compressor_state,
)
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.hyper_connections import hc_head, hc_post, hc_pre
from consistent_kernels.indexer import indexer_scores, indexer_scores_paged, quantize_indexer_q
from consistent_kernels.interleaved_rotary import interleaved_rotary, interleaved_rotary_
from consistent_kernels.kv_cache_fp8 import INDEXER, gather_kv_fp8, new_cache, write_kv_fp8
from consistent_kernels.linear import linear
from consistent_kernels.rms_norm import rms_norm
from consistent_kernels.rotary import RopeParameters, rotary
from consistent_kernels.sparse_attention import sparse_attention, sparse_attention_bwd
from consistent_kernels.sparse_topk import sparse_topk

Place = Callable[[torch.Tensor], torch.Tensor]
"""Where an argument lies: the same values elsewhere."""

ROPE = RopeParameters(head_dim=128, rotary_dim=64, theta=1e4, max_position=128)
WINDOW = CompressorParameters(4, False, 128, 1e-6)


def packed(x: torch.Tensor) -> torch.Tensor:
    """The argument as it is."""
    return x


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in every second place; zeros between."""
    wide = torch.stack((x, torch.zeros_like(x)), dim=-1).flatten(-2)
    view = wide[..., ::2]
    assert not view.is_contiguous()
    return view


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values with the first dimension packed, where there are two; else `strided`."""
    if x.dim() < 2:
        return strided(x)
    view = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert not view.is_contiguous() or 1 in x.shape
    return view


def misread(x: torch.Tensor) -> torch.Tensor:
    """What a kernel finds that takes `strided(x)` for packed."""
    return strided(x).as_strided(x.shape, x.contiguous().stride()).clone()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are NaN: a score that no program writes does not show an earlier call's."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def calls(
    device: str, impl: str = "triton", seed: int = 1
) -> dict[str, Callable[[Place], torch.Tensor]]:
    """Return {what is moved: call}; each call gives the bytes to be compared."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    run = {"impl": impl}
    scores, heads = normal(3, 100), normal(3, 2, 128)
    kv, state = normal(64, 128).bfloat16(), normal(8, 256)
    rows = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    ones, weight, bias = normal(128) * 0 + 1, normal(128), normal(4, 128)
    q8, k8 = (normal(n, 16, 128).to(torch.float8_e4m3fn) for n in (3, 40))
    k8, head_weights, k_scale = k8[:, 0].contiguous(), normal(3, 16), normal(40).abs()
    q, keys, grad = normal(2, 3, 32).half(), normal(9, 32).half(), normal(2, 3, 16).half()
    named, sinks = torch.stack((ints(0, 3, 8), ints(2, -1, 1))), normal(3)
    x, fn, scale, base = normal(3, 4, 32).bfloat16(), normal(24, 128) * 0.05, normal(3), normal(24)
    comb, y = normal(3, 4, 4), normal(3, 32).bfloat16()
    none = torch.zeros_like(fn)  # the interpreter's bf16 products are wrong, and would hide base
    table = torch.stack((ints(0, 1), ints(2, 3)))
    entry = {"rope": ROPE, "params": WINDOW, **run}
    maps = {"norm_eps": 1e-6, "eps": 1e-6, **run}

    def write(slots: torch.Tensor) -> torch.Tensor:
        cache = new_cache(8, 16, INDEXER, device)
        write_kv_fp8(kv[: len(slots)], cache, slots, layout=INDEXER, **run)
        return cache

    cache = write(torch.arange(64, device=device))

    def gather(requests: torch.Tensor, **places: torch.Tensor) -> torch.Tensor:
        return gather_kv_fp8(cache, named[:, :1], requests, layout=INDEXER, **places, **run)

    def form(slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        entries = new_cache(4, 16, INDEXER, device)
        compress_to_cache(state, rows, positions, ones, entries, slots, layout=INDEXER, **entry)
        return entries

    def leave(positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(8, 256, device=device)
        write_compressor_state(state[:2], bias, positions, kept, slots, **run)
        return kept

    def score(starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        with poisoned_memory():
            found = indexer_scores(q8, head_weights, k8, k_scale, starts, ends, **run)
        return torch.cat([found[0, :40], found[1, 7:20], found[2, 3:9]])

    def score_pages(requests: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        with poisoned_memory():
            found = indexer_scores_paged(
                q8, head_weights, cache, table, requests, lens, columns=32, **run
            )
        return torch.cat([found[0, :32], found[1, :20], found[2, :9]])

    def attend(at: Place) -> torch.Tensor:
        return sparse_attention(q, keys, named, scale=0.2, d_v=16, sinks=at(sinks), **run)[0]

    def attend_all(at: Place) -> torch.Tensor:
        arguments = (at(q), at(keys), at(named))
        out, lse = sparse_attention(*arguments, scale=0.2, d_v=16, sinks=at(sinks), **run)
        return torch.cat((out.float().flatten(), lse.flatten()))

    def attend_back(at: Place) -> torch.Tensor:
        out, lse = sparse_attention(q, keys, named, scale=0.2, d_v=16, sinks=sinks, **run)
        args = (at(grad), at(q), at(keys), at(named), at(out), at(lse))
        grads = sparse_attention_bwd(*args, scale=0.2, sinks=at(sinks), **run)
        return torch.cat([part.float().flatten() for part in grads])

    def turn_in_place(at: Place) -> torch.Tensor:
        return interleaved_rotary_(at(ints(3, 70, 9)), heads.clone(), rope=ROPE, **run)

    def quantize(at: Place) -> torch.Tensor:
        q8, folded = quantize_indexer_q(
            at(heads.bfloat16()), at(head_weights[:, :2]), softmax_scale=0.1, head_scale=0.3, **run
        )
        return torch.cat((q8.float().flatten(), folded.flatten()))

    positions = ints(3, 70, 9)
    matrix = keys if impl == "triton" else keys.float()
    return {
        "sparse_topk starts": lambda at: sparse_topk(
            scores, at(ints(0, 5, 9)), ints(90, 99, 80), 8, **run
        ),
        "sparse_topk ends": lambda at: sparse_topk(
            scores, ints(0, 5, 9), at(ints(90, 99, 80)), 8, **run
        ),
        "interleaved_rotary positions": lambda at: interleaved_rotary(
            at(positions), heads, rope=ROPE, **run
        ),
        "interleaved_rotary_ positions": turn_in_place,
        "rotary positions": lambda at: rotary(at(positions), heads, heads, rope=ROPE, **run)[0],
        "linear bias": lambda at: linear(q[0], matrix, at(sinks.repeat(3).half()), **run),
        "rms_norm weight": lambda at: rms_norm(heads[0], at(weight), 1e-6, **run),
        "write_kv_fp8 slots": lambda at: write(at(ints(3, 40, 9))),
        "gather_kv_fp8 requests": lambda at: gather(at(ints(1, 1)), starts=ints(5, 30)),
        "gather_kv_fp8 starts": lambda at: gather(ints(0, 1), starts=at(ints(5, 30))),
        "compress positions": lambda at: compress(state, rows, at(ints(4, 100)), ones, **entry),
        "compress weight": lambda at: compress(state, rows, ints(0, 4), at(weight), **entry),
        "compress_to_cache slots": lambda at: form(at(ints(3, 20)), ints(0, 4)),
        "compress_to_cache positions": lambda at: form(ints(3, 20), at(ints(4, 100))),
        "write_compressor_state positions": lambda at: leave(at(ints(1, 2)), ints(3, 5)),
        "write_compressor_state slots": lambda at: leave(ints(1, 2), at(ints(3, 5))),
        "indexer_scores starts": lambda at: score(at(ints(0, 7, 3)), ints(40, 20, 9)),
        "indexer_scores ends": lambda at: score(ints(0, 7, 3), at(ints(40, 20, 9))),
        "indexer_scores_paged requests": lambda at: score_pages(at(ints(1, 1, 0)), ints(32, 20, 9)),
        "indexer_scores_paged lens": lambda at: score_pages(ints(0, 1, 1), at(ints(32, 20, 9))),
        "sparse_attention sinks": attend,
        "sparse_attention all": attend_all,
        "sparse_attention_bwd all": attend_back,
        "quantize_indexer_q q": quantize,
        "grouped_linear x": lambda at: grouped_linear(at(q), keys[:6].view(3, 2, 32), **run),
        "index_layer_norm x": lambda at: index_layer_norm(at(heads[0]), weight, ones, 1e-6),
        "hc_post y": lambda at: hc_post(at(y), x, scale[:, None].expand(3, 4), comb, **run),
        "hc_pre scale": lambda at: torch.cat(
            [
                part.float().flatten()
                for part in hc_pre(x, fn, at(scale), base, iterations=2, **maps)
            ]
        ),
        "hc_pre base": lambda at: torch.cat(
            [
                part.float().flatten()
                for part in hc_pre(x, none, scale, at(base), iterations=2, **maps)
            ]
        ),
        "hc_head base": lambda at: hc_head(x, none[:4], scale[:1], at(base[:4]), **maps),
    }
