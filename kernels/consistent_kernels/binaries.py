"""Which compiled code served in this process: vLLM's libraries, and Triton's kernels by variant."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from consistent_kernels import vendored

_PACKAGE = "consistent_kernels."


def served_binaries() -> dict[str, str]:
    """Return {name: SHA-256} of every binary that this process has loaded or compiled.

    A library is named by itself; a Triton kernel "triton.<kernel>.<variant>", where the variant
    stands for source, signature, constants and options. Two processes that name the same variant
    must hold the same code.
    """
    found = {binary.name: binary.sha256 for binary in vendored.binaries()}
    for kernel in _kernels():
        for compiled in _compiled(kernel):
            code = compiled.asm.get("cubin")
            if code is not None:
                name = f"triton.{kernel.__name__}.{compiled.hash[:16]}"
                found[name] = hashlib.sha256(code).hexdigest()
    return dict(sorted(found.items()))


def _kernels() -> Iterator[Any]:
    triton = sys.modules.get("triton")
    if triton is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            for value in list(vars(module).values()):
                # A kernel that another module imports belongs to the one that defines it.
                if isinstance(value, triton.JITFunction) and value.__module__ == name:
                    yield value


def _compiled(kernel: Any) -> Iterator[Any]:
    for cache, *_ in list(kernel.device_caches.values()):
        yield from list(cache.values())
