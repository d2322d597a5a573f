"""Exact-answer reward, as verl wants it: named by `reward.custom_reward_function.path`."""

from __future__ import annotations

from typing import Any

from vllm_consistent.cli.demo.reward import grade


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Return 1.0 if the last number of the response is the sum, else 0.0."""
    return float(grade(solution_str, ground_truth))
