"""Kernels for x86 CPUs, written in LLVM's intermediate language and compiled where they run.

No library is asked for its order of additions: every sum is written down, so the bits follow
neither the number of rows, nor of threads, nor the width of the vector registers. `llvmlite` comes
with Numba, and so with vLLM.
"""

from consistent_kernels.llvm.machine import identity, is_available, multiplier

SOURCES = ("llvm/kernel.py", "llvm/machine.py")
"""What every kernel is made of, for the hash of a program."""

__all__ = ["SOURCES", "identity", "is_available", "multiplier"]
