"""Schedules of the hyper-connection maps: the whole op, then its two kernels alone.

Without stock, whose kernels TileLang compiles for each batch, 8 s each: `benchmarks.ops` has them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.ops.case import Setting
from benchmarks.ops.cases import hyper_connections as cases
from benchmarks.schedules.group import Group
from consistent_kernels.hyper_connections import hc_head, hc_post, hc_pre
from consistent_kernels.hyper_connections.spec import (
    K_PART,
    MapSchedule,
    MixSchedule,
    PostSchedule,
    map_schedule,
    mix_schedule,
    post_schedule,
)

Pair = tuple[MixSchedule, MapSchedule]
Maps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_COMPILERS = 14
_ORDER = (256, 4096, 64, 1)
"""Tokens, what is least known first."""

_LATE = MixSchedule(1, early=False)
_PAIR = MixSchedule(1, row_tile=128, warps=8)
_MAPS = MapSchedule(registers=128)
_BIG = MixSchedule(32, row_tile=128, warps=8, early=False)
PAIRS = {
    1: [(_LATE, _MAPS), (MixSchedule(1), MapSchedule(registers=168))],
    64: [(MixSchedule(1), _MAPS), (_LATE, _MAPS), (_LATE, MapSchedule(1024, registers=128))],
    256: [
        *((_PAIR, maps) for maps in (_MAPS, MapSchedule(1024), MapSchedule(1024, registers=168))),
        *((_PAIR, MapSchedule(2048, warps, registers=168)) for warps in (1, 2)),
        (_LATE, MapSchedule(1024, registers=128)),
        (_LATE, MapSchedule(2048, registers=168)),
        *((MixSchedule(4, early=False), MapSchedule(comb_tokens=count)) for count in (2, 4)),
        (MixSchedule(4, early=False), MapSchedule(1024)),
        (MixSchedule(4, row_tile=128, warps=8, early=False), MapSchedule()),
    ],
    4096: [
        *((_BIG, MapSchedule(size, 1, 8)) for size in (256, 1024)),
        *((_BIG, MapSchedule(comb_tokens=count)) for count in (4, 16)),
        (dataclasses.replace(_BIG, stages=4), MapSchedule(comb_tokens=8)),
        (dataclasses.replace(_BIG, stages=2), MapSchedule(comb_tokens=8)),
    ],
}
"""Tokens to what is worth a try beside the committed pair."""

POSTS = [PostSchedule(1024, 4), PostSchedule(256, 1)]


def name(schedule: Any) -> str:
    """Return e.g. "parts=1 row_tile=64 warps=4 stages=3 early=True"."""
    return " ".join(f"{key}={value}" for key, value in dataclasses.asdict(schedule).items())


def pair_name(pair: Pair) -> str:
    """Return both names."""
    return f"mix {name(pair[0])}; map {name(pair[1])}"


def pairs(tokens: int, mixes: int) -> list[Pair]:
    """Return the committed schedules of a batch, then the others."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    committed = mix_schedule(tokens, mixes, hopper), map_schedule(tokens, mixes)
    return list(dict.fromkeys([committed, *PAIRS[tokens]]))


def groups(setting: Setting) -> Iterator[Group]:
    """hc_pre, hc_head and hc_post as a whole, then the mix kernel and the map kernel alone."""
    hidden = 96 if setting.small else 4096
    tokens = (5,) if setting.small else _ORDER
    x = setting.hazards(max(tokens), 4, hidden, seed=1)
    weights = {
        "hc_pre": cases._parameters(setting, hidden, 24, 3),
        "hc_head": cases._parameters(setting, hidden, 4, 1),
    }
    if setting.device == "cuda":
        _compile(x[:1], weights)
    for m in tokens:
        for op, values in weights.items():
            yield _whole(op, x[:m], values)
    yield _post(setting, x, weights["hc_pre"])
    if setting.device == "cuda":
        for m in tokens:
            for op, values in weights.items():
                yield from _mixes(op, x[:m], values)
                yield _maps(op, x[:m], values)


def _shape(x: torch.Tensor) -> str:
    return f"M={x.shape[0]} S={x.shape[1]} H={x.shape[2]}"


def _whole(op: str, x: torch.Tensor, weights: Maps) -> Group:
    if x.is_cuda:
        variants = {
            pair_name(pair): _call(op, x, weights, pair)
            for pair in pairs(x.shape[0], len(weights[2]))
        }
    elif op == "hc_pre":
        run = functools.partial(hc_pre, x, *weights, norm_eps=1e-6, eps=1e-6, iterations=20)
        variants = {"reference": functools.partial(run, impl="reference")}
    else:
        run = functools.partial(hc_head, x, *weights, norm_eps=1e-6, eps=1e-6)
        variants = {"reference": functools.partial(run, impl="reference")}
    return Group(
        op=op,
        shape=_shape(x),
        variants=variants,
        chosen=next(iter(variants)),
        stock={},
    )


def _call(op: str, x: torch.Tensor, weights: Maps, pair: Pair) -> Callable[[], Any]:
    from consistent_kernels.hyper_connections.triton import hc_map_fwd

    pre = op == "hc_pre"
    numbers = (1e-6, 1e-6, 20, 2.0) if pre else (1e-6, 1e-6, 1, 1.0)
    return functools.partial(
        hc_map_fwd, x, *weights, *numbers, has_comb=pre, mix=pair[0], maps=pair[1]
    )


def _post(setting: Setting, x: torch.Tensor, weights: Maps) -> Group:
    y = setting.hazards(len(x), x.shape[2], seed=2)
    impl = "triton" if x.is_cuda else "reference"
    _, post, comb = hc_pre(x, *weights, norm_eps=1e-6, eps=1e-6, iterations=20, impl=impl)
    if x.is_cuda:
        from consistent_kernels.hyper_connections.triton_post import hc_post_fwd

        tried = dict.fromkeys([post_schedule(len(x)), *POSTS])
        variants = {
            name(schedule): functools.partial(hc_post_fwd, y, x, post, comb, schedule)
            for schedule in tried
        }
    else:
        variants = {"reference": functools.partial(hc_post, y, x, post, comb, impl=impl)}
    return Group(
        op="hc_post",
        shape=_shape(x),
        variants=variants,
        chosen=next(iter(variants)),
        stock={},
    )


def _mixes(op: str, x: torch.Tensor, weights: Maps) -> Iterator[Group]:
    """One group for each number of parts: what they leave to the map kernel differs."""
    from consistent_kernels.hyper_connections.triton_mix import hc_mix_fwd

    tried = (mix for mix, _ in pairs(x.shape[0], len(weights[2])))
    # Nothing is launched behind it, so that it makes no difference when that might start.
    mixes = list(dict.fromkeys(dataclasses.replace(mix, early=True) for mix in tried))
    written = weights[0].shape[0] + 1

    def run(mix: MixSchedule) -> torch.Tensor:
        return hc_mix_fwd(x.flatten(1), weights[0], mix, True)[:, :, :written]

    for parts in dict.fromkeys(mix.parts for mix in mixes):
        same = [mix for mix in mixes if mix.parts == parts]
        yield Group(
            op=f"{op} mix kernel",
            shape=f"{_shape(x)} parts={parts}",
            variants={name(mix): functools.partial(run, mix) for mix in same},
            chosen=name(same[0]),
            stock={},
        )


def _maps(op: str, x: torch.Tensor, weights: Maps) -> Group:
    """The map kernel on what a mix kernel left before, so that nothing overlaps."""
    from consistent_kernels.hyper_connections.triton_mix import hc_mix_fwd

    tried = pairs(x.shape[0], len(weights[2]))
    variants = {}
    for mix, maps in dict.fromkeys((MixSchedule(mix.parts), maps) for mix, maps in tried):
        part = hc_mix_fwd(x.flatten(1), weights[0], mix, True)
        variants[f"parts={mix.parts} {name(maps)}"] = functools.partial(
            _map_alone, op, x, part, weights, (mix, maps)
        )
    chosen = f"parts={tried[0][0].parts} {name(tried[0][1])}"
    return Group(op=f"{op} map kernel", shape=_shape(x), variants=variants, chosen=chosen, stock={})


def _map_alone(
    op: str, x: torch.Tensor, part: torch.Tensor, weights: Maps, pair: Pair
) -> tuple[torch.Tensor, ...]:
    from consistent_kernels.hyper_connections.triton import launch_maps

    tokens, streams, hidden = x.shape
    sizes = ((tokens, streams), (tokens, streams, streams)) if op == "hc_pre" else ((0,), (0,))
    outputs = (
        x.new_empty((tokens, hidden)),
        *(torch.empty(size, dtype=torch.float32, device=x.device) for size in sizes),
    )
    iterations, multiplier = (20, 2.0) if op == "hc_pre" else (1, 1.0)
    launch_maps(
        x.flatten(1), part, weights[1], weights[2], outputs, 1e-6, 1e-6, iterations, multiplier,
        *pair, overlap=pair[1].overlap,
    )  # fmt: skip
    return outputs


def _compile(x: torch.Tensor, weights: dict[str, Maps]) -> None:
    """Run each kernel once, in threads; the number of tokens specializes nothing."""
    from consistent_kernels.hyper_connections.triton_mix import hc_mix_fwd
    from consistent_kernels.hyper_connections.triton_post import hc_post_fwd

    every = list(dict.fromkeys(pair for m in PAIRS for n in (24, 4) for pair in pairs(m, n)))
    mixes = dict.fromkeys((mix, maps.overlap) for mix, maps in every)
    maps = dict.fromkeys((MixSchedule(mix.parts), schedule) for mix, schedule in every)
    jobs: list[Callable[[], Any]] = []
    for op, values in weights.items():
        count, inner = values[0].shape
        for pair in maps:
            entries = -(-inner // (K_PART * pair[0].parts))
            part = x.new_zeros((entries, 1, 16 if count < 16 else 32), dtype=torch.float32)
            jobs.append(functools.partial(_map_alone, op, x, part, values, pair))
    for values in weights.values():
        for mix, overlap in mixes:
            jobs.append(functools.partial(hc_mix_fwd, x.flatten(1), values[0], mix, overlap))
    y, gates = x[:, 0], x.new_zeros((1, 4 + 16), dtype=torch.float32)
    post, comb = gates[:, :4].contiguous(), gates[:, 4:].reshape(1, 4, 4)
    for schedule in dict.fromkeys([post_schedule(4096), *POSTS]):
        jobs.append(functools.partial(hc_post_fwd, y, x, post, comb, schedule))
    jobs.pop(0)()  # alone: the first one sets Triton up
    with ThreadPoolExecutor(_COMPILERS) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.exception()  # what does not compile says so where it is measured
