"""The entry point: what it refuses, and the trainer's reaction to a mismatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import run_python
from verl_step import KEYS, flipped, step

from consistent_kernels.errors import ContractMismatchError, LogprobMismatchError
from train_bridge.verl.comparison import MismatchPolicy

pytest.importorskip("verl", reason="the verl extra is not installed")

pytestmark = pytest.mark.verl


def test_main_refuses_before_ray_starts(tmp_path: Path) -> None:
    done = run_python(
        "-m",
        "train_bridge.verl.main_ppo",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.model.path=/no/model",
        "data.train_files=/no/train.parquet",
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "5 reason(s)" in done.stderr
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=2" in done.stderr
    assert "actor_rollout_ref.rollout.top_p=0.9" in done.stderr
    assert "actor_rollout_ref.model.path='/no/model': there is no such folder" in done.stderr
    assert "data.train_files='/no/train.parquet': there is no such file" in done.stderr
    assert "data.val_files='~/data/rlhf/gsm8k/test.parquet'" in done.stderr, "verl's default"
    assert "ray init" not in done.stdout


def test_trainers_are_verls_by_name() -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from train_bridge.verl.trainer import MEASURE, MODE, MeasuringTrainer, TrueOnPolicyTrainer

    assert get_trainer_cls(MODE) is TrueOnPolicyTrainer
    assert get_trainer_cls(MEASURE) is MeasuringTrainer
    assert issubclass(TrueOnPolicyTrainer, PPOTrainerSync)


class Batch:
    """What the trainer reads of verl's KVBatchMeta."""

    keys = KEYS
    partition_id = "train"
    tags = ({}, {}, {"is_padding": False})


def account(contract: str = "c", total: str = "t") -> dict[str, Any]:
    body = {"name": contract, "model": {}, "toolchain": {}, "specs": {}, "programs": {}}
    return {
        "receipt": {"version": 4, "total": total * 64},
        "report": {"contract": body, "digest": contract * 64},
    }


class Workers:
    """The worker group's one call."""

    def __init__(self, *accounts: dict[str, Any]) -> None:
        self.accounts = list(accounts)

    def consistency_account(self) -> list[dict[str, Any]]:
        return self.accounts


@pytest.fixture
def trainer(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer whose batch is `step()`, without Ray."""
    # Late: verl's trainer imports vLLM, which no other test should find imported.
    import transfer_queue
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from train_bridge.verl.trainer import TrueOnPolicyTrainer

    fields = step()
    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", lambda *_: Batch())
    monkeypatch.setattr(PPOTrainerSync, "_compute_ref_log_prob", lambda *_: Batch())
    monkeypatch.setattr(
        transfer_queue, "kv_batch_get", lambda **call: {n: fields[n] for n in call["select_fields"]}
    )
    made = object.__new__(TrueOnPolicyTrainer)
    made.config = base
    made.policy = MismatchPolicy(capture_dir=str(tmp_path))
    made.global_steps = 3
    made.actor_rollout_wg = Workers(account())
    return made, fields


def test_trainer_logs_equality(trainer: Any) -> None:
    made, _ = trainer
    metrics: dict[str, Any] = {}
    made._compute_old_log_prob(Batch(), metrics)
    assert metrics["true_on_policy/mismatched_tokens"] == 0
    assert metrics["true_on_policy/bitwise_equal"] == 1.0


def test_trainer_stops_before_the_update(trainer: Any, tmp_path: Path) -> None:
    made, fields = trainer
    flipped(fields, 1, 1)
    metrics: dict[str, Any] = {}
    with pytest.raises(LogprobMismatchError, match="step 3: 1 of 9 log-probs"):
        made._compute_old_log_prob(Batch(), metrics)
    assert metrics["true_on_policy/mismatched_tokens"] == 1
    assert (tmp_path / "step_000003" / "capture.json").is_file()


def test_trainer_goes_on_with_a_warning(
    trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, fields = trainer
    made.policy = MismatchPolicy(on_mismatch="warn", capture_dir=str(tmp_path))
    flipped(fields, 0, 0)
    made._compute_old_log_prob(Batch(), {})
    assert "sample 0, position 0" in caplog.text
    assert (tmp_path / "step_000003" / "tensors.safetensors").is_file()


def test_measuring_trainer_only_measures(trainer: Any, tmp_path: Path) -> None:
    from train_bridge.verl.trainer import MeasuringTrainer

    made, fields = trainer
    made.__class__ = MeasuringTrainer
    flipped(fields, 0, 0)
    metrics: dict[str, Any] = {}
    made._compute_old_log_prob(Batch(), metrics)
    assert metrics["true_on_policy/mismatched_tokens"] == 1
    assert list(tmp_path.iterdir()) == []


def test_trainer_checks_the_reference_before_the_first_update(trainer: Any) -> None:
    made, fields = trainer
    fields["ref_log_prob"] = step()["old_log_probs"]
    made.global_steps = 1
    metrics: dict[str, Any] = {}
    made._compute_ref_log_prob(Batch(), metrics)
    assert metrics["true_on_policy/ref_mismatched_tokens"] == 0
    flipped(fields, 2, 0)
    with pytest.raises(LogprobMismatchError, match=r"ref\.fsdp_config"):
        made._compute_ref_log_prob(Batch(), metrics)
    made.global_steps = 2
    made._compute_ref_log_prob(Batch(), metrics)


@pytest.mark.parametrize(
    ("other", "said"),
    [(account(contract="d"), "rank 1: name"), (account(total="u"), "rank 1: weights")],
)
def test_trainer_rejects_ranks_that_differ(trainer: Any, other: dict[str, Any], said: str) -> None:
    made, _ = trainer
    made.actor_rollout_wg = Workers(account(), other)
    with pytest.raises(ContractMismatchError, match=said):
        made._account()


def test_trainer_rejects_another_contract_than_pinned(trainer: Any) -> None:
    made, _ = trainer
    made.policy = MismatchPolicy(contract_digest="f" * 64)
    with pytest.raises(ContractMismatchError, match="contract_digest"):
        made._account()


def test_trainer_presents_itself_as_synchronous(trainer: Any) -> None:
    made, _ = trainer
    made.trainer_mode = "true_on_policy"
    assert made.trainer_mode == "sync"
