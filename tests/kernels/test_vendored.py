"""Finding the binaries of vLLM's CUDA wheel, on a made-up wheel and, on a GPU, on the real one."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from consistent_kernels import vendored
from consistent_kernels.errors import MissingBinaryError

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package named vllm that must not be run, with a DeepGEMM that imports as the real one."""
    vllm = tmp_path / "vllm"
    package = vllm / "third_party" / "deep_gemm"
    (package / "utils").mkdir(parents=True)
    (package / "include").mkdir()
    (package / "include" / "gemm.cuh").write_text("// kernel\n")
    (vllm / "__init__.py").write_text("import os\nos.environ['VLLM_RAN'] = '1'\n")
    (vllm / "third_party" / "__init__.py").write_text("")
    (package / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not loaded here")
    (package / "utils" / "__init__.py").write_text("from . import layout\n")
    (package / "utils" / "layout.py").write_text("ALIGNMENT = 16\n")
    (package / "__init__.py").write_text(
        "from . import utils\n__version__ = '0'\ndef _find_cuda_home():\n    return '/nowhere'\n"
    )
    return tmp_path


def run(wheel: Path | None, code: str) -> str:
    folders = [str(wheel), str(KERNELS)] if wheel else [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_deep_gemm_loads_without_running_vllm(wheel: Path) -> None:
    code = """
import os, sys
from consistent_kernels import vendored
module = vendored.deep_gemm()
assert module.utils.layout.ALIGNMENT == 16
assert "vllm" not in sys.modules and "VLLM_RAN" not in os.environ
assert vendored.deep_gemm() is module
print(*(b.name for b in vendored.binaries()))
"""
    assert run(wheel, code) == "deep_gemm deep_gemm_include"


def test_deep_gemm_is_shared_with_vllm_in_either_order(wheel: Path) -> None:
    first = """
import importlib, os
from consistent_kernels import vendored
ours = vendored.deep_gemm()
theirs = importlib.import_module("vllm.third_party.deep_gemm")
import vllm, vllm.third_party
import vllm.third_party.deep_gemm as again
assert theirs is ours and again is ours and os.environ["VLLM_RAN"] == "1"
"""
    second = """
import importlib
theirs = importlib.import_module("vllm.third_party.deep_gemm")
from consistent_kernels import vendored
assert vendored.deep_gemm() is theirs
"""
    run(wheel, first)
    run(wheel, second)


def test_control_a_plain_import_runs_vllm(wheel: Path) -> None:
    code = "import os, vllm.third_party.deep_gemm\nprint(os.environ['VLLM_RAN'])"
    assert run(wheel, code) == "1"


def test_binaries_see_a_changed_kernel_source(wheel: Path) -> None:
    code = """
from consistent_kernels import vendored
print(vendored.find_binary("deep_gemm_include").sha256, vendored.find_binary("deep_gemm").sha256)
"""
    before = run(wheel, code).split()
    header = wheel / "vllm" / "third_party" / "deep_gemm" / "include" / "gemm.cuh"
    header.write_text("// kernel, changed\n")
    after = run(wheel, code).split()
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_missing_binaries_name_package_place_and_remedy(wheel: Path) -> None:
    code = """
from consistent_kernels import vendored
from consistent_kernels.errors import MissingBinaryError
calls = (vendored.flash_attn_3, vendored.flash_mla, vendored.flash_mla_extension,
         vendored.deep_gemm_compiler)
for call in calls:
    try:
        call()
    except MissingBinaryError as error:
        print(error)
"""
    lines = run(wheel, code).splitlines()
    names = ("_vllm_fa3_C", "_flashmla_C", "_flashmla_extension_C", "nvcc")
    assert [line.split(":")[0] for line in lines] == list(names)
    assert all("pip install vllm==0.25.1" in line and "looked in /" in line for line in lines[:3])
    assert "CUDA_HOME" in lines[3]


def test_deep_gemm_that_fails_to_load_leaves_nothing_behind(wheel: Path) -> None:
    package = wheel / "vllm" / "third_party" / "deep_gemm" / "__init__.py"
    package.write_text("from . import utils\nassert False, 'no toolkit'\n")
    code = """
import sys
from consistent_kernels import vendored
from consistent_kernels.errors import MissingBinaryError
try:
    vendored.deep_gemm()
except MissingBinaryError as error:
    print(error)
print([name for name in sys.modules if name.startswith("vllm")], vendored.binaries())
"""
    first, last = run(wheel, code).splitlines()
    assert "does not load (AssertionError: no toolkit)" in first
    assert "CUDA_HOME" in first
    assert last == "[] ()"


def test_a_loaded_library_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention call asks for it, and looking reads all mappings of the process."""
    looked: list[str] = []

    def find(name: str) -> vendored.Binary:
        looked.append(name)
        return vendored.Binary(name, Path("/x/_vllm_fa3_C.abi3.so"), "0")

    monkeypatch.setattr(vendored, "find_binary", find)
    monkeypatch.setattr(vendored, "_mapped", lambda name: Path("/x") / name)
    vendored._load_ops.cache_clear()
    try:
        found = [vendored.flash_attn_3() for _ in range(3)]
    finally:
        vendored._load_ops.cache_clear()
    assert looked == ["_vllm_fa3_C"]
    assert found[0] is found[1] is found[2]


def test_find_binary_rejects_unknown_names() -> None:
    with pytest.raises(MissingBinaryError, match="deep_gemm, deep_gemm_include, _vllm_fa3_C"):
        vendored.find_binary("cublas")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_binaries_load_without_vllm() -> None:
    code = """
import sys
from consistent_kernels import vendored
assert callable(vendored.deep_gemm().fp8_gemm_nt)
assert vendored.flash_attn_3().fwd and vendored.flash_mla() and vendored.flash_mla_extension()
assert "vllm" not in sys.modules
assert len(vendored.deep_gemm_compiler()) > 3
print(*(binary.name for binary in vendored.binaries()))
"""
    assert len(run(None, code).split()) == 5
