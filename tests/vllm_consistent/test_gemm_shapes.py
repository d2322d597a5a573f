"""What DeepGEMM compiles and probes before the first step, on both sides, of FP8 models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model

pytest.importorskip("vllm", reason="needs vLLM")
pytest.importorskip("triton", reason="the grouped shapes import Triton kernels")

from consistent_kernels.fp8_experts.deep_gemm_start import Fp8GroupedGemmShape
from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
from consistent_kernels.linear.deep_gemm_start import GemmShape
from train_bridge import bridge_model, load_masters, start
from train_bridge.state import BridgeState
from vllm_consistent.layers.fp8 import ConsistentFp8LinearMethod
from vllm_consistent.layers.fp8_experts import ConsistentFp8ExpertsMethod
from vllm_consistent.layers.gemm_shapes import gemm_shapes
from vllm_consistent.layers.router import ConsistentGateMethod


def layer(kind: type, impl: str, weight: torch.Tensor, name: str = "weight") -> torch.nn.Module:
    module = torch.nn.Module()
    module.bias, module.top_k = None, 4
    module.quant_method = kind.__new__(kind)
    module.quant_method.impl = impl
    module.quant_method.scale_format = "fp32"
    module.quant_method.parts = None
    setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
    return module


def engine_model(impl: str) -> torch.nn.Module:
    fp8 = torch.float8_e4m3fn
    return torch.nn.ModuleList(
        [
            layer(ConsistentFp8LinearMethod, impl, torch.empty(1024, 256, dtype=fp8)),
            layer(ConsistentFp8LinearMethod, impl, torch.empty(1024, 256, dtype=fp8)),
            layer(
                ConsistentFp8ExpertsMethod, impl, torch.empty(16, 256, 128, dtype=fp8), "w2_weight"
            ),
            layer(ConsistentGateMethod, impl, torch.empty(16, 256, dtype=torch.bfloat16)),
        ]
    )


def test_engine_prepares_each_shape_of_a_block_fp8_model_once() -> None:
    shapes = gemm_shapes(engine_model("deep_gemm"), max_tokens=512, max_requests=8)
    assert shapes == {
        Fp8GemmShape(1024, 256, 512, "fp32"),
        Fp8GroupedGemmShape(16, 256, 256, 2048, "fp32"),
        Fp8GroupedGemmShape(16, 256, 128, 2048, "fp32"),
        GemmShape(16, 256, 512, out_fp32=True),
    }
    assert gemm_shapes(engine_model("triton"), max_tokens=512, max_requests=8) == set()


def test_trainer_prepares_the_separate_projections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bridge_model(load_masters(save_tiny_model(tmp_path, "qwen3_moe_fp8")))
    given: list[Any] = []
    monkeypatch.setattr(BridgeState, "impl", lambda self, op: IMPLS.get(op, "triton"))
    monkeypatch.setattr("consistent_kernels.deep_gemm_start.prepare", lambda s, _: given.extend(s))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    start.prepare_kernels(model, model._bridge, tokens=1500)
    fp8 = {shape for shape in given if isinstance(shape, Fp8GemmShape)}
    assert {(shape.columns, shape.inner) for shape in fp8} == {(512, 256), (256, 512), (256, 256)}
    assert {shape.max_rows for shape in fp8} == {2048}
    grouped = {shape for shape in given if isinstance(shape, Fp8GroupedGemmShape)}
    assert {(s.experts, s.columns, s.inner, s.max_rows) for s in grouped} == {
        (16, 256, 256, 8192),
        (16, 256, 128, 8192),
    }
    bf16 = {(s.columns, s.inner, s.out_fp32) for s in given if isinstance(s, GemmShape)}
    assert bf16 == {(16, 256, True), (1280, 256, True)}, "gate and head"
    given.clear()
    start.prepare_kernels(model, model._bridge, tokens=2048)
    assert given == [], "these rows are prepared"


IMPLS = {"linear": "deep_gemm", "fp8_linear": "deep_gemm", "fp8_experts": "deep_gemm"}
