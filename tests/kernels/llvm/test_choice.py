"""Who runs the compiled kernels: a property of the machine, decided once per op."""

from __future__ import annotations

import importlib

import pytest

from consistent_kernels import llvm
from consistent_kernels.linear import onednn

OPS = ("attention", "linear", "silu_and_mul", "token_logprobs")


def chosen(op: str) -> str:
    return importlib.import_module(f"consistent_kernels.{op}.spec").choose("cpu")


@pytest.mark.parametrize("op", OPS)
def test_compiled_kernels_are_chosen_where_they_can_run(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "native_bf16", lambda: "avx512_bf16")
    monkeypatch.setattr(llvm, "is_available", lambda: True)
    assert chosen(op) == "llvm"
    monkeypatch.setattr(llvm, "is_available", lambda: False)
    assert chosen(op) == ("onednn" if op == "linear" else "reference")


def test_linear_leaves_amx_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "is_available", lambda: True)
    monkeypatch.setattr(onednn, "native_bf16", lambda: "amx")
    assert chosen("linear") == "onednn"
    monkeypatch.setattr(onednn, "native_bf16", lambda: None)
    assert chosen("linear") == "llvm"


def test_program_names_what_decides_its_bits() -> None:
    if not llvm.is_available():
        pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite")
    for op in OPS:
        spec = importlib.import_module(f"consistent_kernels.{op}.spec")
        schedule = spec.program("llvm").schedule
        assert schedule["multiply"] in ("dpbf16", "fma")
        assert "llvmlite" in schedule
