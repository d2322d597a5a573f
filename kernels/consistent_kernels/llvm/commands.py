"""Runs kernels on PyTorch's OpenMP threads, one after the other, without returning to Python."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from consistent_kernels.llvm.kernel import I32, I64, POINTER, Kernel
from consistent_kernels.llvm.machine import gomp_parallel

_WORDS = 3  # kernel, command, units


def _function(kernel: Kernel, address: Any, *arguments: ir.Type) -> Any:
    function = ir.FunctionType(ir.VoidType(), arguments)
    return kernel.b.inttoptr(address, function.as_pointer())


@functools.cache
def _runner() -> Any:
    """Compile the loop over a list of (kernel, command, units of work)."""
    kernel = Kernel("run_commands")
    b = kernel.b
    entries, count, threads, team = kernel.words(0, 4)
    with kernel.loop(0, count) as index:
        entry = kernel.scaled(entries, index, 8 * _WORDS)
        address, command, units = (
            kernel.load(kernel.at(entry, 8 * word), I64, 8) for word in range(_WORDS)
        )
        kernel.store(kernel.i64(0), command, 8)
        argument = b.inttoptr(command, POINTER)
        fewer = b.select(b.icmp_signed("<", units, threads), units, threads)
        with b.if_else(b.icmp_signed("<", fewer, kernel.i64(2))) as (alone, together):
            with alone:
                b.call(_function(kernel, address, POINTER), [argument])
            with together:
                fork = _function(kernel, team, POINTER, POINTER, I32, I32)
                size = b.trunc(fewer, I32)
                function = b.inttoptr(address, POINTER)
                b.call(fork, [function, argument, size, ir.Constant(I32, 0)])
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.compile())


class Commands:
    """A list of kernel calls that runs as a whole.

    A command is the words that its kernel reads; addresses in it must stay valid, so whoever builds
    a list keeps the tensors.
    """

    def __init__(self, calls: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Take (kernel address, words behind the counter, units of work) of each call."""
        self._words = [(ctypes.c_int64 * (1 + len(words)))(0, *words) for _, words, _ in calls]
        flat = []
        for (address, _, units), words in zip(calls, self._words, strict=True):
            flat += [address, ctypes.addressof(words), units]
        self._entries = (ctypes.c_int64 * max(1, len(flat)))(*flat)
        team = gomp_parallel() or 0
        self._has_team = bool(team)
        self._list = (ctypes.c_int64 * 4)(ctypes.addressof(self._entries), len(calls), 1, team)
        self._at = ctypes.addressof(self._list)

    def run(self) -> None:
        """Run all calls in order, each on as many of PyTorch's threads as it has units."""
        self._list[2] = torch.get_num_threads() if self._has_team else 1
        _runner()(self._at)


def run_one(address: int, words: Sequence[int], units: int) -> None:
    """Run one kernel."""
    Commands([(address, words, units)]).run()
