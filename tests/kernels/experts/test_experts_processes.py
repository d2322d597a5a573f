"""Router and experts give the same bytes in every process, whatever the number of threads."""

from __future__ import annotations

from fresh_process import output_of_process

SOURCE = """
from expert_cases import SHAPES, Shape, masters, prepared, routing, tokens
from router_cases import case
from consistent_kernels.experts import experts
from consistent_kernels.fp8_experts import fp8_experts, quantize_expert_weight
from consistent_kernels.linear.onednn import native_bf16
from consistent_kernels.router import router

shape = SHAPES["qwen3-like"]
x = tokens(shape, 65, "cpu", seed=1)
ids, weights = routing(shape, 65, "cpu", seed=2)
for impl in ("reference",) if native_bf16() is None else ("reference", "onednn"):
    w13, w2 = prepared(shape, impl, "cpu")
    print_bits(experts(x, w13, w2, ids, weights, limit=0.5, impl=impl))
fp8 = Shape(6, 3, 256, 128)
quantized = [
    quantize_expert_weight(w, scale_format="ue8m0", impl="reference") for w in masters(fp8, "cpu")
]
x = tokens(fp8, 65, "cpu", seed=1)
print_bits(
    fp8_experts(
        x, *quantized, *routing(fp8, 65, "cpu", seed=2), scale_format="ue8m0", impl="reference"
    )
)
for name in ("qwen3", "deepseek-v3", "deepseek-v4"):
    logits, bias, parameters = case(name, 257, "cpu", seed=3)
    print_bits(*router(logits, bias, parameters=parameters, impl="reference"))
"""


def test_router_and_experts_are_stable_across_processes() -> None:
    first = output_of_process(SOURCE, threads=1)
    assert len(set(first.split())) >= 8, "results differ from each other"
    for threads in (2, 3):
        assert output_of_process(SOURCE, threads=threads) == first, f"{threads} threads"
