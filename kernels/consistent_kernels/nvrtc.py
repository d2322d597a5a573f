"""CUDA C++ sources of ours, compiled where they run by the NVRTC that PyTorch depends on.

For what Triton does not offer: shared-memory atomics, clusters of thread blocks. PyTorch requires
`cuda-bindings` and NVRTC of its CUDA version, so nothing is installed for this.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch

from consistent_kernels.errors import MissingBinaryError


def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise MissingBinaryError(
            "cuda-bindings",
            f"it does not load ({error})",
            "cuda.bindings",
            "It comes with PyTorch for CUDA 13; or take another implementation",
        ) from error
    return driver, nvrtc


def _checked(what: str, results: tuple[Any, ...]) -> Any:
    """Return what a call of the bindings gives besides its error code, which must be 0."""
    code, *values = results
    if int(code) != 0:
        raise RuntimeError(f"{what}: {code.name}")
    return values[0] if values else None


def compile_cuda(package: str, file: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """Return the cubin of a source file for an architecture; needs no GPU.

    Args:
        package: e.g. "consistent_kernels.sparse_topk".
        file: a `.cu` file in it, without includes.
        arch: e.g. "sm_90".
        defines: macros.

    Raises:
        MissingBinaryError: no NVRTC here.
        RuntimeError: the source does not compile; holds the compiler's log.
    """
    _, nvrtc = _bindings()
    source = (resources.files(package) / file).read_bytes()
    program = _checked(file, nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []))
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    done = nvrtc.nvrtcCompileProgram(program, len(options), [text.encode() for text in options])
    if int(done[0]) != 0:
        log = bytearray(_checked(file, nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(file, nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{file} for {arch}: {log.decode(errors='replace')}")
    cubin = bytearray(_checked(file, nvrtc.nvrtcGetCUBINSize(program)))
    _checked(file, nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(file, nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin)


@functools.cache
def _loaded(
    package: str, file: str, kernel: str, defines: tuple[tuple[str, int], ...], device: int
) -> Any:
    driver, _ = _bindings()
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cuda(package, file, f"sm_{major}{minor}", dict(defines))
    module = _checked(file, driver.cuModuleLoadData(cubin))
    return _checked(kernel, driver.cuModuleGetFunction(module, kernel.encode()))


def launch_cuda(
    package: str,
    file: str,
    kernel: str,
    *,
    defines: Mapping[str, int],
    grid: tuple[int, int, int],
    threads: int,
    args: Sequence[tuple[int, Any]],
    device: torch.device,
) -> None:
    """Launch an `extern "C"` kernel on the device's current stream; compiled at its first call.

    Args:
        package, file, defines: as in `compile_cuda`.
        kernel: its name.
        grid: blocks.
        threads: of a block.
        args: (value, ctypes type) in order; pointers as `data_ptr()` with `ctypes.c_void_p`.
        device: a CUDA device.
    """
    driver, _ = _bindings()
    with torch.cuda.device(device):
        function = _loaded(
            package, file, kernel, tuple(defines.items()), torch.cuda.current_device()
        )
        stream = torch.cuda.current_stream().cuda_stream
        values, kinds = zip(*args, strict=True)
        done = driver.cuLaunchKernel(function, *grid, threads, 1, 1, 0, stream, (values, kinds), 0)
    _checked(kernel, done)
