"""Which engines of the rollout benchmark are resident together."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout import run
from benchmarks.rollout.models import Checkpoint
from benchmarks.rollout.prompts import RandomPrompts
from benchmarks.rollout.variants import STOCK, VARIANTS
from benchmarks.rollout.works import chosen
from consistent_kernels.errors import ConfigurationError


def sizes(*engines: int, trainer: int = 450) -> list[run.Load]:
    return [run.Load(f"model {index}", engine, trainer) for index, engine in enumerate(engines)]


def seats(groups: Any) -> list[list[tuple[int, list[str]]]]:
    return [[(index, [v.name for v in seating]) for index, seating in group] for group in groups]


def test_waves_hold_what_fits_together() -> None:
    one = [STOCK, "consistent"]
    wanted = [VARIANTS[name] for name in one]
    assert seats(run.waves(sizes(500, 500, 500), wanted, 2000)) == [
        [(0, one), (1, one)],
        [(2, one)],
    ]
    assert seats(run.waves(sizes(500, 500, 500), wanted, 1999)) == [
        [(0, one)],
        [(1, one)],
        [(2, one)],
    ]
    with pytest.raises(ConfigurationError, match="name fewer works"):
        run.waves(sizes(500, 500, 500), wanted, 999)


def test_variants_that_do_not_fit_follow_beside_a_stock_engine_of_their_own() -> None:
    wanted = [VARIANTS[name] for name in (STOCK, "consistent", "triton", "batch_invariant")]
    assert seats(run.waves(sizes(500), wanted, 2000)) == [
        [(0, [STOCK, "consistent", "triton", "batch_invariant"])]
    ]
    assert seats(run.waves(sizes(500), wanted, 1999)) == [
        [(0, [STOCK, "consistent", "triton"])],
        [(0, [STOCK, "batch_invariant"])],
    ]
    # Stock has ended when a trainer comes; a trainer larger than an engine needs room all the same.
    assert seats(run.waves(sizes(500, trainer=1100), wanted, 2000)) == [
        [(0, [STOCK, name])] for name in ("consistent", "triton", "batch_invariant")
    ]
    # Without stock, an engine and its trainer must fit together.
    alone = [VARIANTS["consistent"]]
    assert seats(run.waves(sizes(500), alone, 950)) == [[(0, ["consistent"])]]
    with pytest.raises(ConfigurationError, match="do not fit"):
        run.waves(sizes(500), alone, 949)


def test_qwen3_8b_and_two_variants_fit_on_an_h200() -> None:
    """16.4 GB of weights; 144.5e9 bytes is 0.97 of what a fresh H200 reports as free."""
    model = Checkpoint(
        Path("somewhere"), RandomPrompts(1280), weight_bytes=16_381_500_000, kv_bytes=147_456
    )
    told = types.SimpleNamespace(device="cuda", engine_args={})
    wanted = [VARIANTS[name] for name in (STOCK, "consistent", "triton", "batch_invariant")]
    short = chosen(["qwen3_8b.256", "qwen3_8b.1", "qwen3_8b.ttft2k", "qwen3_8b.ttft16k"])
    found = run.waves([run.load(short, model, told)], wanted, 144_500_000_000)
    assert seats(found) == [
        [(0, [STOCK, "consistent", "triton"])],
        [(0, [STOCK, "batch_invariant"])],
    ]
    found = run.waves([run.load(chosen(["qwen3_8b"]), model, told)], wanted, 144_500_000_000)
    assert [len(group[0][1]) for group in found] == [2, 2, 2]
