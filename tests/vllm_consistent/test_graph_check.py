"""The graph walker: our ops and moves pass, any other floating-point operator is named."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from consistent_kernels.rms_norm import add_rms_norm, rms_norm
from consistent_kernels.silu_and_mul import silu_and_mul
from vllm_consistent.graph_check import foreign_float_ops

H = 64


def traced(function, *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def ours(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y, total = add_rms_norm(x, residual, weight, 1e-5, impl="reference")
    z = silu_and_mul(y[:, : H // 2], total[:, H // 2 :], impl="reference")
    return torch.cat([z, z], dim=1).view(-1, H)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(3, H, dtype=torch.bfloat16)
    return x, x.clone(), torch.ones(H, dtype=torch.bfloat16)


def test_our_ops_and_moves_pass() -> None:
    assert foreign_float_ops(traced(ours, *inputs())) == []


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("aten::add", lambda x: x + x),
        ("aten::mul", lambda x: x * 2),
        ("aten::_to_copy", lambda x: x.float()),
        ("aten::mm", lambda x: x @ x.t()),
        ("aten::gelu", torch.nn.functional.gelu),
    ],
)
def test_control_a_foreign_operator_is_named(name: str, extra) -> None:
    def mixed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return extra(ours(x, residual, weight))

    found = foreign_float_ops(traced(mixed, *inputs()))
    assert len(found) == 1
    assert name in found[0]


def test_integer_arithmetic_passes() -> None:
    def integers(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.expand(ids.shape[0], H)
        return rms_norm(rows, weight, 1e-5, impl="reference"), ids * 2 + 1

    graph = traced(integers, torch.arange(3), torch.ones(H))
    assert foreign_float_ops(graph) == []
