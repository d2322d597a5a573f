"""The run loop with light parts in place of engine and trainer: every way a run can end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from consistent_kernels.contract import Contract
from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.demo import metrics, report
from vllm_consistent.cli.demo.data import Arithmetic
from vllm_consistent.cli.demo.display import Display
from vllm_consistent.cli.demo.errors import CheckpointError, RunError
from vllm_consistent.cli.demo.metrics import Row
from vllm_consistent.cli.demo.model_source import ModelSource
from vllm_consistent.cli.demo.options import DemoOptions
from vllm_consistent.cli.demo.output import OutputFolder
from vllm_consistent.cli.demo.plan import Plan
from vllm_consistent.cli.demo.rollout import Batch, Response, Rollout, SamplingPlan, request_seed
from vllm_consistent.cli.demo.run import Backends, DemoRun, run_demo
from vllm_consistent.cli.demo.speed import ROUNDS, Rates
from vllm_consistent.cli.demo.stock import StepPrompts, StockResult

CONTRACT = Contract("fake_v1", {}, {}, {}, {})


class Tokenizer:
    """Decodes token ids as characters."""

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def log_prob(weight: float, token: int) -> float:
    """Both sides' model: any function of weight and token will do."""
    return torch.tensor(-0.01 * token - weight, dtype=torch.float32).item()


class FakeEngine:
    """Samples characters from the request's seed; scores them with the weight it holds."""

    def __init__(self) -> None:
        self.weight: float | None = None
        self.fault: dict[str, float] = {}

    def sample(self, prompt_ids: list[list[int]], plan: SamplingPlan) -> Rollout:
        responses = []
        for index, seed in enumerate(plan.seeds):
            for sample in range(plan.samples):
                generator = torch.Generator().manual_seed(seed + sample)
                ids = torch.randint(48, 58, (1 + sample,), generator=generator).tolist()
                values = [log_prob(self.weight, token) for token in ids]
                responses.append(Response(index, tuple(ids), tuple(values), True))
        return Rollout(tuple(map(tuple, prompt_ids)), tuple(responses), 0.5)

    def warm_up(self, work: dict[str, Any]) -> None:
        self.is_warm = True

    def time_rollout(self, work: dict[str, Any]) -> Rates:
        assert self.is_warm
        return Rates(100.0, 120.0)

    def consistency_report(self) -> dict[str, Any]:
        return {"requested": True}


class FakeTrainer:
    """One weight, moved by 0.5 each update."""

    contract = CONTRACT

    def __init__(self, on_step: dict[int, Any] | None = None) -> None:
        self.weight = torch.tensor([1.0])
        self.updates = torch.tensor([0])
        self.on_step = on_step or {}

    def score(self, batch: Batch) -> Tensor:
        out = torch.zeros_like(batch.rollout_log_probs)
        for row, start in enumerate(batch.prompt_lengths.tolist()):
            for position in range(int(batch.response_mask[row].sum())):
                token = int(batch.input_ids[row, start + position])
                out[row, position] = log_prob(self.weight.item(), token)
        action = self.on_step.get(int(self.updates))
        if isinstance(action, BaseException):
            raise action
        return action(out) if action else out

    def update(self, batch: Batch, advantages: Tensor) -> Row:
        self.weight += 0.5
        self.updates += 1
        return {"actor/grad_norm": 1.0, "actor/pg_loss": 0.0}

    def push(self, engine: FakeEngine) -> Row:
        engine.weight = self.weight.item()
        return {"weights/version": int(self.updates), "weights/changed_values": 1}

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"masters": {"w": self.weight}, "optimizer": {"updates": self.updates}}

    def restore(self, groups: dict[str, dict[str, Tensor]]) -> None:
        self.weight = groups["masters"]["w"]
        self.updates = groups["optimizer"]["updates"]


class FakeStock:
    """Returns log-probs that differ in the last bit; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.timed = self.closed = 0

    def __call__(self, *, steps: list[StepPrompts], **_: Any) -> FakeStock:
        self.asked.append([step.step for step in steps])
        self.result = self._result(steps)
        return self

    def time_rollout(self) -> Rates:
        self.timed += 1
        return Rates(25.0, 40.0)

    def close(self) -> None:
        self.closed += 1

    @staticmethod
    def _result(steps: list[StepPrompts]) -> StockResult:
        response = {
            "token_ids": [5, 6],
            "rollout_log_probs": [-1.0, -2.0],
            "train_log_probs": [-1.0000001192092896, -2.000000238418579],
        }
        record = {"num_tokens": 2, "seconds": 0.1, "responses": [response]}
        return StockResult({step.step: {"step": step.step, **record} for step in steps}, 1.0)


def make_run(out: Path, display: Display, *, fingerprint: str = "f", **options: Any) -> DemoRun:
    chosen = DemoOptions(out=out, **({"steps": 3, "prompts": 2, "samples": 2} | options))
    source = Arithmetic(chosen.seed)
    problems = [source.problems(step, chosen.prompts) for step in range(chosen.steps)]
    prompts = [
        StepPrompts(
            step,
            [[1, 2], [3]],
            [request_seed(chosen.seed, step, index) for index in range(chosen.prompts)],
        )
        for step in range(chosen.steps)
    ]
    work = {"prompt_ids": [[1]], "seeds": [0], "samples": 2, "max_tokens": 4, "temperature": 1.0}
    model = ModelSource(Path("/model"), "fake", fingerprint)
    plan = Plan(chosen, model, problems, prompts, {}, work, Tokenizer())
    output = OutputFolder(out)
    output.open(0)
    return DemoRun(plan, "sums", output, display)


@pytest.fixture
def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Start runs in one folder, each in a fresh 'process'."""
    import io

    stock = FakeStock()

    def start(
        on_step: dict[int, Any] | None = None, *, engine: Any = FakeEngine, **options: Any
    ) -> Any:
        display = Display(io.StringIO(), None)
        run = make_run(tmp_path / "out", display, **options)
        trainer = FakeTrainer(on_step)
        backends = Backends(lambda *_: engine(), lambda *_: trainer, stock)
        try:
            code, summary, stopped = run_demo(run, backends)
        finally:
            run.output.close()
        lines = run.output.metrics.read_text().splitlines()
        return SimpleNamespace(
            code=code,
            summary=summary,
            stopped=stopped,
            rows=[json.loads(line) for line in lines],
            report=run.output.report.read_text(),
        )

    return SimpleNamespace(start=start, stock=stock, out=tmp_path / "out")


def without_timing(rows: list[Row]) -> list[Row]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows
    ]


def flip_bit(log_probs: Tensor) -> Tensor:
    log_probs.view(torch.int32)[1, 1] ^= 1
    return log_probs


def drop_value(log_probs: Tensor) -> Tensor:
    log_probs[0, 0] = float("nan")
    return log_probs


def test_run_that_is_bit_equal(world: Any) -> None:
    done = world.start()
    assert done.code == exit_codes.OK
    assert done.summary["status"] == "bit-equal"
    assert [row["training/global_step"] for row in done.rows] == [0, 1, 2]
    for row in done.rows:
        assert row["true_on_policy/mismatched_tokens"] == 0
        assert row["true_on_policy/bitwise_equal"] in (1, True)
        assert row["true_on_policy/k3_kl"] == 0.0
        assert row["true_on_policy/num_tokens"] == 6
        assert row["stock/true_on_policy/mismatched_tokens"] == 2
        assert row["stock/true_on_policy/num_tokens"] == 2
        assert row["rollout_corr/k3_kl"] == 0.0
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["perf/timed_rollout_tokens_per_s"] == 100.0
        assert row["stock/perf/timed_rollout_tokens_per_s"] == 25.0
        assert row["perf/timed_rollout_ratio_to_stock"] == 4.0
        assert row["perf/timed_decode_ratio_to_stock"] == 3.0
    assert done.summary["throughput"]["ratio"] == 4.0
    assert done.summary["throughput"]["decode"]["ratio"] == 3.0
    assert (world.stock.timed, world.stock.closed) == (ROUNDS, 1)
    assert done.summary["stock"]["mismatched_share"] == 1.0
    assert "All 18 log-probs of 3 step(s) are equal bit for bit." in done.report


def test_metric_names_are_those_of_the_contract_with_readers(world: Any) -> None:
    row = world.start(steps=1).rows[0]
    strict = ("mismatched_tokens", "num_tokens", "logprob_abs_diff_max", "logprob_abs_diff_mean",
              "logprob_abs_diff_std", "k3_kl", "bitwise_equal")  # fmt: skip
    names = {f"{side}true_on_policy/{name}" for side in ("", "stock/") for name in strict}
    names |= {
        "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
        "training/rollout_probs_diff_std", "rollout_corr/k3_kl", "rollout_corr/kl",
        "critic/rewards/mean", "critic/score/mean", "critic/advantages/mean",
        "response_length/mean", "response_length/max", "actor/grad_norm", "actor/pg_loss",
        "perf/throughput", "perf/total_num_tokens", "perf/time_per_step", "timing_s/gen",
        "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/update_weights",
        "timing_s/step", "training/global_step",
    }  # fmt: skip
    assert names - row.keys() == set()


@pytest.mark.parametrize(("fault", "kind"), [(flip_bit, "flip"), (drop_value, "missing")])
def test_mismatch_is_named_and_nothing_is_trained_on_it(world: Any, fault: Any, kind: str) -> None:
    done = world.start({1: fault})
    assert done.code == exit_codes.MISMATCH
    assert len(done.rows) == 2
    assert done.rows[1]["true_on_policy/mismatched_tokens"] == 1
    assert "actor/grad_norm" not in done.rows[1]
    first = done.summary["first_mismatch"]
    place = (first["step"], first["prompt"], first["sample"], first["position"])
    assert place == ((1, 0, 1, 1) if kind == "flip" else (1, 0, 0, 0))
    text = json.dumps(first)
    assert "0x" in text
    assert "First mismatch" in done.report
    assert "differ between rollout and trainer" in done.report


def test_step_after_a_mismatch_is_done_again_on_resume(world: Any) -> None:
    world.start({1: flip_bit})
    done = world.start(resume=True)
    assert done.code == exit_codes.OK
    assert [row["training/global_step"] for row in done.rows] == [0, 1, 2]


@pytest.mark.parametrize("step", [0, 1])
def test_interruption_keeps_finished_steps_and_resume_continues(world: Any, step: int) -> None:
    stopped = world.start({step: KeyboardInterrupt()})
    assert stopped.code == exit_codes.INTERRUPTED
    assert len(stopped.rows) == step
    assert "it was interrupted" in stopped.report
    done = world.start(resume=True)
    assert done.code == exit_codes.OK
    assert [row["training/global_step"] for row in done.rows] == [0, 1, 2]
    assert done.rows[step]["true_on_policy/mismatched_tokens"] == 0
    assert world.stock.asked == [[0, 1, 2]], "the stock pair is measured once"
    assert (world.stock.timed, world.stock.closed) == (ROUNDS, 1)
    assert done.summary["throughput"]["ratio"] == 4.0


def test_second_interruption_does_not_cut_off_the_report(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = report.build

    def impatient(*arguments: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return build(*arguments)

    monkeypatch.setattr(report, "build", impatient)
    done = world.start({1: KeyboardInterrupt()})
    assert done.code == exit_codes.INTERRUPTED
    assert len(done.rows) == 1
    assert "it was interrupted" in done.report


def test_full_disk_keeps_the_checkpoint_and_still_says_what_was_found(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stream: int) -> None:
        raise OSError(28, "No space left on device")

    fsync = metrics.os.fsync
    finished = world.start(steps=2)
    monkeypatch.setattr(metrics.os, "fsync", full)
    done = world.start(steps=3, resume=True)
    assert done.code == exit_codes.FAILED
    assert isinstance(done.stopped, RunError)
    assert len(done.summary["not_written"]) == 3
    assert "No space left" in done.summary["not_written"][0]
    assert done.rows == finished.rows, "what was there before is untouched"
    monkeypatch.setattr(metrics.os, "fsync", fsync)
    assert world.start(steps=3, resume=True).code == exit_codes.OK


def test_resumed_run_equals_an_uninterrupted_one(world: Any, tmp_path: Path) -> None:
    world.start({2: KeyboardInterrupt()})
    resumed = world.start(resume=True)
    world.out.rename(tmp_path / "first")
    whole = world.start()
    assert without_timing(resumed.rows) == without_timing(whole.rows)


def test_resume_with_more_steps_measures_the_missing_stock_steps(world: Any) -> None:
    world.start(steps=2)
    done = world.start(steps=4, resume=True)
    assert len(done.rows) == 4
    assert world.stock.asked == [[0, 1], [2, 3]]
    assert done.summary["throughput"]["stock"] == 25.0
    assert (world.stock.timed, world.stock.closed) == (ROUNDS, 2), "the speed stays the first one"


def test_resume_of_a_finished_run_writes_the_report_again(world: Any) -> None:
    world.start(steps=2)
    done = world.start(steps=2, resume=True)
    assert done.code == exit_codes.OK
    assert len(done.rows) == 2
    assert done.summary["contract"]["name"] == "fake_v1"
    assert done.summary["throughput"]["consistent"] == 100.0


def test_failure_keeps_finished_steps_and_says_why(world: Any) -> None:
    for error in (RunError("disk is full"), RuntimeError("engine died\ndetails")):
        done = world.start({1: error}, resume=world.out.exists())
        assert done.code == exit_codes.FAILED
        assert done.stopped is error
        assert len(done.rows) == 1
        assert str(error).splitlines()[0] in done.report
        assert done.summary["status"] == "failed"


def test_without_baseline_no_stock_numbers(world: Any) -> None:
    done = world.start(baseline=False)
    assert done.code == exit_codes.OK
    assert world.stock.asked == []
    assert not any(name.startswith("stock/") for name in done.rows[0])
    assert done.summary["stock"] is None
    assert done.summary["throughput"]["consistent"] == 100.0
    assert done.summary["throughput"]["ratio"] is None


def test_stock_process_ends_when_the_run_does(world: Any) -> None:
    class Broken(FakeEngine):
        def time_rollout(self, work: dict[str, Any]) -> Rates:
            raise RunError("the engine died")

    done = world.start(engine=Broken)
    assert done.code == exit_codes.FAILED
    assert world.stock.closed == 1
    again = world.start(resume=True)
    assert again.code == exit_codes.OK
    assert world.stock.asked == [[0, 1, 2], []], "its steps were kept, its speed was not yet known"
    assert again.summary["throughput"]["ratio"] == 4.0


def test_resume_rejects_another_model(world: Any) -> None:
    world.start({1: KeyboardInterrupt()})
    before = (world.out / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match="of another model"):
        world.start(resume=True, fingerprint="other")
    assert (world.out / "metrics.jsonl").read_text() == before


def test_resume_rejects_another_contract(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start({1: KeyboardInterrupt()})
    monkeypatch.setattr(FakeTrainer, "contract", Contract("fake_v2", {}, {}, {}, {}))
    with pytest.raises(CheckpointError, match=r"fake_v1.*fake_v2"):
        world.start(resume=True)


def test_resume_rejects_a_corrupt_checkpoint_and_changes_nothing(world: Any) -> None:
    world.start({2: KeyboardInterrupt()})
    masters = next((world.out / "checkpoints").glob("*/masters.safetensors"))
    masters.write_bytes(masters.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in world.out.rglob("*.*") if path.is_file()}
    with pytest.raises(CheckpointError, match="is damaged"):
        world.start(resume=True)
    after = {path: path.read_bytes() for path in world.out.rglob("*.*") if path.is_file()}
    assert before == after


def test_resume_rejects_a_checkpoint_whose_state_lacks_a_part(world: Any) -> None:
    world.start({2: KeyboardInterrupt()})
    state = next((world.out / "checkpoints").glob("*/state.json"))
    record = json.loads(state.read_text())
    del record["rows"], record["contract"]
    state.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="is damaged: its state lacks rows, contract"):
        world.start(resume=True)


def test_resume_measures_a_damaged_stock_record_again(world: Any) -> None:
    world.start({2: KeyboardInterrupt()})
    record = json.loads((world.out / "stock.json").read_text())
    record["steps"]["0"] = {}
    (world.out / "stock.json").write_text(json.dumps(record))
    resumed = world.start(resume=True)
    assert resumed.code == exit_codes.OK
    assert resumed.summary["stock"]["tokens"] > 0
