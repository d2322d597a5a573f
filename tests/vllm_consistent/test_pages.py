"""Pages of older weights are refused, whatever the prefix cache says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from consistent_kernels.errors import StaleWeightsError
from vllm_consistent.weights.pages import PageVersions


def new(name: str, blocks: list[int], cached: int = 0) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=cached)


def step(
    fresh: tuple = (), running: dict[str, list[int] | None] | None = None, resumed: tuple = ()
) -> SimpleNamespace:
    running = running or {}
    cached = SimpleNamespace(
        req_ids=list(running),
        resumed_req_ids=set(resumed),
        new_block_ids=[None if b is None else (b,) for b in running.values()],
        num_computed_tokens=[0] * len(running),
    )
    return SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=list(fresh), scheduled_cached_reqs=cached
    )


def test_a_hit_on_pages_of_the_same_version_passes() -> None:
    pages = PageVersions()
    pages.check(step([new("a", [1, 2, 3])]), 0, [16])
    pages.check(step([new("b", [1, 2, 4], cached=32)]), 0, [16])


def test_rejects_a_hit_on_pages_of_older_weights() -> None:
    pages = PageVersions()
    pages.check(step([new("a", [1, 2, 3])]), 0, [16])
    with pytest.raises(StaleWeightsError, match="2 cached KV page"):
        pages.check(step([new("b", [1, 2, 4], cached=32)]), 1, [16])


def test_a_page_written_again_passes() -> None:
    pages = PageVersions()
    pages.check(step([new("a", [1, 2])]), 0, [16])
    pages.check(step([new("b", [1, 2])]), 1, [16])
    pages.check(step([new("c", [1, 2, 5], cached=32)]), 1, [16])


def test_rejects_a_request_that_spans_an_update() -> None:
    pages = PageVersions()
    pages.check(step([new("a", [1])]), 0, [16])
    pages.check(step(running={"a": [2]}), 0, [16])
    with pytest.raises(StaleWeightsError, match="started on weight version 0"):
        pages.check(step(running={"a": None}), 1, [16])


def test_rejects_a_request_that_waited_through_an_update() -> None:
    pages = PageVersions()
    pages.check(step([new("a", [1]), new("b", [2])]), 0, [16])
    done = step([new("c", [3])])
    done.finished_req_ids = {"b"}
    pages.check(done, 1, [16])  # neither runs in the first step on the new weights
    pages.check(step(running={"c": [4]}), 1, [16])
    for _ in range(2):  # and not only once
        with pytest.raises(StaleWeightsError, match="request a started on weight version 0"):
            pages.check(step(running={"c": None, "a": None}), 1, [16])
    pages.check(step([new("b", [5])]), 1, [16])
    pages.check(step(running={"b": None, "c": None}), 1, [16])


def test_a_request_recomputed_after_an_update_passes() -> None:
    pages = PageVersions()
    pages.check(step([new("a", [1])]), 0, [16])
    pages.check(step(running={"a": [3]}, resumed=("a",)), 1, [16])
    pages.check(step(running={"a": None}), 1, [16])


def test_a_window_has_pages_of_its_own_size() -> None:
    pages = PageVersions()
    first = SimpleNamespace(req_id="a", block_ids=([1], [2, 3, 4, 5]), num_computed_tokens=0)
    pages.check(step([first]), 0, [64, 16])
    # 32 cached tokens are no whole page of 64, but two of 16; page 0 is vLLM's null page.
    again = SimpleNamespace(req_id="b", block_ids=([6], [0, 3, 7]), num_computed_tokens=32)
    with pytest.raises(StaleWeightsError, match="1 cached KV page"):
        pages.check(step([again]), 1, [64, 16])
