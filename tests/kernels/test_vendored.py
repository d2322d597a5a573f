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


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("#!/bin/sh\necho no license >&2\nexit 3\n", "exit code 3: no license"),
        ("#!/bin/sh\nexit 0\n", "it names no version"),
        (None, "it does not run"),
    ],
)
def test_a_compiler_that_does_not_answer_is_named(
    wheel: Path, script: str | None, problem: str
) -> None:
    nvcc = wheel / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(script or "not a program")
    if script:
        nvcc.chmod(0o755)
    package = wheel / "vllm" / "third_party" / "deep_gemm" / "__init__.py"
    package.write_text(f"def _find_cuda_home():\n    return {str(wheel / 'cuda')!r}\n")
    code = """
from consistent_kernels import vendored
from consistent_kernels.errors import MissingBinaryError
try:
    vendored.deep_gemm_compiler()
except MissingBinaryError as error:
    print(error)
"""
    line = run(wheel, code)
    assert line.startswith("nvcc: ")
    assert problem in line
    assert f"looked in {nvcc}" in line
    assert "CUDA_HOME" in line


def test_programs_see_every_changed_binary(wheel: Path) -> None:
    """A contract holds these programs: engine and trainer with other binaries are told apart."""
    nvcc = wheel / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    vllm = wheel / "vllm"
    package = vllm / "third_party" / "deep_gemm"
    (package / "__init__.py").write_text(
        f"def _find_cuda_home():\n    return {str(wheel / 'cuda')!r}\n"
    )
    attention = vllm / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    attention.parent.mkdir()
    attention.write_bytes(b"one")
    library = next(package.glob("_C*"))
    changed = [str(path) for path in (library, package / "include" / "gemm.cuh", attention, nvcc)]
    code = f"""
from pathlib import Path
from consistent_kernels import vendored
from consistent_kernels.attention import spec as attention
from consistent_kernels.linear import spec as linear
def schedule():
    vendored._sha256.cache_clear()  # once a process, where nobody changes a wheel
    of_attention = attention.program("flash_attn").schedule
    return {{f"attention.{{k}}": v for k, v in of_attention.items()}} | dict(
        linear.program("deep_gemm").schedule
    )
for path in map(Path, {changed!r}):
    before, bits = schedule(), path.read_bytes()
    path.write_bytes(bits.replace(b"release", b"another release") + b" ")
    after = schedule()
    print(*(name for name in before if before[name] != after[name]))
    path.write_bytes(bits)
    assert schedule() == before
"""
    assert run(wheel, code).splitlines() == [
        "library_sha256",
        "headers_sha256",
        "attention.library_sha256",
        "compiler",
    ]


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
