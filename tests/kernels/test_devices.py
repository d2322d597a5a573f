"""An implementation for CUDA that is given a CPU's tensors says so, by the op's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistent_kernels import devices
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.experts import combine, expert_outputs
from consistent_kernels.fp8_experts import Fp8ExpertWeight, fp8_expert_outputs
from consistent_kernels.fp8_linear import fp8_gemm
from consistent_kernels.quantization import quantize_blocks, quantize_rows
from consistent_kernels.router import RouterParameters, router

X = torch.zeros(2, 128, dtype=torch.bfloat16)
FP8 = torch.zeros(2, 128).to(torch.float8_e4m3fn)
IDS = torch.zeros(2, 1, dtype=torch.int32)


def weight(rows: int) -> Fp8ExpertWeight:
    values = torch.zeros(1, rows, 128).to(torch.float8_e4m3fn)
    return Fp8ExpertWeight(values, torch.ones(1, rows // 128, 1))


CALLS: dict[str, Callable[[str], object]] = {
    "quantize_rows": lambda impl: quantize_rows(X, scale_format="fp32", impl=impl),
    "quantize_blocks": lambda impl: quantize_blocks(X, scale_format="fp32", impl=impl),
    "fp8_gemm": lambda impl: fp8_gemm(
        FP8, torch.ones(2, 1), FP8, torch.ones(1, 1), scale_format="fp32", impl=impl
    ),
    "router": lambda impl: router(
        torch.zeros(2, 4), parameters=RouterParameters(4, 1, "softmax", renormalize=True), impl=impl
    ),
    "experts": lambda impl: expert_outputs(
        X, X.new_zeros(1, 256, 128), X.new_zeros(1, 128, 128), IDS, impl=impl
    ),
    "combine": lambda impl: combine(X[:, None], IDS, torch.ones(2, 1), impl=impl),
    "fp8_experts": lambda impl: fp8_expert_outputs(
        X, weight(256), weight(128), IDS, scale_format="fp32", impl=impl
    ),
}
ON_CUDA = [(op, "triton") for op in CALLS]
ON_CUDA += [(op, "deep_gemm") for op in ("fp8_gemm", "experts", "fp8_experts")]


@pytest.mark.parametrize(("op", "impl"), ON_CUDA)
def test_op_rejects_tensors_of_a_cpu(op: str, impl: str) -> None:
    wanted = f"{op}: impl '{impl}' on cpu is not supported; supported: CUDA tensors, impl 'ref"
    with pytest.raises(UnsupportedError, match=wanted):
        CALLS[op](impl)


def test_control_the_interpreter_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_interpreted", lambda: True)
    require_cuda("an op", "triton", X)
