"""Interleaved medians: our call and stock's in turn, each on a cold cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.common.stats import abba

_FLUSH_BYTES = 256 << 20
"""Written before each timed call; several times the L2 cache of an H200 (50 MB)."""


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
    timer = _cuda_times if device == "cuda" else _cpu_times
    times = timer(calls, repeats, graph)
    median = {name: statistics.median(values) for name, values in times.items()}
    return median["A"], median["B"] if stock else None


def _cpu_times(
    calls: Mapping[str, Callable[[], Any]], repeats: int, graph: bool
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for name in abba(repeats):
        begin = time.perf_counter()
        calls[name]()
        times[name].append((time.perf_counter() - begin) * 1e6)
    return times


def _cuda_times(
    calls: Mapping[str, Callable[[], Any]], repeats: int, graph: bool
) -> dict[str, list[float]]:
    launches = {name: _captured(call) if graph else call for name, call in calls.items()}
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for name in (*calls, *abba(repeats)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
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
