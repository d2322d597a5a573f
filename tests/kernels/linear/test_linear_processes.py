"""Linear gives the same bits in every process and with every number of threads."""

from __future__ import annotations

from fresh_process import output_of_process

_SOURCE = """
from consistent_kernels import llvm
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.linear.onednn import native_bf16
from consistent_kernels.linear.spec import program
from consistent_kernels.testing import hazard_activations

impls = ["reference"]
impls += ["llvm"] if llvm.is_available() else []
impls += ["onednn"] if native_bf16() else []
for impl in impls:
    for columns, inner in ((192, 576), (576, 1536), (64, 8192), (17, 2048)):
        x = hazard_activations((53, inner), seed=1)
        master = hazard_activations((columns, inner), seed=2)
        for out_dtype in (None, torch.float32):
            weight = prepare_weight(master, dtype=x.dtype, impl=impl, out_dtype=out_dtype)
            print_bits(linear(x, weight, impl=impl, out_dtype=out_dtype))
    print(dict(program(impl).schedule))
"""


def test_linear_is_thread_and_process_invariant() -> None:
    one, two, five = (output_of_process(_SOURCE, threads=threads) for threads in (1, 2, 5))
    assert two == one, "1 and 2 threads differ"
    assert five == one, "1 and 5 threads differ"
