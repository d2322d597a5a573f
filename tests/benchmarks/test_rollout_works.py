"""The works of the rollout benchmark: keys, prompts, pages, aims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout.models import Checkpoint
from benchmarks.rollout.prompts import RandomPrompts
from benchmarks.rollout.session import engine_arguments
from benchmarks.rollout.works import DECODE, FIRST_TOKEN, WORKS, chosen
from consistent_kernels.errors import UnsupportedError

PROMPTS = RandomPrompts(1280)
MODEL = Checkpoint(Path("somewhere"), PROMPTS, weight_bytes=1000, kv_bytes=64)


def test_works_cover_the_table_and_keys_are_unique() -> None:
    assert len({work.key for work in WORKS}) == len({work.name for work in WORKS}) == len(WORKS)
    models = {"qwen3_8b", "qwen3_0_6b", "qwen3_30b_a3b", "qwen3_30b_a3b_fp8", "smollm2"}
    assert {work.model for work in WORKS} == models


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.key)
def test_prompts_repeat_by_round_and_fit(work: Any) -> None:
    first = work.prompts(0, PROMPTS)
    assert first == work.prompts(0, PROMPTS)
    assert (first == work.prompts(1, PROMPTS)) == work.cached
    assert work.parity_prompts(0, PROMPTS) != work.parity_prompts(1, PROMPTS)
    lengths = [len(ids) for ids in (*first, *work.parity_prompts(0, PROMPTS))]
    assert work.prompt[0] <= min(lengths)
    assert max(lengths) <= work.prompt[1]
    assert max(lengths) + work.new_tokens < work.longest() + 1


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.key)
def test_pages_hold_all_requests_of_a_round(work: Any) -> None:
    arguments = engine_arguments([work], MODEL, "cuda")
    held = arguments["kv_cache_memory_bytes"] // MODEL.kv_bytes
    at_once = sum(-(-(len(ids) + work.new_tokens) // 16) * 16 for ids in work.prompts(3, PROMPTS))
    assert held >= at_once
    assert held >= arguments["max_model_len"]


def test_chosen_takes_works_and_models() -> None:
    assert [work.key for work in chosen(["smollm2.256"])] == ["smollm2.256"]
    assert len(chosen(["qwen3_8b"])) == 5
    assert chosen([]) == list(WORKS)
    with pytest.raises(UnsupportedError, match=r"qwen3_8b\.256"):
        chosen(["nonsense"])


def test_decode_works_are_those_with_cached_prompts() -> None:
    assert {work.key for work in WORKS if work.cached} == {
        work.key for work in WORKS if work.measure == DECODE
    }


def test_dense_works_have_an_aim() -> None:
    dense = [work for work in WORKS if "30b" not in work.key]
    assert all(work.aim for work in dense)
    assert all((work.aim > 1) == (work.measure == FIRST_TOKEN) for work in dense)
