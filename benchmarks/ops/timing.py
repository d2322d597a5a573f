"""Interleaved medians: our call and stock's in turn, each on a cold cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.common.stats import in_turns

_FLUSH_BYTES = 256 << 20
"""Written before each timed call; several times the L2 cache of an H200 (50 MB)."""

_SLEEP_CYCLES = 100_000
"""What the GPU waits instead where the cache stays warm, so that the host is ahead of it."""


def interleaved_us(
    ours: Callable[[], Any],
    stock: Callable[[], Any] | None,
    *,
    device: str,
    repeats: int,
    graph: bool,
) -> tuple[float, float | None]:
    """Return the median microseconds of both calls, in the order ours, stock, stock, ours, ...

    On CUDA each call is a replay of a captured graph (so the host's time to launch does not
    count, as in an engine that decodes with graphs), or an eager call where `graph` is False;
    between two events, after a write that empties the L2 cache. On a CPU the wall clock.
    """
    calls = {"A": ours, "B": stock or ours}
    median = medians_us(calls, device=device, repeats=repeats, graph=graph)
    return median["A"], median["B"] if stock else None


def medians_us(
    calls: Mapping[str, Callable[[], Any]],
    *,
    device: str,
    repeats: int,
    graph: bool = True,
    cold: bool = True,
) -> dict[str, float]:
    """Return each call's median microseconds; all take turns, so that drift meets them alike.

    Args:
        calls: by name; timed in their order, then in the reverse order, and so on.
        device: "cuda" or "cpu".
        repeats: timed calls of each.
        graph: on CUDA, replay captured calls.
        cold: on CUDA, empty the L2 cache before each call.
    """
    order = in_turns(calls, repeats)
    on_cuda = device == "cuda"
    times = _cuda_times(calls, order, graph, cold) if on_cuda else _cpu_times(calls, order)
    return {name: statistics.median(values) for name, values in times.items()}


def _cpu_times(
    calls: Mapping[str, Callable[[], Any]], order: Sequence[str]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for name in order:
        begin = time.perf_counter()
        calls[name]()
        times[name].append((time.perf_counter() - begin) * 1e6)
    return times


def _cuda_times(
    calls: Mapping[str, Callable[[], Any]], order: Sequence[str], graph: bool, cold: bool
) -> dict[str, list[float]]:
    launches = {name: _captured(call) if graph else call for name, call in calls.items()}
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for name in (*calls, *order):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cold:
            flush.zero_()
        else:
            torch.cuda._sleep(_SLEEP_CYCLES)
        begin.record()
        launches[name]()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    # The first of each is the warm-up.
    return {
        name: [begin.elapsed_time(end) * 1e3 for begin, end in pairs[1:]]
        for name, pairs in events.items()
    }


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    # Compiled and allocated before the capture, on the stream kind that captures.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
