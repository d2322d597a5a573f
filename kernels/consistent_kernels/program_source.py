"""Identity of a program: source hashes and the toolchain that turns source into instructions."""

from __future__ import annotations

import hashlib
from importlib import metadata, resources

import torch


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
    major, minor = torch.cuda.get_device_capability()
    facts["arch"] = f"sm_{major}{minor}"
    facts["triton"] = metadata.version("triton")
    return facts
