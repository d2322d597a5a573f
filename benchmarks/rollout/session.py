"""One session: the engines of some works resident together, timed in turn, then checked.

Order: start every engine at once (pages are sized by hand, so that no engine measures memory while
another one starts); a small parity check; the timed rounds; profiles; end the stock engine, whose
memory the trainers need; then one variant after the other: the parity check of every work, each
with its row as soon as it is checked, and the end of that variant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clock import Clock
from benchmarks.common.rows import Row
from benchmarks.common.stats import INTERVAL, LEAST_LOGPROB, paired_ratio
from benchmarks.rollout.models import Checkpoint
from benchmarks.rollout.process import Process, ProcessError
from benchmarks.rollout.samples import Comparison, Sample, compare, enough
from benchmarks.rollout.turns import in_turns
from benchmarks.rollout.variants import OURS, STOCK, Variant
from benchmarks.rollout.works import FIRST_TOKEN, PROFILE_TOKENS, Work
from consistent_kernels.errors import ConsistencyError

_SMOKE = (4, 16)
_BLOCK = 16
_PEER_SHARE = 4
"""A peer, whose mismatch refuses nothing, is compared on this part of the tokens at least."""


class ParityError(ConsistencyError):
    """Log-probs differ, are too few or too flat; no speed is reported."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a session is told.

    Attributes:
        variants: stock first, unless only parity is checked.
        pairs: timed rounds.
        peer_pairs: timed rounds that variants other than stock and ours take part in, the first.
        warmups: rounds before them.
        parity_tokens: sampled tokens to compare for each work, at least.
        device: "cuda" or "cpu".
        engine_args: further arguments of every engine.
        packed_tokens: tokens of one forward of the trainer.
        environment: of every process.
        logs: folder of the processes' logs.
        profile_steps: decode steps of a profile, 0 for none.
        cache_state: "cold" or "warm", as the compile caches are at the start; with a note where
            stock has started before.
    """

    variants: Sequence[Variant]
    pairs: int
    peer_pairs: int
    warmups: int
    parity_tokens: int
    device: str
    engine_args: dict[str, Any]
    packed_tokens: int
    environment: dict[str, str]
    logs: Path
    profile_steps: int
    cache_state: str


@dataclasses.dataclass
class Seat:
    """One engine of the session.

    Attributes:
        variant: its environment and duties.
        engine: its process.
        trainer: the process that will score its samples, where the plugin serves it.
        started: what `Engine.start` returned.
        values: by work key, what was measured in each timed round.
        samples: by work key, what was sampled in the timed rounds.
    """

    variant: Variant
    engine: Process
    trainer: Process | None
    started: dict[str, Any] = dataclasses.field(default_factory=dict)
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    samples: dict[str, list[Sample]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """What a session leaves.

    Attributes:
        rows: of every work and variant whose parity check passed.
        refusals: one line for every work whose speed is not reported, and why.
        broken: one line for every variant that did not start or died.
        profiles: where a decode step's time goes, by work and variant.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    refusals: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    profiles: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def engine_arguments(works: Sequence[Work], model: Checkpoint, device: str) -> dict[str, Any]:
    """Return the arguments of every engine of the works' model."""
    longest = max(work.longest() for work in works) + PROFILE_TOKENS
    tokens = max(longest, *(work.pages_tokens() for work in works))
    blocks = -(-tokens // _BLOCK) + max(work.requests for work in works) + 64
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": -(-longest // _BLOCK) * _BLOCK,
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": blocks * _BLOCK * model.kv_bytes,
        "disable_log_stats": False,  # tokens of running requests are counted from them
    }
    if device == "cuda":
        # Only checked against free memory at the start; pages are sized above.
        arguments["gpu_memory_utilization"] = 0.05
    else:
        arguments |= {"enforce_eager": True, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return arguments


class ModelSession:
    """The works of one model.

    Args:
        works: all of one model.
        options: see there.
        clock: for progress.
        name: for messages and log files; the model's by default.
    """

    def __init__(
        self, works: Sequence[Work], options: Options, clock: Clock, name: str | None = None
    ) -> None:
        self.works, self.options, self.clock = works, options, clock
        self.name = name or works[0].model
        self.seats: list[Seat] = []
        self.stock: Seat | None = None
        self.result = Result()

    def launch(self) -> None:
        """Start the processes, which begin to import."""
        for variant in self.options.variants:
            environment = self.options.environment | variant.environment
            label = f"{self.name}-{variant.name}"
            logs = self.options.logs
            engine = Process(label, "benchmarks.rollout.engine", environment, logs)
            engine.send("prepare")
            trainer = None
            if variant.consistent:
                trainer = Process(
                    f"{label}-trainer", "benchmarks.rollout.trainer", environment, logs
                )
            seat = Seat(variant, engine, trainer)
            self.seats.append(seat)
            if variant.name == STOCK:
                self.stock = seat

    def begin(self, model: Checkpoint) -> None:
        """Start the engines on their checkpoint; `settle` waits for them."""
        self.model = model
        arguments = engine_arguments(self.works, model, self.options.device)
        for seat in list(self.seats):
            with self._left_out_if_it_breaks(seat):
                seat.engine.send(
                    "start",
                    model=str(model.path),
                    arguments=arguments | self.options.engine_args,
                    consistent=seat.variant.consistent,
                )
                if seat.trainer:
                    seat.trainer.send("load", model=str(model.path))

    def settle(self) -> None:
        """Wait until every engine serves; a variant that does not start is left out.

        Where stock does not start, nothing could be measured: all end.
        """
        for seat in list(self.seats):
            with self._left_out_if_it_breaks(seat):
                seat.engine.result()
                seat.started = seat.engine.result()
                if seat.trainer:
                    seat.trainer.result()
                self.clock.tell(
                    f"{self.name}, {seat.variant.name}: started in {seat.started['seconds']:.1f} s"
                )
        if self.stock is not None and self.stock not in self.seats:
            self.close()

    @contextlib.contextmanager
    def _left_out_if_it_breaks(self, seat: Seat) -> Iterator[None]:
        try:
            yield
        except ProcessError as error:
            self.result.broken.append(f"{self.name}, {seat.variant.name}: {error}")
            self.clock.tell(self.result.broken[-1])
            self._end(seat)

    def _end(self, seat: Seat) -> None:
        if seat in self.seats:
            self.seats.remove(seat)
        for process in (seat.engine, seat.trainer):
            if process:
                process.close()

    def smoke(self) -> None:
        """Compare a few samples with the engine's own scores, before time is spent."""
        requests, tokens = _SMOKE
        for seat in [seat for seat in self.seats if seat.variant.consistent]:
            with self._left_out_if_it_breaks(seat):
                prompts = self.works[0].prompts(-1, self.model.prompts)[:requests]
                outcome = seat.engine.call(
                    "rollout", prompts=prompts, tokens=tokens, measure="throughput", cached=False
                )
                rescored = seat.engine.call("score", samples=outcome["samples"])
                found = compare(outcome["samples"], rescored, None)
                if found.mismatched:
                    self._refuse_all(seat, f"{found.mismatched} of {found.tokens}, {found.first}")

    def _refuse_all(self, seat: Seat, why: str) -> None:
        self.result.refusals.append(
            f"{self.name}, {seat.variant.name}: the first samples' log-probs differ from the "
            f"engine's own scores ({why}); nothing was timed"
        )
        self._end(seat)

    def time(self) -> None:
        """Run every work's rounds; one engine at a time, all others idle.

        Where stock dies, what was measured before it is kept and nothing more is timed.
        """
        for work in self.works:
            with self.clock.phase(f"{work.key}: {self.options.pairs} rounds"):
                for turn in range(-self.options.warmups, self.options.pairs):
                    if self.stock not in self.seats:
                        return
                    self._round(work, turn)

    def _pairs(self, seat: Seat) -> int:
        measured = seat is self.stock or seat.variant.name == OURS
        return self.options.pairs if measured else self.options.peer_pairs

    def _timed(self, seat: Seat, work: Work) -> bool:
        """Whether seat and stock ran all rounds of a work (true where there is no stock engine)."""
        if self.stock is None:
            return True
        return all(
            len(one.values.get(work.key, ())) == self._pairs(one) for one in (seat, self.stock)
        )

    def _round(self, work: Work, turn: int) -> None:
        # Forwards and backwards in turn: a drift hits all alike.
        order = self.seats[:: 1 if turn % 2 == 0 else -1]
        order = [seat for seat in order if turn < self._pairs(seat)]
        prompts = work.prompts(turn, self.model.prompts)
        if work.measure == FIRST_TOKEN:
            measured = self._one_by_one(order, work, prompts)
        else:
            measured = in_turns(
                order, work, prompts, self.seats.__contains__, self._left_out_if_it_breaks
            )
        for seat, value, samples in measured if turn >= 0 else ():
            seat.values.setdefault(work.key, []).append(value)
            seat.samples.setdefault(work.key, []).extend(samples)

    def _one_by_one(
        self, order: Sequence[Seat], work: Work, prompts: list[list[int]]
    ) -> list[tuple[Seat, float, list[Sample]]]:
        measured = []
        for seat in order:
            with self._left_out_if_it_breaks(seat):
                outcome = seat.engine.call(
                    "rollout",
                    prompts=prompts,
                    tokens=work.new_tokens,
                    measure=work.measure,
                    cached=work.cached,
                )
                measured.append((seat, outcome["value"], outcome["samples"]))
        return measured

    def profile(self) -> None:
        """Profile decode steps, or prompts where their time is measured, on every engine."""
        for work in self.works:
            prompts = work.prompts(0, self.model.prompts)
            steps = self.options.profile_steps
            asked: tuple[str, dict[str, Any]] = ("profile", {"prompts": prompts, "steps": steps})
            if work.measure == FIRST_TOKEN:
                asked = "profile_prefill", {"prompts": prompts[:steps]}
            for seat in list(self.seats):
                with (
                    self.clock.phase(f"{work.key}, {seat.variant.name}: profile"),
                    self._left_out_if_it_breaks(seat),
                ):
                    found = seat.engine.call(asked[0], **asked[1])
                    self.result.profiles.append(
                        {"work": work.name, "variant": seat.variant.name} | found
                    )

    def check(self, keep: Callable[[Result], None] = lambda _: None) -> None:
        """End stock after its control; then check every work of one variant after the other.

        A variant's trainer takes the device when its turn comes, and variant and trainer leave it
        afterwards. `keep` gets the result after each work: what is checked survives what comes
        after.
        """
        controls = self._controls()
        if self.stock is not None:
            self._end(self.stock)
        for seat in list(self.seats):
            with (
                self.clock.phase(f"{self.name}, {seat.variant.name}: parity"),
                self._left_out_if_it_breaks(seat),
            ):
                if seat.trainer:
                    seat.trainer.call(
                        "bridge", device=self.options.device, contract=seat.started["contract"]
                    )
                self._check_seat(seat, controls, keep)
            self._end(seat)

    def _controls(self) -> dict[str, int]:
        """Stock's own mismatch on one work: the same comparison where it is expected to fail."""
        stock, work = self.stock, self.works[0]
        if stock not in self.seats or not stock.samples.get(work.key):
            return {}
        controls: dict[str, int] = {}
        with (
            self.clock.phase(f"{work.key}, stock: control"),
            self._left_out_if_it_breaks(stock),
        ):
            samples = enough(stock.samples[work.key], self.options.parity_tokens)
            found = compare(samples, stock.engine.call("score", samples=samples), None)
            controls[work.key] = found.mismatched
        return controls

    def _check_seat(
        self, seat: Seat, controls: dict[str, int], keep: Callable[[Result], None]
    ) -> None:
        # The trainer scores one work while the engine samples the next.
        waiting: tuple[Work, list[Sample], list[np.ndarray]] | None = None

        def judge() -> None:
            nonlocal waiting
            if waiting:
                work, waiting = waiting, None
                self._judge(seat, *work, controls)
                keep(self.result)

        for work in self.works:
            if not self._timed(seat, work):
                continue
            try:
                samples = self._parity_samples(seat, work)
            finally:
                judge()  # also where the engine died on this work: the last one is whole
            if seat.trainer:
                seat.trainer.send(
                    "score", samples=samples, packed_tokens=self.options.packed_tokens
                )
            waiting = work, samples, seat.engine.call("score", samples=samples)
        judge()

    def _judge(
        self,
        seat: Seat,
        work: Work,
        samples: list[Sample],
        rescored: list[np.ndarray],
        controls: dict[str, int],
    ) -> None:
        trained = seat.trainer.result() if seat.trainer else None
        found = compare(samples, rescored, trained)
        self.clock.tell(
            f"{work.key}, {seat.variant.name}: {found.mismatched} of {found.tokens} log-probs "
            f"differ, mean {found.mean_logprob:.2f}"
        )
        try:
            require(found, seat.variant, self.options.parity_tokens)
        except ParityError as error:
            self.result.refusals.append(f"{work.name}, {seat.variant.name}: {error}")
            return
        if self.stock is not None:
            self.result.rows.append(
                self._row(seat, self.stock, work, found, controls.get(work.key))
            )

    def _parity_samples(self, seat: Seat, work: Work) -> list[Sample]:
        wanted = self.options.parity_tokens
        timed = [] if work.parity else seat.samples.get(work.key, [])
        samples = enough(timed, wanted)
        tokens = work.parity[1] if work.parity else work.new_tokens
        if not seat.variant.consistent:  # a peer's mismatch is known well enough from less
            wanted = max(1, wanted // _PEER_SHARE)
            tokens = max(1, tokens // _PEER_SHARE)
        turn = 0
        while sum(len(sample.token_ids) for sample in samples) < wanted:
            outcome = seat.engine.call(
                "rollout",
                prompts=work.parity_prompts(turn, self.model.prompts),
                tokens=tokens,
                measure="throughput",
                cached=False,
            )
            samples += outcome["samples"]
            turn += 1
        return samples

    def _row(
        self, seat: Seat, stock: Seat, work: Work, found: Comparison, control: int | None
    ) -> Row:
        ours = seat.values[work.key]
        theirs = stock.values[work.key][: len(ours)]
        ratio = paired_ratio(ours, theirs)
        return {
            "work": work.name,
            "variant": seat.variant.name,
            "ratio_to_stock": ratio.median,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "interval": INTERVAL,
            "pairs": ratio.pairs,
            "slice_steps": work.slice_steps,
            "ours": statistics.median(ours),
            "stock": statistics.median(theirs),
            "rounds": [list(pair) for pair in zip(ours, theirs, strict=True)],
            "unit": work.unit,
            "lower_is_better": work.lower_is_better,
            "mismatched_tokens": found.mismatched,
            "compared_tokens": found.tokens,
            "mismatched_engine": found.engine,
            "mismatched_trainer": found.trainer,
            "stock_mismatched_tokens": control,
            "mean_logprob": found.mean_logprob,
            "stock_environment": stock.started["environment"],
            "engine_args": self.options.engine_args,
            "contract": (seat.started["report"] or {}).get("digest"),
            "runner": (seat.started["report"] or {}).get("runner"),
            "start_seconds": {
                "ours": seat.started["seconds"],
                "stock": stock.started["seconds"],
                "cache": self.options.cache_state,
            },
        }

    def close(self) -> None:
        """End all processes."""
        for seat in list(self.seats):
            self._end(seat)


def require(found: Comparison, variant: Variant, tokens: int) -> None:
    """Raise ParityError where a speed must not be reported.

    A peer's engine (stock, batch_invariant) is measured with whatever mismatch it has.
    """
    if not variant.consistent:
        return
    if found.mismatched:
        raise ParityError(
            f"{found.mismatched} of {found.tokens} log-probs differ "
            f"(engine {found.engine}, trainer {found.trainer}), first at {found.first}; "
            "no speed is reported"
        )
    if found.trainer is None:
        raise ParityError("no trainer scored the samples; no speed is reported")
    if found.tokens < tokens:
        raise ParityError(
            f"only {found.tokens} of {tokens} tokens were compared; no speed is reported"
        )
    if not found.mean_logprob > LEAST_LOGPROB:  # NaN has equal bits on all sides
        raise ParityError(
            f"mean log-prob {found.mean_logprob:.2f} is not above {LEAST_LOGPROB}: logits are too "
            "flat for the comparison to mean much; no speed is reported"
        )
