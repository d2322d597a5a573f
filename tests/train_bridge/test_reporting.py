"""The trainer's report names what really computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistent_kernels import counters
from consistent_kernels.errors import ConfigurationError, ContractMismatchError
from consistent_kernels.protocol.report import ConsistencyReport, check_reports
from train_bridge import consistency_report, token_logprobs, weight_version


def as_worker(report: ConsistencyReport) -> ConsistencyReport:
    return ConsistencyReport.from_dict(report.to_dict() | {"role": "worker 0"})


def test_report_of_a_bridged_model_has_no_problems(family: str, make_bridged: Callable) -> None:
    counters.reset()  # they count for the whole process, other tests included
    model = make_bridged(family)
    token_logprobs(model, torch.arange(5, 25)[None])
    weight_version(model).bump()
    report = consistency_report(model)
    assert report.problems(served=True) == []
    layers = model.config.num_hidden_layers
    name = type(model).__name__.removesuffix("ForCausalLM")
    assert report.layers[f"Consistent{name}DecoderLayer"] == layers
    linears = sum(1 for module in model.modules() if type(module).__name__ == "Linear") - 1
    assert linears == (7 * layers if "Moe" not in name else 4 * layers + 3)
    assert report.layers["ConsistentLinear"] == linears
    assert report.layers["ConsistentLMHead"] == 1
    assert len(report.attention) == layers
    assert report.weight_version == 1
    check_reports(report, [as_worker(report)], served=True)


def test_report_shows_modules_that_were_changed_after_bridging(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    good = as_worker(consistency_report(model))
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(192, 320, bias=False)
    model.model.norm.forward = lambda x, residual: (x, residual)
    report = consistency_report(model)
    with pytest.raises(ContractMismatchError) as error:
        check_reports(report, [good])
    assert "model.layers.1.mlp.up_proj: Linear" in str(error.value)
    assert "model.norm: its forward was replaced" in str(error.value)


def test_report_needs_a_bridged_model(make_stock: Callable) -> None:
    with pytest.raises(ConfigurationError, match="not bridged"):
        consistency_report(make_stock("llama"))
