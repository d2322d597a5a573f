"""The run: sample, score, compare, update, push, checkpoint; and what is left when it ends."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from consistent_kernels.contract import Contract
from consistent_kernels.errors import LogprobMismatchError
from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.demo import checkpoint, report, stock
from vllm_consistent.cli.demo.comparison import Comparison, compare
from vllm_consistent.cli.demo.display import Display
from vllm_consistent.cli.demo.errors import CheckpointError, RunError
from vllm_consistent.cli.demo.grpo import group_advantages
from vllm_consistent.cli.demo.metrics import STOCK, MetricsFile, Row, plain, prefixed, spread
from vllm_consistent.cli.demo.output import OutputFolder
from vllm_consistent.cli.demo.plan import STOCK_SAMPLES, STOCK_TOKENS, Plan
from vllm_consistent.cli.demo.reward import Reward, reward
from vllm_consistent.cli.demo.rollout import Batch, Rollout, SamplingPlan, to_batch
from vllm_consistent.cli.demo.speed import Rates, Speed, compare_speed, speed_row
from vllm_consistent.cli.demo.summary import summarize

_STATE_KEYS = ("rows", "seconds", "contract", "consistency_report", "speed")


class Engine(Protocol):
    """The consistent vLLM engine, alive for the whole run."""

    def sample(self, prompt_ids: list[list[int]], plan: SamplingPlan) -> Rollout:
        """Sample with log-probs."""

    def warm_up(self, work: dict[str, Any]) -> None:
        """Let first calls be over."""

    def time_rollout(self, work: dict[str, Any]) -> Rates:
        """Return tokens/s of the timed work."""

    def consistency_report(self) -> dict[str, Any]:
        """Return what the worker serves."""


class Stock(Protocol):
    """The stock pair in its own process; it has sampled and scored when it is made."""

    result: stock.StockResult

    def time_rollout(self) -> Rates:
        """Return tokens/s of the timed work."""

    def close(self) -> None:
        """End its process."""


class Trainer(Protocol):
    """The bridged model and its optimizer."""

    def score(self, batch: Batch) -> Tensor:
        """Return the log-prob of every response token, [B, R] fp32, without gradient."""

    def update(self, batch: Batch, advantages: Tensor) -> Row:
        """Make one optimizer step; returns actor/* metrics."""

    def push(self, engine: Engine) -> Row:
        """Write the weights into the engine and verify its receipt; returns weights/* metrics."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return masters, optimizer and random state as named tensors."""

    def restore(self, groups: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `state` returned."""

    @property
    def contract(self) -> Contract:
        """What its forward computes; the engine must serve the same."""


@dataclasses.dataclass(frozen=True)
class Backends:
    """How the parts are made; tests put light ones here."""

    engine: Callable[[Path, dict[str, Any], Contract], Engine]
    trainer: Callable[[Path, float], Trainer]
    stock: Callable[..., Stock]


class DemoRun:
    """One run from start or checkpoint to the report."""

    def __init__(self, plan: Plan, problems: str, output: OutputFolder, display: Display) -> None:
        self.plan = plan
        self.problems = problems
        self.output = output
        self.display = display
        self.metrics = MetricsFile(output.metrics)
        self.rows: list[Row] = []
        self.stock: stock.StockResult | None = None
        self.speed: Speed | None = None
        self.consistency: dict[str, Any] | None = None
        self.contract: dict[str, str] | None = None
        self.first_mismatch: dict[str, Any] | None = None
        self.started = time.perf_counter()
        self.seconds_before = 0.0

    def execute(self, backends: Backends) -> int:
        """Run to the end; returns OK or MISMATCH.

        Raises:
            CheckpointError: the checkpoint cannot be continued; nothing was changed.
            ConsistencyError: the run cannot go on; finished steps are kept.
        """
        saved = self._load_checkpoint()
        if self.rows and len(self.rows) >= self.plan.options.steps:
            self.display.note(f"All {len(self.rows)} steps are done; raise --steps to go on.")
            return exit_codes.OK
        with self._stock_pair(backends) as pair:
            self.display.stage("Loading the trainer")
            trainer = backends.trainer(self.plan.source.path, self.plan.options.temperature)
            self._adopt_contract(trainer, saved)
            if saved is not None:
                trainer.restore(saved.groups)
                del saved
            self.display.stage("Starting the engine")
            engine = backends.engine(self.plan.source.path, self.plan.engine, trainer.contract)
            trainer.push(engine)
            if self.speed is None:
                self._time(engine, pair)
        for step in range(len(self.rows), self.plan.options.steps):
            self.display.steps(step, self.plan.options.steps)
            if not self._step(step, engine, trainer):
                return exit_codes.MISMATCH
        self.consistency = engine.consistency_report()
        return exit_codes.OK

    def finish(self, code: int, stopped_because: str | None) -> dict[str, Any]:
        """Write metrics, report and summary of what was reached; returns the summary.

        A full disk must not hide the result: what cannot be written is listed under `not_written`.
        """
        self.display.stage("Writing the report")
        summary = summarize(self, code, stopped_because)
        for write in (
            lambda: self.metrics.rewrite(self.rows),
            lambda: report.write(self.output.report, summary, self.rows),
            lambda: self.output.write_json(self.output.summary, plain(summary)),
        ):
            try:
                write()
            except RunError as error:
                summary["not_written"].append(str(error))
        return summary

    @property
    def seconds(self) -> float:
        """Wall time of all sessions of this run."""
        return self.seconds_before + time.perf_counter() - self.started

    def _load_checkpoint(self) -> checkpoint.Checkpoint | None:
        if not self.plan.options.resume or not checkpoint.exists(self.output.checkpoints):
            return None
        self.display.stage("Loading the checkpoint")
        saved = checkpoint.load_latest(self.output.checkpoints)
        found, expected = saved.state.get("model_fingerprint"), self.plan.source.fingerprint
        if found != expected:
            raise CheckpointError(
                f"demo --resume: the checkpoint is of another model (fingerprint {found}, "
                f"{self.plan.source.path} has {expected}); name the model it was made from"
            )
        missing = [key for key in _STATE_KEYS if key not in saved.state]
        if missing:
            raise CheckpointError(
                f"demo --resume: the checkpoint of step {saved.step} is damaged: its state lacks "
                f"{', '.join(missing)}. Restore it from a copy, or start a new run in another --out"
            )
        self.rows = list(saved.state["rows"])
        self.seconds_before = saved.state["seconds"]
        self.contract = saved.state["contract"]
        self.consistency = saved.state["consistency_report"]
        self.speed = Speed.from_dict(saved.state["speed"])
        self.stock = stock.load(self.output.stock)
        self.metrics.rewrite(self.rows)
        self.display.note(f"Resuming after step {saved.step - 1}")
        return saved

    def _adopt_contract(self, trainer: Trainer, saved: checkpoint.Checkpoint | None) -> None:
        mine = {"name": trainer.contract.name, "digest": trainer.contract.digest}
        if saved is not None and saved.state["contract"] != mine:
            raise CheckpointError(
                f"demo --resume: the checkpoint was written under contract "
                f"{saved.state['contract']}, this installation and machine have {mine}; continue "
                "it where it was made, or start a new run in another --out"
            )
        self.contract = mine

    @contextmanager
    def _stock_pair(self, backends: Backends) -> Iterator[Stock | None]:
        """Measure what of the stock pair is not known yet; yields it while it can be timed."""
        options = self.plan.options
        if not options.baseline:
            yield None
            return
        known = stock.load(self.output.stock)
        missing = [
            prompts for prompts in self.plan.prompts if not known or prompts.step not in known.steps
        ]
        if known:
            self.speed = self.speed or known.speed
        if not missing and self.speed:
            self.stock = known
            yield None
            return
        self.display.stage("Stock pair: vLLM with the plugin off, in a process of its own")
        pair = backends.stock(
            model=self.plan.source.path,
            engine=self.plan.engine,
            steps=missing,
            samples=min(STOCK_SAMPLES, options.samples),
            max_tokens=min(STOCK_TOKENS, options.max_tokens),
            temperature=options.temperature,
            work=self.plan.work,
            folder=self.output.logs,
        )
        try:
            self._keep_stock(stock.merged(known, pair.result))
            yield pair
        finally:
            pair.close()

    def _keep_stock(self, result: stock.StockResult) -> None:
        self.stock = result
        self.output.write_json(self.output.stock, result.to_dict())

    def _time(self, engine: Engine, pair: Stock | None) -> None:
        """Roll out the timed work on both engines in turns."""
        self.display.stage("Timing the engines" if pair else "Timing the engine")
        engine.warm_up(self.plan.work)
        self.speed = compare_speed(
            lambda: engine.time_rollout(self.plan.work), pair.time_rollout if pair else None
        )
        if pair:
            self._keep_stock(dataclasses.replace(self.stock, speed=self.speed))

    def _step(self, step: int, engine: Engine, trainer: Trainer) -> bool:
        """Do one step and record it; returns whether every token was bit-equal."""
        timing: dict[str, float] = {}
        begin = time.perf_counter()
        self.display.phase(f"Step {step}: rollout")
        rollout = engine.sample(self.plan.prompts[step].prompt_ids, self.plan.sampling(step))
        timing["gen"] = rollout.seconds
        self.consistency = engine.consistency_report()
        self.display.phase(f"Step {step}: scoring and comparing")
        batch = to_batch(rollout)
        with _timed(timing, "old_log_prob"):
            log_probs = trainer.score(batch)
        compared = compare(batch.rollout_log_probs, log_probs, batch.response_mask)
        rewards = self._rewards(step, rollout)
        row = self._row(step, rollout, compared, rewards)
        if compared.equal:
            self.display.phase(f"Step {step}: training")
            grouped = torch.tensor([r.total for r in rewards]).view(-1, self.plan.options.samples)
            advantages = group_advantages(grouped).flatten()
            row |= spread("critic/advantages", advantages.tolist())
            with _timed(timing, "update_actor"):
                row |= trainer.update(batch, advantages)
            self.display.phase(f"Step {step}: pushing weights")
            with _timed(timing, "update_weights"):
                row |= trainer.push(engine)
        else:
            self.first_mismatch = self._locate(step, rollout, compared)
        self._record(step, row, timing, begin, trainer if compared.equal else None)
        return compared.equal

    def _record(
        self,
        step: int,
        row: Row,
        timing: dict[str, float],
        begin: float,
        trainer: Trainer | None,
    ) -> None:
        timing["step"] = time.perf_counter() - begin
        row |= prefixed("timing_s/", timing)
        row["perf/time_per_step"] = timing["step"]
        row["perf/throughput"] = row["perf/total_num_tokens"] / timing["step"]
        if trainer is not None:
            self.display.phase(f"Step {step}: checkpoint")
            with _timed(timing, "save_checkpoint"):
                self._save(step, row, trainer)
            row["timing_s/save_checkpoint"] = timing["save_checkpoint"]
        self.rows.append(plain(row))
        self.metrics.append(row)
        self.display.steps(step + 1, self.plan.options.steps)
        self.display.step_done(row)

    def _save(self, step: int, row: Row, trainer: Trainer) -> None:
        state = {
            "options": self.plan.options.to_dict(),
            "model_fingerprint": self.plan.source.fingerprint,
            "contract": self.contract,
            "consistency_report": plain(self.consistency),
            "speed": self.speed.to_dict(),
            "rows": [*self.rows, plain(row)],
            "seconds": self.seconds,
        }
        checkpoint.save(self.output.checkpoints, step + 1, trainer.state(), state)

    def _rewards(self, step: int, rollout: Rollout) -> list[Reward]:
        return [
            reward(
                self._text(response.token_ids),
                self.plan.problems[step][response.prompt_index].answer,
                finished=response.finished,
                max_tokens=self.plan.options.max_tokens,
            )
            for response in rollout.responses
        ]

    def _text(self, token_ids: tuple[int, ...]) -> str:
        return self.plan.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _row(self, step: int, rollout: Rollout, compared: Comparison, rewards: list[Reward]) -> Row:
        lengths = [len(response.token_ids) for response in rollout.responses]
        prompt_lengths = [len(rollout.prompt_ids[r.prompt_index]) for r in rollout.responses]
        totals = [r.total for r in rewards]
        limit = self.plan.options.max_tokens
        row = {
            "training/global_step": step,
            **compared.row,
            **spread("critic/score", totals),
            **spread("critic/rewards", totals),
            "reward/accuracy": sum(r.correct for r in rewards) / len(rewards),
            **spread("response_length", [float(length) for length in lengths]),
            "response_length/clip_ratio": sum(n == limit for n in lengths) / len(lengths),
            **spread("prompt_length", [float(length) for length in prompt_lengths]),
            "perf/total_num_tokens": sum(lengths) + sum(prompt_lengths),
            "perf/rollout_tokens_per_s": rollout.num_tokens / rollout.seconds,
            **speed_row(self.speed),
        }
        if self.stock is not None:
            row |= prefixed(STOCK, stock.step_row(self.stock, step))
        return row

    def _locate(self, step: int, rollout: Rollout, compared: Comparison) -> dict[str, Any]:
        first = compared.first
        response = rollout.responses[first.sample]
        token = response.token_ids[first.position]
        return {
            "step": step,
            "prompt": response.prompt_index,
            "sample": first.sample % self.plan.options.samples,
            "position": first.position,
            "token": f"{token} {self._text((token,))!r}",
            "rollout": f"{first.rollout} ({first.rollout_bits})",
            "trainer": f"{first.train} ({first.train_bits})",
        }


@contextmanager
def _timed(timing: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    timing[name] = time.perf_counter() - begin


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def run_demo(run: DemoRun, backends: Backends) -> tuple[int, dict[str, Any], BaseException | None]:
    """Execute `run` and leave a usable folder however it ends.

    Returns:
        (exit code, summary, what stopped it or None).

    Raises:
        CheckpointError: before anything was changed.
    """
    stopped: BaseException | None = None
    try:
        code = run.execute(backends)
        reason = "a mismatch was found" if code == exit_codes.MISMATCH else None
    except CheckpointError:
        raise
    except LogprobMismatchError as error:
        code, reason, stopped = exit_codes.MISMATCH, first_line(error), error
    except KeyboardInterrupt as error:
        code, reason, stopped = exit_codes.INTERRUPTED, "it was interrupted", error
    except Exception as error:
        # Whatever went wrong, the finished steps are reported; the caller shows the error.
        code, reason, stopped = exit_codes.FAILED, first_line(error), error
    with _undisturbed():
        summary = run.finish(code, reason)
    if summary["not_written"] and code == exit_codes.OK:
        code = exit_codes.FAILED
    return code, summary, stopped


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let a second Ctrl-C not cut off the report, which takes seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
