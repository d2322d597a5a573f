"""What unused key splits cost a decode step: one layer's attention by the longest length asked for.

A captured graph launches as many key splits as the engine's max_model_len has, whatever the lengths
of its requests are. Each row: microseconds of one call (20 in a CUDA graph, median of 12 replays)
with the splits that the keys need, with those of 10,240 and of 40,960 keys, and stock's call.

Usage (sm_90, vLLM 0.25.1's CUDA wheel):
    python -m benchmarks.decode_key_splits.run --out results.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import answer
from consistent_kernels import vendored
from consistent_kernels.attention import AttentionParameters, attention_paged

HEADS = ((32, 8, 128), (9, 3, 64))
BATCHES = ((256, 500), (64, 500), (1, 500), (256, 6_000), (8, 32_700), (1, 32_700))
"""(requests, keys of each)."""

PAGE, LONGEST = 16, 40_960
_CALLS, _REPLAYS = 20, 12


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of one of `_CALLS` calls in a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    spans = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return round(statistics.median(spans), 2)


def rows() -> Iterator[dict[str, Any]]:
    """Yield one row for each shape; refuses a shape whose bits follow the number of splits."""
    for heads in HEADS:
        params = AttentionParameters(*heads, heads[2] ** -0.5)
        for batch, keys in BATCHES:
            yield {"heads": heads, "requests": batch, "keys": keys} | _one(params, batch, keys)


def _one(params: AttentionParameters, batch: int, keys: int) -> dict[str, Any]:
    int32 = {"dtype": torch.int32, "device": "cuda"}
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    used = -(-keys // PAGE)
    k, v = (
        torch.randn(batch * used + 1, PAGE, params.num_kv_heads, params.head_dim, **bf16)
        for _ in range(2)
    )
    table = torch.zeros(batch, LONGEST // PAGE, **int32)
    table[:, :used] = torch.arange(batch * used, **int32).view(batch, used)
    lens, cu = torch.full((batch,), keys, **int32), torch.arange(batch + 1, **int32)
    q = torch.randn(batch, params.num_heads, params.head_dim, **bf16)
    out = torch.empty_like(q)

    def ours(longest: int) -> None:
        attention_paged(
            q, k, v, table, lens, cu, params=params, impl="flash_attn", max_query_len=1,
            max_seq_len=longest, out=out,
        )  # fmt: skip

    def stock() -> None:
        vendored.flash_attn_3().fwd(
            q, k, v, None, None, None, out, cu, None, None, None, lens, 1, keys, table, None, None,
            None, None, None, None, None, None, params.scale, True, -1, -1, 0.0, True, None, 0,
            None, 0, None, 1, 0, None,
        )  # fmt: skip

    ours(keys)
    first = out.clone()
    found: dict[str, Any] = {}
    for name, longest in (("needed", keys), ("10240", 10_240), ("40960", LONGEST)):
        ours(max(longest, keys))
        if not torch.equal(first, out):
            raise AssertionError(f"{batch} x {keys}: bits follow the number of splits ({name})")
        found[f"us_{name}"] = microseconds(lambda n=longest: ours(max(n, keys)))
    return found | {"us_stock": microseconds(stock)}


def main() -> int:
    args = answer.parser(__doc__).parse_args()
    found = answer.start(__doc__, args)
    answer.publish(found | {"rows": list(rows())}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
