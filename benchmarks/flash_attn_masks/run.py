"""Under which mask FlashAttention 3's rows depend on their query and keys alone, and its price.

For each head dim: packed prefill of sequences of 1 to 1,100 tokens against paged chunks of 1 to 500
queries, key splits of 128, 512 and 4,096, under the causal mask and under a window that hides only
the future; then decode and prefill times of both. "stock" is vLLM's own call: no fixed splits,
FA3's heuristic for their number; its differing calls are the control.

Usage (sm_90, vLLM 0.25.1's CUDA wheel; one head dim under two masks takes some 10 s after imports):
    PYTHONPATH=tests/support python -m benchmarks.flash_attn_masks.run \
        --out results.json --heads 9,3,64 --mask window:2 --mask "one group:2" --mask stock:1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_cases import fill_pages, make_batch

from benchmarks.common import answer
from consistent_kernels import vendored
from consistent_kernels.attention import AttentionParameters, flash_attn
from consistent_kernels.attention.spec import DEFAULT_KEY_SPLIT

HEADS = ((9, 3, 64), (14, 2, 64), (8, 8, 80), (8, 2, 96), (32, 8, 128), (16, 2, 256))
MASKS = (
    *(("causal", 2), ("causal", 1024), ("window", 2), ("window", 1024), ("window", 65536)),
    *(("one group", 2), ("stock", 1)),
)
"""(mask, the least max_seqlen_q that FA3 is told).

"one group" is causal for queries inside a split, no mask for those behind it, and always tells FA3
that, however many queries come: at head dims 64 and 128 it then takes one warp group and one tile
for every phase, the one that stock decodes with (hopper/heuristics.h, `use_one_mma_wg`).
"""

UNSPLIT = 1 << 16
LENGTHS, SPLITS, CHUNKS = (1, 17, 65, 300, 1100), (128, 512, 4096), (1, 2, 7, 16, 64, 150, 500)
_FAR = 1 << 20


def forward_under(mask: str, at_least: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a replacement of `flash_attn._forward` with the given mask."""

    def forward(
        q: torch.Tensor,
        keys: flash_attn.Keys,
        params: AttentionParameters,
        cu_q: torch.Tensor,
        max_q: int,
        *,
        used_q: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        sees_all: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        one_group = mask == "one group"
        queries = at_least if one_group else max(max_q, at_least)
        causal = mask != "window" and not sees_all
        left = -1 if causal or one_group else _FAR
        right = (-1 if one_group else queries + 1) if sees_all else 0
        starts = keys.starts if keys.table is None else None
        num_splits = 0 if mask == "stock" else 1
        result = vendored.flash_attn_3().fwd(
            q, keys.k, keys.v, None, None, None, out, cu_q, starts, None, used_q, keys.lens,
            queries + 3 if sees_all and not one_group else queries, 2 * _FAR, keys.table, None,
            None, None, None, None, None, None, None, params.scale, causal, left, right, 0.0, True,
            None, num_splits, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return result[0], result[1]

    return forward


def differing_calls(heads: tuple[int, int, int], splits: tuple[int, ...]) -> dict[str, int]:
    """Return how many paged calls differ from the packed prefill, by key split and chunk."""
    found = {}
    for split in splits:
        params = AttentionParameters(*heads, heads[2] ** -0.5, key_split=split)
        batch = make_batch(params, "flash_attn", "cuda", lengths=LENGTHS)
        whole, pages = batch.attend(), fill_pages(batch)
        for chunk in CHUNKS:
            count = 0
            for start in range(0, max(LENGTHS), chunk if chunk > 16 else 97):
                parts = [
                    (i, start, min(start + chunk, n)) for i, n in enumerate(LENGTHS) if n > start
                ]
                out, lse, rows = pages.attend(parts)
                same = torch.equal(out, whole[0][rows]) and torch.equal(lse, whole[1][rows])
                count += not same
            if count:
                found[f"key_split {split}, chunk {chunk}"] = count
    return found


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call, ten in one CUDA graph."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 100)
    return round(statistics.median(spans), 1)


def times(heads: tuple[int, int, int], split: int) -> Iterator[tuple[str, float]]:
    """Yield (what, microseconds) of paged decode and packed prefill."""
    q_heads, kv_heads, width = heads
    params = AttentionParameters(*heads, width**-0.5, key_split=split)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    int32 = {"device": "cuda", "dtype": torch.int32}
    for batch, length in ((1, 512), (256, 512), (256, 2048), (8, 16384)):
        blocks = batch * length // 16
        k, v = (torch.randn(blocks, 16, kv_heads, width, **bf16) for _ in range(2))
        table = torch.arange(blocks, **int32).view(batch, -1)
        q = torch.randn(batch, q_heads, width, **bf16)
        cu, lens = torch.arange(batch + 1, **int32), torch.full((batch,), length, **int32)
        fixed = (q, k, v, table, lens, cu, params, 1, length)
        call = flash_attn.attention_paged_fwd
        yield f"decode {batch} x {length}", microseconds(lambda c=call, f=fixed: c(*f), 15)
    for batch, length in ((8, 512), (8, 4096), (1, 16384)):
        tokens = batch * length
        k, v = (torch.randn(tokens, kv_heads, width, **bf16) for _ in range(2))
        q = torch.randn(tokens, q_heads, width, **bf16)
        cu = torch.arange(0, tokens + 1, length, **int32)
        fixed = (q, k, v, cu, cu, params, length)
        call = flash_attn.attention_varlen_fwd
        yield f"prefill {batch} x {length}", microseconds(lambda c=call, f=fixed: c(*f), 5)


def _heads(text: str) -> tuple[int, int, int]:
    q_heads, kv_heads, width = (int(part) for part in text.split(","))
    return q_heads, kv_heads, width


def _mask(text: str) -> tuple[str, int]:
    name, _, at_least = text.partition(":")
    if name not in {mask for mask, _ in MASKS}:
        raise argparse.ArgumentTypeError(f"one of {sorted({mask for mask, _ in MASKS})}")
    return name, int(at_least or 2)


def main(arguments: list[str] | None = None) -> int:
    parser = answer.parser(__doc__)
    parser.add_argument(
        "--heads", type=_heads, action="append", help="query heads,key heads,head dim; repeat it"
    )
    parser.add_argument(
        "--mask", type=_mask, action="append", help="NAME or NAME:least max_seqlen_q; repeat it"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--bits-only", action="store_true", help="time nothing")
    only.add_argument("--times-only", action="store_true", help="compare nothing")
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    found = answer.start(__doc__, args) | {"rows": rows}
    for heads in args.heads or HEADS:
        for mask, at_least in args.mask or MASKS:
            flash_attn._forward = forward_under(mask, at_least)
            row: dict[str, Any] = {
                "heads": heads[0],
                "kv_heads": heads[1],
                "head_dim": heads[2],
                "mask": mask,
                "max_seqlen_q_at_least": at_least,
            }
            whole = mask == "stock"
            if not args.times_only:
                row["differing_calls"] = differing_calls(heads, (UNSPLIT,) if whole else SPLITS)
            if not args.bits_only:
                split = UNSPLIT if whole else DEFAULT_KEY_SPLIT
                row["microseconds"] = dict(times(heads, split))
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            answer.save(found, args)  # as it goes: a run that is cut short keeps what it has
    return 0


if __name__ == "__main__":
    sys.exit(main())
