"""The kernels of one call and the time of each, by PyTorch's profiler."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20


def kernels_us(call: Callable[[], Any], repeats: int = 10) -> list[tuple[str, float, float]]:
    """Return (name, launches a call, microseconds a call), the longest first, on a cold L2 cache.

    Kernels that are launched before the one before them has ended wait inside, and their time holds
    that.
    """
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as emptying:
        flush.zero_()
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    apart = {event.name for event in emptying.events()}
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in trace.events():
        if event.name not in apart and event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    rows = [(name, len(us) / repeats, sum(us) / repeats) for name, us in times.items()]
    return sorted(rows, key=lambda row: -row[2])
