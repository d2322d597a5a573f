"""FP8 linear gives the same bits in every process and with every number of threads."""

from __future__ import annotations

from fresh_process import output_of_process

_SOURCE = """
from consistent_kernels.fp8_linear import fp8_linear
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.testing import hazard_activations

for columns, inner in ((192, 576), (576, 1536), (17, 200)):
    x = hazard_activations((53, inner), seed=1)
    for scale_format in ("fp32", "ue8m0"):
        weight = quantize_weight(
            hazard_activations((columns, inner), seed=2), scale_format=scale_format,
            impl="reference",
        )
        y = fp8_linear(x, *weight, scale_format=scale_format, impl="reference")
        print_bits(*weight, y)
"""


def test_fp8_linear_is_thread_and_process_invariant() -> None:
    one, five = (output_of_process(_SOURCE, threads=threads) for threads in (1, 5))
    assert five == one, "1 and 5 threads differ"
