"""The contract of a block: equal on equal choices, and a difference is named."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from block_cases import BLOCKS, BlockCase

from consistent_kernels.blocks import block_contract, contract
from consistent_kernels.contract import check_same, differences
from consistent_kernels.errors import ContractMismatchError, UnsupportedError
from consistent_kernels.resolve import contract_specs


@pytest.mark.parametrize("name", BLOCKS)
def test_block_contract_is_the_same_on_both_sides(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    ours = block_contract(case.params, case.programs, "cpu")
    theirs = pickle.loads(pickle.dumps(block_contract(case.params, case.programs, "cpu")))
    check_same(ours, theirs, ours_is="engine", theirs_is="trainer")
    read = "sparse_attention_fp8" if name.endswith("-fp8") else "sparse_attention"
    assert ours.implementation(read) == "reference"
    assert set(ours.specs) == set(ours.programs)
    frozen = contract_specs(ours.name)
    assert all(frozen[op] == spec for op, spec in ours.specs.items())


def test_control_another_read_path_is_another_contract() -> None:
    case = BlockCase.make("v4-csa", "cpu")
    ours = block_contract(case.params, case.programs, "cpu")
    programs = dataclasses.replace(case.programs, read="fp8")
    theirs = block_contract(case.params, programs, "cpu")
    with pytest.raises(ContractMismatchError, match=r"specs\.sparse_attention_fp8"):
        check_same(ours, theirs, ours_is="engine", theirs_is="trainer")
    assert all(
        line.startswith(("specs.sparse_attention", "programs.sparse_attention"))
        for line in differences(ours, theirs)
    )


def test_control_another_grouped_linear_is_another_contract() -> None:
    case = BlockCase.make("v32", "cpu")
    ours = block_contract(case.params, case.programs, "cpu")
    assert ours.implementation("grouped_linear") == "reference"
    programs = dataclasses.replace(case.programs, grouped="triton")
    theirs = block_contract(case.params, programs, "cpu")
    assert theirs.implementation("grouped_linear") == "triton"
    found = differences(ours, theirs)
    assert found
    assert all(line.startswith("programs.grouped_linear") for line in found)


def test_control_another_number_is_another_contract() -> None:
    case = BlockCase.make("v32", "cpu")
    ours = block_contract(case.params, case.programs, "cpu")
    params = dataclasses.replace(case.params, topk=case.params.topk + 1)
    theirs = block_contract(params, case.programs, "cpu")
    assert differences(ours, theirs) == [f"model.topk: {params.topk - 1} != {params.topk}"]


def test_control_another_order_of_the_ops_is_another_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a block computes between its ops is part of the digest: its own sources."""
    case = BlockCase.make("v32", "cpu")
    ours = block_contract(case.params, case.programs, "cpu")
    real = contract.source_sha256

    def changed(op: str, *files: str, shared: tuple[str, ...] = ()) -> str:
        return "0" * 64 if op == "blocks" else real(op, *files, shared=shared)

    monkeypatch.setattr(contract, "source_sha256", changed)
    theirs = block_contract(case.params, case.programs, "cpu")
    (line,) = differences(ours, theirs)
    assert line.startswith("model.block_source: ")


def test_block_programs_reject_an_unknown_read_path() -> None:
    case = BlockCase.make("v32", "cpu")
    with pytest.raises(
        UnsupportedError, match="read 'bf16' is not supported; supported: workspace"
    ):
        dataclasses.replace(case.programs, read="bf16")
