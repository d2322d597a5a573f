"""Identity of a program: source hashes and the toolchain that turns source into instructions."""

from __future__ import annotations

import hashlib
from importlib import metadata, resources

import torch


def source_sha256(op: str, *files: str) -> str:
    """Return the SHA-256 over the named source files of `consistent_kernels.<op>`, in order."""
    digest = hashlib.sha256()
    for name in files:
        digest.update(name.encode() + b"\0")
        digest.update((resources.files(f"consistent_kernels.{op}") / name).read_bytes())
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
    major, minor = torch.cuda.get_device_capability()
    facts["arch"] = f"sm_{major}{minor}"
    facts["triton"] = metadata.version("triton")
    return facts
