"""Programs name what decides their bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistent_kernels import vendored
from consistent_kernels.errors import MissingBinaryError
from consistent_kernels.fp8_linear.spec import IMPLEMENTATIONS, SPEC, program, quantization_of
from consistent_kernels.quantization import spec as quantization


def test_specs_hold_plain_values_and_constants_as_bits() -> None:
    fields = quantization.SPEC.to_dict()["fields"]
    assert fields["fp8_max"] == "0x43e00000"
    assert fields["min_amax"] == fields["min_ue8m0_scale"] == "0x2edbe6ff"
    assert SPEC.to_dict()["version"] == 1


def test_programs_differ_by_implementation() -> None:
    assert program("reference").source_sha256 != program("triton").source_sha256
    assert "fp32_witness" in program("reference").schedule
    assert program("triton").schedule["tile_m"] == 64
    assert {quantization_of(impl) for impl in IMPLEMENTATIONS} == set(quantization.IMPLEMENTATIONS)


def test_deep_gemm_program_names_library_kernels_and_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        vendored, "find_binary", lambda name: vendored.Binary(name, Path("/x"), f"hash of {name}")
    )
    monkeypatch.setattr(vendored, "deep_gemm_compiler", lambda: "nvcc 13.0")
    schedule = dict(program("deep_gemm").schedule)
    assert schedule == {
        "library_sha256": "hash of deep_gemm",
        "kernels_sha256": "hash of deep_gemm_include",
        "compiler": "nvcc 13.0",
    }


def test_deep_gemm_program_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> vendored.Binary:
        raise MissingBinaryError(name, "missing", "nowhere", "Install it")

    monkeypatch.setattr(vendored, "find_binary", missing)
    with pytest.raises(MissingBinaryError, match="deep_gemm: missing"):
        program("deep_gemm")
