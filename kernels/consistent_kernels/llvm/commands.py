"""Runs kernels on PyTorch's OpenMP threads, one after the other, without returning to Python."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from consistent_kernels.llvm.kernel import I32, I64, POINTER, Kernel, Variable
from consistent_kernels.llvm.machine import gomp_parallel

_WORDS = 3  # kernel, command, threads inside it
_SPINS = 256


def _function(kernel: Kernel, address: Any, result: ir.Type, *arguments: ir.Type) -> Any:
    function = ir.FunctionType(result, arguments)
    return kernel.b.inttoptr(address, function.as_pointer())


class _Walk(Kernel):
    """What each thread of a team does: run every entry, and leave it when all of it is done.

    A thread that comes late finds the units of an entry taken and goes on; nobody waits for it. So
    a list needs its threads together only once, at its end, also where other programs hold cores.
    """

    def __init__(self) -> None:
        super().__init__("walk_commands")
        b = self.b
        entries, count, give_way = self.words(1, 3)
        with self.loop(0, count) as index:
            entry = self.scaled(entries, index, 8 * _WORDS)
            address, command = (self.load(self.at(entry, 8 * i), I64, 8) for i in range(2))
            inside = b.inttoptr(self.at(entry, 16), POINTER)
            b.atomic_rmw("add", inside, self.i64(1), "acq_rel")
            b.call(_function(self, address, ir.VoidType(), POINTER), [b.inttoptr(command, POINTER)])
            # The kernel returned, so every unit is taken; wait for those that still work.
            b.atomic_rmw("sub", inside, self.i64(1), "acq_rel")
            self._wait(inside, give_way)

    def _wait(self, inside: Any, give_way: Any) -> None:
        b = self.b
        spins = Variable(self, I64)
        spins.set(self.i64(0))
        look, again, yields, after = (self.function.append_basic_block() for _ in range(4))
        b.branch(look)
        b.position_at_end(look)
        now = b.load_atomic(inside, "acquire", 8, typ=I64)
        b.cbranch(b.icmp_signed("==", now, self.i64(0)), after, again)
        b.position_at_end(again)
        self.intrinsic("llvm.x86.sse2.pause", ir.VoidType())
        spins.set(b.add(spins.get(), self.i64(1)))
        enough = b.icmp_signed("==", b.srem(spins.get(), self.i64(_SPINS)), self.i64(0))
        b.cbranch(enough, yields, look)
        b.position_at_end(yields)
        b.call(_function(self, give_way, I32), [])
        b.branch(look)
        b.position_at_end(after)


class _Run(Kernel):
    """Set the counters of a list to 0, then walk it, alone or with a team."""

    def __init__(self) -> None:
        super().__init__("run_commands")
        b = self.b
        entries, count, _, walk, threads, team = self.words(1, 6)
        with self.loop(0, count) as index:
            entry = self.scaled(entries, index, 8 * _WORDS)
            self.store(self.i64(0), self.load(self.at(entry, 8), I64, 8), 8)
            self.store(self.i64(0), self.at(entry, 16), 8)
        argument = b.inttoptr(self.command, POINTER)
        with b.if_else(b.icmp_signed("<", threads, self.i64(2))) as (alone, together):
            with alone:
                b.call(_function(self, walk, ir.VoidType(), POINTER), [argument])
            with together:
                fork = _function(self, team, ir.VoidType(), POINTER, POINTER, I32, I32)
                size, function = b.trunc(threads, I32), b.inttoptr(walk, POINTER)
                b.call(fork, [function, argument, size, ir.Constant(I32, 0)])


@functools.cache
def _runner() -> tuple[Any, int, int]:
    """Return (the compiled `_Run`, addresses of `_Walk` and of the system's yield)."""
    walk = _Walk().compile()
    give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_Run().compile()), walk, give_way


class Commands:
    """A list of kernel calls that runs as a whole.

    A command is the words that its kernel reads; addresses in it must stay valid, so whoever builds
    a list keeps the tensors.
    """

    def __init__(self, calls: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Take (kernel address, words behind the counter, units of work) of each call."""
        threads = torch.get_num_threads()
        self._words = [
            (ctypes.c_int64 * (2 + len(words)))(threads, 0, *words) for _, words, _ in calls
        ]
        flat = []
        for (address, _, _), words in zip(calls, self._words, strict=True):
            flat += [address, ctypes.addressof(words) + 8, 0]
        self._entries = (ctypes.c_int64 * max(1, len(flat)))(*flat)
        self._largest = max((units for _, _, units in calls), default=0)
        team = gomp_parallel() or 0
        self._has_team = bool(team)
        if not team:
            self._largest = 1
        self._run, walk, give_way = _runner()
        at = ctypes.addressof(self._entries)
        self._list = (ctypes.c_int64 * 7)(0, at, len(calls), give_way, walk, 1, team)
        self._at = ctypes.addressof(self._list)

    def set_words(self, words: Sequence[int], units: int) -> None:
        """Replace what the first call reads."""
        self._words[0][0] = torch.get_num_threads()
        self._words[0][2:] = words
        self._largest = units if self._has_team else 1

    def run(self) -> None:
        """Run all calls in order on PyTorch's threads, as many as the largest call has units."""
        self._list[5] = min(torch.get_num_threads(), self._largest)
        self._run(self._at)


class _Kept(threading.local):
    """A list of one call by kernel and number of words, for each thread: building one takes longer
    than a small kernel."""

    def __init__(self) -> None:
        self.lists: dict[tuple[int, int], Commands] = {}


_KEPT = _Kept()


def run_one(address: int, words: Sequence[int], units: int) -> None:
    """Run one kernel."""
    key = (address, len(words))
    kept = _KEPT.lists.get(key)
    if kept is None:
        kept = _KEPT.lists[key] = Commands([(address, words, units)])
    kept.set_words(words, units)
    kept.run()
