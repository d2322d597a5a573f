"""Reports: what is wrong in one process, and between processes, is listed in one error."""

from __future__ import annotations

import dataclasses
import json

import pytest

from consistent_kernels.contract import Contract, OpSpec, Program
from consistent_kernels.errors import ContractMismatchError, InvalidInputError
from consistent_kernels.protocol import ConsistencyReport, check_reports, environment_facts
from consistent_kernels.protocol.report import differences

CALLS = {
    "linear": {"reference": 8},
    "add_rms_norm": {"reference": 4},
    "attention_paged": {"reference": 2},
}


def contract(source: str = "a" * 64, linear: str = "reference") -> Contract:
    ops = ("linear", "rms_norm", "attention")
    chosen = dict.fromkeys(ops, "reference") | {"linear": linear}
    return Contract(
        "test_v1",
        {"architecture": "LlamaForCausalLM"},
        {"device": "cpu"},
        {op: OpSpec(op, 1, {"formula": op}) for op in ops},
        {op: Program(chosen[op], source, {"tile": 16}) for op in ops},
    )


def report(role: str = "worker 0", of: Contract | None = None, **changes: object) -> object:
    installed = of or contract()
    full = ConsistencyReport(
        role=role,
        requested=True,
        registered=True,
        contract=installed.to_dict(),
        digest=installed.digest,
        runner="V1",
        device="cpu",
        sampler="vllm_consistent.Sampler",
        layers={"ConsistentRMSNorm": 5},
        attention={"layers.0": "consistent"},
        calls=CALLS,
        packages={"torch": "2.11.0", "vllm": "0.25.1"},
        environment={"threads": 2, "cpu_capability": "AVX2"},
        weight_version=3,
    )
    return dataclasses.replace(full, **changes)


def trainer(**changes: object) -> ConsistencyReport:
    facts = {
        "runner": "hf",
        "sampler": None,
        "layers": {"RMSNormForward": 5},
        "attention": {},
        "packages": {"torch": "2.11.0"},
        "environment": {"threads": 1},
    }
    return report("trainer", **(facts | changes))


def test_check_reports_accepts_equal_processes() -> None:
    check_reports(trainer(), [report(), report("worker 1", calls=CALLS)], served=True)
    fewer = {op: {"reference": 1} for op in CALLS}
    other_threads = {"threads": 7, "cpu_capability": "AVX2"}
    check_reports(trainer(), [report(), report("w1", calls=fewer, environment=other_threads)])


def test_report_survives_transport() -> None:
    ours = report()
    assert ConsistencyReport.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    unnamed = {key: value for key, value in ours.to_dict().items() if key != "role"}
    assert ConsistencyReport.from_dict(unnamed, role="worker 0") == ours
    data = {**ours.to_dict(), "novel": 1}
    del data["digest"]
    with pytest.raises(InvalidInputError, match=r"missing or unknown \['digest', 'novel'\]"):
        ConsistencyReport.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"requested": False}, "consistency was not requested"),
        ({"registered": False}, "plugin or bridge is not installed"),
        ({"contract": None, "digest": None}, "no contract is installed"),
        ({"digest": "0" * 64}, "digest 0000000000000000 is not its contract's"),
        ({"foreign_layers": ["lm_head: ParallelLMHead"]}, "outside the contract: lm_head"),
        ({"stale": "update failed half way"}, "weights are stale: update failed"),
        ({"calls": {**CALLS, "linear": {"triton": 1}}}, r"linear was served by \{'triton': 1\}"),
        ({"calls": {"linear": {"reference": 1}}}, "attention was never called"),
    ],
)
def test_control_check_reports_sees_one_process(changes: dict, expected: str) -> None:
    with pytest.raises(ContractMismatchError, match=expected):
        check_reports(trainer(), [report(**changes)], served=True)


def test_check_reports_counts_calls_only_when_served() -> None:
    check_reports(trainer(calls={}), [report(calls={})])
    with pytest.raises(ContractMismatchError, match="trainer: linear was never called"):
        check_reports(trainer(calls={}), [report()], served=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"of": contract("b" * 64)}, r"contract.programs.linear.source_sha256: 'aaa"),
        ({"packages": {"torch": "2.12.0"}}, "packages.torch: '2.11.0' != '2.12.0'"),
        ({"weight_version": 2}, "weight_version: 3 != 2"),
        ({"device": "cuda"}, "device: 'cpu' != 'cuda'"),
    ],
)
def test_control_check_reports_sees_two_processes(changes: dict, expected: str) -> None:
    with pytest.raises(ContractMismatchError, match=expected):
        check_reports(trainer(), [report(**changes)])


def test_check_reports_compares_workers() -> None:
    other = report("worker 1", runner="V2", environment={"threads": 2, "cpu_capability": "AVX512"})
    with pytest.raises(ContractMismatchError) as caught:
        check_reports(trainer(), [report(), other])
    text = str(caught.value)
    assert "worker 0 and worker 1: runner: 'V1' != 'V2'" in text
    assert "worker 0 and worker 1: environment.cpu_capability: 'AVX2' != 'AVX512'" in text


def test_check_reports_lists_everything_at_once() -> None:
    bad = report("worker 1", of=contract(linear="onednn"), stale="halted", weight_version=1)
    with pytest.raises(ContractMismatchError) as caught:
        check_reports(trainer(requested=False), [report(foreign_layers=["norm: X"]), bad])
    text = str(caught.value)
    for line in (
        "trainer: consistency was not requested",
        "worker 0: layer outside the contract: norm: X",
        "worker 1: weights are stale: halted",
        "worker 1: linear was served by {'reference': 8}, the contract says 'onednn'",
        "trainer and worker 1: contract.programs.linear.implementation",
        "trainer and worker 1: weight_version: 3 != 1",
    ):
        assert line in text
    with pytest.raises(ContractMismatchError, match="no worker reported"):
        check_reports(trainer(), [])


def test_differences_lists_every_fact() -> None:
    assert differences(report(), report("worker 9")) == []
    lines = differences(trainer(), report())
    keys = [line.split(":")[0] for line in lines]
    assert keys == sorted(keys)
    assert {"runner", "sampler", "environment.threads", "packages.vllm"} <= set(keys)


def test_environment_facts_name_threads_and_capability() -> None:
    facts = environment_facts("cpu")
    assert {"threads", "cpu_capability", "python", "host"} == facts.keys()
