"""The tree's own rules: import arrows, cold imports, file sizes, environment reads, doc paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "consistent_kernels": ROOT / "kernels" / "consistent_kernels",
    "train_bridge": ROOT / "train_bridge",
    "vllm_consistent": ROOT / "vllm_consistent",
}
MAY_IMPORT_TRAIN_BRIDGE = ("vllm_consistent/cli", "vllm_consistent/integrations")
MAX_LINES = 500


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def imported_roots(path: Path) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            roots.add(node.module.split(".")[0])
    return roots


def forbidden_imports(package: str, path: Path) -> set[str]:
    roots = imported_roots(path)
    if package == "consistent_kernels":
        others = {"vllm", "transformers", "verl", "train_bridge", "vllm_consistent"}
        return roots & others
    if package == "train_bridge":
        return roots & {"vllm", "vllm_consistent"}
    if str(path.relative_to(ROOT)).startswith(MAY_IMPORT_TRAIN_BRIDGE):
        return set()
    return roots & {"train_bridge"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    files = python_files(PACKAGES[package])
    assert files, f"no files found for {package}"
    broken = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in files
        if (found := forbidden_imports(package, path))
    }
    assert broken == {}


def test_control_a_forbidden_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from vllm.config import VllmConfig\n    return VllmConfig\n")
    assert forbidden_imports("train_bridge", path) == {"vllm"}


def test_kernels_folder_is_no_package() -> None:
    # `kernels` is also a Hugging Face package that transformers probes; ours must not shadow it.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_files_stay_under_500_lines() -> None:
    folders = [*PACKAGES.values(), ROOT / "tests", ROOT / "benchmarks"]
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in folders
        for path in python_files(folder)
        if (lines := path.read_text().count("\n")) > MAX_LINES
    }
    assert long == {}


def test_environment_is_read_in_one_file_a_package() -> None:
    pattern = re.compile(r"os\.(environ|getenv)")
    for name, root in {**PACKAGES, "benchmarks": ROOT / "benchmarks"}.items():
        readers = {
            str(path.relative_to(root))
            for path in python_files(root)
            if pattern.search(path.read_text())
        }
        assert readers <= {"env.py"}, f"{name} reads the environment in {sorted(readers)}"


def test_no_test_is_rerun_on_failure() -> None:
    words = "|".join(("flaky", "reruns", "rerun_failures", "retry"))
    marks = re.compile(rf"@pytest\.mark\.({words})|--reru[n]s")
    assert [str(p) for p in python_files(ROOT / "tests") if marks.search(p.read_text())] == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("consistent_kernels", ("torch", "triton", "vllm", "transformers")),
        ("consistent_kernels.resolve", ("vllm", "transformers")),
        ("consistent_kernels.rms_norm", ("vllm", "transformers")),
        ("train_bridge", ("vllm", "verl")),
        ("vllm_consistent", ("torch", "vllm", "triton")),
        ("vllm_consistent.plugin", ("torch", "vllm", "transformers", "train_bridge")),
    ],
)
def test_cold_import_stays_light(module: str, heavy: tuple[str, ...]) -> None:
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        f"import {module}\n"
        "changed = {k for k in os.environ if os.environ[k] != before.get(k)}\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "assert not loaded, f'the import loads {loaded}'\n"
        "ours = {k for k in changed if not k.startswith(('TORCH', 'KMP', 'OMP', 'TRITON'))}\n"
        "assert not ours, f'the import changes the environment: {ours}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


FLOAT_FACTORIES = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}


def tensors_of_the_default_dtype(path: Path) -> list[int]:
    """Return the lines of `path` that create a float tensor without naming its dtype."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if not is_torch or node.func.attr not in FLOAT_FACTORIES:
            continue
        of_integers = node.func.attr == "full" and ast.unparse(node.args[1]) == "-1"
        if not of_integers and all(keyword.arg != "dtype" for keyword in node.keywords):
            lines.append(node.lineno)
    return lines


def test_every_float_tensor_names_its_dtype() -> None:
    # Callers and vLLM change torch's default dtype; no bit may follow it.
    inputs_of_tests = PACKAGES["consistent_kernels"] / "testing"
    found = {
        str(path.relative_to(ROOT)): lines
        for root in PACKAGES.values()
        for path in python_files(root)
        if not path.is_relative_to(inputs_of_tests)
        and (lines := tensors_of_the_default_dtype(path))
    }
    assert found == {}


def test_control_a_tensor_of_the_default_dtype_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("x = torch.zeros(3, device=d)\ny = torch.full((2,), -1)\nz = x.new_zeros(3)\n")
    assert tensors_of_the_default_dtype(path) == [1]


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_paths_named_in_documents_exist() -> None:
    path_pattern = re.compile(r"`((?:[\w.\-]+/)+[\w.\-]+)`")
    roots = ("kernels/", "train_bridge/", "vllm_consistent/", "tests/", "benchmarks/", "docs/")
    missing = [
        f"{document.name}: {name}"
        for document in documents()
        for name in path_pattern.findall(document.read_text())
        if name.startswith((*roots, "configs/", "locks/", ".ci/")) and not (ROOT / name).exists()
    ]
    assert missing == []
