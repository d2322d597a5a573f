"""What the rollout benchmark tells stock where FlashInfer has no sources; never ours."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout import stock
from benchmarks.rollout.engine import Engine
from benchmarks.rollout.stock import FP8_SWITCH, startable
from benchmarks.rollout.variants import variants

WANTED = variants(["consistent", "batch_invariant"], with_stock=True)


def install(monkeypatch: pytest.MonkeyPatch, **folders: Path | None) -> None:
    """Let the named packages be installed in these folders, and no other."""

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        if folders.get(name) is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folders[name])]
        return spec

    monkeypatch.setattr(stock.importlib.util, "find_spec", find)


def test_stock_alone_is_told_where_flashinfer_has_nothing_to_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, flashinfer=tmp_path)
    given = startable(WANTED, block_fp8=True)
    assert [variant.environment.get(FP8_SWITCH) for variant in given] == ["0", None, "0"]
    for before, after in zip(WANTED, given, strict=True):
        assert before.environment.items() <= after.environment.items()
    assert startable(WANTED, block_fp8=False) == WANTED, "a bf16 model asks for no FP8 linear"


@pytest.mark.parametrize("found", ["sources", "compiled", "nothing installed"])
def test_control_stock_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str
) -> None:
    folders: dict[str, Path | None] = {"flashinfer": tmp_path}
    if found == "sources":
        source = tmp_path / stock._SOURCE
        source.parent.mkdir(parents=True)
        source.touch()
    elif found == "compiled":
        folders["flashinfer_jit_cache"] = tmp_path
    else:
        folders["flashinfer"] = None
    install(monkeypatch, **folders)
    assert startable(WANTED, block_fp8=True) == WANTED


def test_an_engine_reports_the_variables_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = pytest.importorskip("vllm", reason="needs vLLM")
    arguments: list[Any] = []
    monkeypatch.setattr(vllm, "LLM", lambda **given: arguments.append(given))
    monkeypatch.setenv(FP8_SWITCH, "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "somewhere")
    monkeypatch.setenv("VLLM_CONSISTENT", "0")
    started = Engine().start("a model", {"seed": 1}, consistent=False)
    assert arguments == [{"model": "a model", "seed": 1}]
    assert started["environment"][FP8_SWITCH] == "0"
    assert not {"VLLM_CACHE_ROOT", "VLLM_CONSISTENT"} & set(started["environment"])
