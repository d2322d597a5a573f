"""Identity of a program: source hashes and the toolchain that turns source into instructions."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata, resources

import torch

from consistent_kernels.errors import UnsupportedError


def source_sha256(op: str, *files: str, shared: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 over an op's source files, in order.

    Args:
        op: folder in `consistent_kernels`.
        files: files in that folder.
        shared: files of `consistent_kernels` itself that the op's kernels are made of.
    """
    digest = hashlib.sha256()
    sources = [(f"consistent_kernels.{op}", name) for name in files]
    sources += [("consistent_kernels", name) for name in shared]
    for package, name in sources:
        digest.update(name.encode() + b"\0")
        digest.update((resources.files(package) / name).read_bytes())
    return digest.hexdigest()


def toolchain(device_type: str) -> dict[str, str]:
    """Return what, besides our sources, decides the bits on this kind of device.

    CPU: torch (with its MKL and oneDNN) and the vector instruction set that ATen selected.
    CUDA: torch, Triton and the compute capability.
    """
    facts = {"device": device_type, "torch": torch.__version__}
    if device_type == "cpu":
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        return facts
    facts["arch"] = cuda_architecture()
    facts["triton"] = metadata.version("triton")
    return facts


@functools.cache
def cuda_architecture() -> str:
    """Return e.g. "sm_90" without a CUDA context, also where the GPU is another process's.

    A front end in a Ray actor sees no device, and one that creates a context cannot fork. PyTorch
    answers where it has a context already; else the driver's management library (NVML) does.

    Raises:
        UnsupportedError: no CUDA device on this machine, or devices of several architectures.
    """
    if torch.cuda.is_initialized():
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    import pynvml

    found = set()
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.add(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise UnsupportedError("contract", f"no CUDA driver ({error})", ["a CUDA device"]) from None
    if len(found) != 1:
        raise UnsupportedError(
            "contract", f"devices of capabilities {sorted(found)}", ["one architecture a machine"]
        )
    major, minor = found.pop()
    return f"sm_{major}{minor}"
