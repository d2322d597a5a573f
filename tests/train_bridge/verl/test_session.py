"""verl's engines with our forward against a live vLLM engine; see `verl_session.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="the verl extra is not installed")

pytestmark = [pytest.mark.verl, pytest.mark.engine, pytest.mark.timeout(600)]

SUPPORT = Path(__file__).resolve().parents[2] / "support"


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
def session(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one session found: two training steps and three comparisons."""
    folder = tmp_path_factory.mktemp("verl")
    search = os.pathsep.join([str(SUPPORT), *(path for path in sys.path if path)])
    done = subprocess.run(
        [
            sys.executable,
            str(SUPPORT / "verl_session.py"),
            CASES[strategy][0],
            str(folder),
            strategy,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_verl_engine_is_ours(session: dict[str, Any], strategy: str) -> None:
    assert session["engine"] == CASES[strategy][1]


def test_verl_log_probs_train_equals_infer_before_and_after_updates(
    session: dict[str, Any],
) -> None:
    steps = session["steps"]
    assert [step["mismatched"] for step in steps] == [0, 0, 0], [step["first"] for step in steps]
    assert all(step["tokens"] > 100 for step in steps)
    assert all(step["mean"] > -3 for step in steps), "flat log-probs hide mismatches"


def test_verl_updates_change_what_the_engine_serves(session: dict[str, Any]) -> None:
    steps = session["steps"]
    assert len({step["total"] for step in steps}) == 3
    first = steps[0]["version"]
    assert [step["version"] - first for step in steps] == [0, 1, 2]


def test_verl_training_forward_equals_old_log_probs(session: dict[str, Any]) -> None:
    for step in session["steps"][:2]:
        assert set(step["metrics"]["actor/ppo_kl"]) == {0.0}
        assert set(step["metrics"]["actor/pg_clipfrac"]) == {0.0}
        assert step["metrics"]["grad_norm"][0] > 0


def test_verl_resume_starts_bit_equal(session: dict[str, Any]) -> None:
    resumed = session["resumed"]
    assert resumed["moved"]["mismatched"] > 0, "the control: a step in between changes bits"
    assert resumed["restored"]["mismatched"] == 0
    assert resumed["first_step"]["mismatched"] == 0
    assert resumed["first_step"]["tokens"] > 100


def test_verl_rollout_on_dummy_weights_is_refused(session: dict[str, Any]) -> None:
    assert session["dummy"].startswith("StaleWeightsError")
    assert "dummy weights" in session["dummy"]


def test_verl_worker_without_the_plugin_is_refused(session: dict[str, Any]) -> None:
    assert session["no_plugin"].startswith("ConfigurationError")
    assert "env_vars.VLLM_CONSISTENT=1" in session["no_plugin"]


def test_verl_vocabulary_beyond_the_tokenizer_is_masked(session: dict[str, Any]) -> None:
    assert max(step["largest_id"] for step in session["steps"]) < 1200


def test_control_verl_stock_engine_differs(session: dict[str, Any], strategy: str) -> None:
    if strategy == "megatron":
        pytest.skip("verl's own Megatron engine needs Transformer Engine")
    assert session["stock"]["mismatched"] > session["stock"]["tokens"] // 10


def test_control_verl_unmasked_vocabulary_differs(session: dict[str, Any]) -> None:
    assert session["unmasked"]["mismatched"] > session["unmasked"]["tokens"] // 2


def test_verl_stream_without_a_receipt_is_refused(session: dict[str, Any]) -> None:
    assert session["no_receipt"].startswith("StaleWeightsError")
    assert "fsdp_config._target_" in session["no_receipt"]
    assert session["after_refusal"].startswith("StaleWeightsError")


def test_verl_stream_with_an_unknown_weight_is_refused_without_a_hang(
    session: dict[str, Any],
) -> None:
    assert "no_such" in session["unknown"]
    assert session["unknown"] != "accepted"


def test_verl_stream_with_one_changed_bit_is_refused(session: dict[str, Any]) -> None:
    assert session["one_bit"].startswith("StaleWeightsError")
    assert "model.norm.weight" in session["one_bit"]
    assert session["sent_again"] == "accepted", "the same stream, unchanged"
