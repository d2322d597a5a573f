"""What runs before the first request: which calls, on a CPU (`tests/parity/test_cuda_lifecycle.py`
shows on CUDA that nothing is compiled after them)."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from consistent_kernels import counters
from vllm_consistent.runner.warm_up import warm_up


class OneContract:
    model: ClassVar = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "sliding_window": None}

    def implementation(self, op: str) -> str:
        return "reference"


@pytest.mark.parametrize(("longest", "calls"), [(4096, 0), (4097, 2)])
def test_warm_up_attends_where_contexts_can_be_split(longest: int, calls: int) -> None:
    before = counters.snapshot().get("attention_paged", {}).get("reference", 0)
    pages = torch.full((3, 2, 16, 2, 64), float("nan"), dtype=torch.bfloat16)
    warm_up(OneContract(), pages, 300, longest, draws=True)
    after = counters.snapshot().get("attention_paged", {}).get("reference", 0)
    assert after - before == calls
    assert bool(pages.isnan().all()), "the engine's pages are left alone"
