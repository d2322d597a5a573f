"""Requested = installed = served, or one error that lists every difference."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent_kernels import counters
from consistent_kernels.errors import ContractMismatchError
from vllm_consistent.integrations.engine import verify_reports

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(engines: Callable[..., Any]) -> Any:
    engine = engines("llama")
    # Calls are counted for the whole process, those of other tests' engines and programs too.
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    worker.calls_before = counters.snapshot()
    engine.score([[5, 6, 7]])
    return engine


def test_report_names_what_serves(engine: Any) -> None:
    report = engine.consistency_report()
    assert report["runner"] == "V1"
    assert report["device"] == "cpu"
    assert report["foreign_layers"] == []
    assert len(report["attention"]) == 3
    assert report["layers"]["ConsistentRMSNorm"] == 7
    served = {op for op, calls in report["calls"].items() if sum(calls.values())}
    assert {"linear", "attention_paged", "rms_norm", "rotary", "token_logprobs"} <= served
    assert report["digest"] == engine.contract.digest
    assert set(report["patches"]) == {
        "vllm.engine.arg_utils.EngineArgs.create_engine_config",
        "vllm.v1.engine.input_processor.InputProcessor._validate_params",
    }


def test_counters_are_live(engine: Any) -> None:
    before = engine.consistency_report()["calls"]["attention_paged"]
    engine.score([[5, 6, 7]])
    after = engine.consistency_report()["calls"]["attention_paged"]
    assert sum(after.values()) >= sum(before.values()) + 3


def test_rejects_a_plugin_that_is_not_loaded() -> None:
    with pytest.raises(ContractMismatchError, match="the plugin is not loaded there"):
        verify_reports([None])
    with pytest.raises(ContractMismatchError, match="no worker reported"):
        verify_reports([])


def test_rejects_another_contract(engine: Any) -> None:
    report = engine.consistency_report()
    model = {**engine.contract.model, "rms_norm_eps": "0x00000000"}
    other = dataclasses.replace(engine.contract, model=model)
    with pytest.raises(ContractMismatchError, match=r"contract: model\.rms_norm_eps: '0x00000000'"):
        verify_reports([report], other)
    assert verify_reports([report], engine.contract).digest == report["digest"]


def test_all_differences_come_in_one_error(engine: Any) -> None:
    bad = copy.deepcopy(engine.consistency_report())
    bad |= {
        "registered": False,
        "foreign_layers": ["model.norm: RMSNorm"],
        "sampler": "vllm.v1.sample.sampler.Sampler",
        "stale": "a weight update is under way",
    }
    with pytest.raises(ContractMismatchError) as caught:
        verify_reports([bad])
    text = str(caught.value)
    for part in ("not installed", "model.norm: RMSNorm", "sampler.Sampler", "under way"):
        assert part in text


def test_a_stock_layer_is_found() -> None:
    from vllm_consistent.reporting import layer_census

    class StockLayer(torch.nn.Linear):
        pass

    StockLayer.__module__ = "vllm.model_executor.layers.linear"
    model = torch.nn.Sequential(torch.nn.Identity(), StockLayer(2, 2))
    assert layer_census(model) == ({}, {}, ["1: StockLayer"])
