"""Do DeepGEMM's bf16 rows depend on M, and are they our Triton kernel's; with times.

For each (N, K): rows at 37 row counts from 1 to 4,096, and at offsets, against M = 4,096; the first
512 against the Triton kernel; columns cut in two against one piece. Then times with a flushed L2.

Usage (sm_90, vLLM 0.25.1's CUDA wheel, nvcc; compiles some 170 kernels at first):
    python -m benchmarks.deep_gemm_rows.run --out results.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import answer
from consistent_kernels import vendored
from consistent_kernels.linear.triton import linear_fwd

SHAPES = (
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    *((960, 576), (576, 576), (3072, 576), (576, 1536)),
)
HEADS = ((151936, 4096), (151936, 1024), (49152, 576))
ROWS = (
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 160, 192),
    *(200, 224, 255, 256, 257, 384, 511, 512, 513, 777, 1000, 1024, 2048, 4096),
)
TIMED_ROWS = (1, 8, 64, 256, 1024, 8192)


def operands(columns: int, inner: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, inner], whose rows differ in magnitude, and weight [columns, inner]."""
    generator = torch.Generator("cuda").manual_seed(0)
    scale = 1 + torch.arange(rows, device="cuda")[:, None] % 7
    x = torch.randn(rows, inner, device="cuda", generator=generator) * scale
    weight = torch.randn(columns, inner, device="cuda", generator=generator) * 0.05
    return x.bfloat16(), weight.bfloat16()


def multiply(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x W^T by one DeepGEMM call."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device="cuda")
    vendored.deep_gemm().bf16_gemm_nt(x, weight, y)
    return y


def bits(columns: int, inner: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return which row counts and offsets differ, and what equals what."""
    x, weight = operands(columns, inner, 4096)
    whole = multiply(x, weight, dtype)
    differ = [m for m in ROWS if not torch.equal(multiply(x[:m], weight, dtype), whole[:m])]
    for m in (1, 5, 64, 200):
        if not torch.equal(multiply(x[100 : 100 + m], weight, dtype), whole[100 : 100 + m]):
            differ.append(m)
    triton = linear_fwd(x[:512].contiguous(), weight, None, dtype)
    cut = columns // 2 // 64 * 64
    parts = [multiply(x, part, dtype) for part in (weight[:cut], weight[cut:])]
    return {
        "columns": columns,
        "inner": inner,
        "output": str(dtype).removeprefix("torch."),
        "row_counts_that_differ_from_4096": differ,
        "share_of_512_rows_equal_to_triton": float((triton == whole[:512]).float().mean()),
        "cut_columns_equal": torch.equal(torch.cat(parts, 1), whole),
    }


def microseconds(call: Callable[[], Any], flush: torch.Tensor) -> float:
    """Return the median of 20 calls, each with a flushed L2."""
    for _ in range(3):
        call()
    spans = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(spans), 1)


def main() -> int:
    args = answer.parser(__doc__).parse_args()
    found = answer.start(__doc__, args)
    layers = [(*shape, torch.bfloat16) for shape in SHAPES]
    layers += [(*shape, torch.float32) for shape in HEADS]
    found["bits"] = [bits(*layer) for layer in layers]
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    found["times"] = []
    for columns, inner, dtype in layers:
        for rows in TIMED_ROWS if dtype == torch.bfloat16 else TIMED_ROWS[:-1]:
            x, weight = operands(columns, inner, rows)
            calls = {
                "deep_gemm_us": lambda x=x, w=weight, d=dtype: multiply(x, w, d),
                "cublas_us": lambda x=x, w=weight: torch.nn.functional.linear(x, w),
                "triton_us": lambda x=x, w=weight, d=dtype: linear_fwd(x, w, None, d),
            }
            spans = {name: microseconds(call, flush) for name, call in calls.items()}
            found["times"].append({"columns": columns, "inner": inner, "rows": rows, **spans})
    answer.publish(found, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
