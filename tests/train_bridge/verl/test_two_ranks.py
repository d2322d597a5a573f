"""verl's engines with our forward on two ranks: shards change no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_model
from word_tokenizer import TOKENIZER_LENGTH, write_tokenizer

from consistent_kernels.protocol import compare_logprobs
from train_bridge import bridge_model, token_logprobs

pytest.importorskip("verl", reason="the verl extra is not installed")

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]

SUPPORT = Path(__file__).resolve().parents[2] / "support"
TEMPERATURE = 0.7
SAMPLES = [
    ([7 + 5 * i + j for j in range(6 + 3 * i)], [400 + 31 * i + 7 * j for j in range(5 + 2 * i)])
    for i in range(4)
]
"""As in `verl_rank.py`; rank r has samples r, r + 2."""


CASES = {
    "fsdp2": ("qwen3", "ConsistentFSDPEngineWithLMHead"),
    "megatron": ("qwen3_moe", "ConsistentMegatronEngineWithLMHead"),
}
"""Model and engine of each strategy."""


@pytest.fixture(scope="module", params=CASES)
def strategy(request: pytest.FixtureRequest) -> str:
    """verl's backend."""
    if request.param == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")
    return request.param


@pytest.fixture(scope="module")
def ranks(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks computed."""
    folder = tmp_path_factory.mktemp("ranks")
    write_tokenizer(save_tiny_model(folder / "model", CASES[strategy][0]))
    search = os.pathsep.join([str(SUPPORT), *(path for path in sys.path if path)])
    running = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "verl_rank.py"), str(rank), str(folder), strategy],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def unsharded_rows(model: torch.nn.Module) -> list[torch.Tensor]:
    """Score the samples one by one in this process, without verl."""
    rows = []
    for prompt, response in SAMPLES:
        scores = token_logprobs(
            model,
            torch.tensor([prompt + response]),
            temperature=TEMPERATURE,
            valid_vocab=TOKENIZER_LENGTH,
        )
        rows.append(scores.log_probs.detach()[0, -len(response) :])
    return rows


def in_order(ranks: list[dict[str, Any]], key: str) -> list[torch.Tensor]:
    return [ranks[i % 2][key][i // 2] for i in range(len(SAMPLES))]


def model_of(ranks: list[dict[str, Any]], strategy: str) -> torch.nn.Module:
    model = tiny_model(CASES[strategy][0])
    model.load_state_dict(ranks[0]["weights"])
    return bridge_model(model)


def test_verl_two_ranks_score_as_one_unsharded_model(
    ranks: list[dict[str, Any]], strategy: str
) -> None:
    family, engine = CASES[strategy]
    assert [rank["engine"] for rank in ranks] == [engine] * 2
    assert all(0.4 < rank["shard"] < 0.6 for rank in ranks)
    before = unsharded_rows(bridge_model(tiny_model(family)))
    assert compare_logprobs(in_order(ranks, "before"), before).bitwise_equal


def test_verl_two_ranks_export_what_they_score_with(
    ranks: list[dict[str, Any]], strategy: str
) -> None:
    assert ranks[0]["total"] == ranks[1]["total"]
    alone = unsharded_rows(model_of(ranks, strategy))
    assert compare_logprobs(in_order(ranks, "after"), alone).bitwise_equal


def test_verl_two_ranks_resume_bit_equal(ranks: list[dict[str, Any]]) -> None:
    after = in_order(ranks, "after")
    assert not compare_logprobs(in_order(ranks, "moved"), after).bitwise_equal, "the control"
    assert compare_logprobs(in_order(ranks, "resumed"), after).bitwise_equal


def test_control_verl_two_ranks_step_changes_log_probs(ranks: list[dict[str, Any]]) -> None:
    assert not compare_logprobs(in_order(ranks, "before"), in_order(ranks, "after")).bitwise_equal
    assert ranks[0]["grad_norm"][0] > 0


def test_verl_two_ranks_training_forward_equals_old_log_probs(ranks: list[dict[str, Any]]) -> None:
    assert {value for rank in ranks for value in rank["ppo_kl"]} == {0.0}
