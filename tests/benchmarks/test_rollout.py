"""The rollout benchmark without engines: order, refusals, rows, works, memory, arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.common.clock import Clock
from benchmarks.rollout import run, session
from benchmarks.rollout.models import Checkpoint
from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.prompts import RandomPrompts
from benchmarks.rollout.samples import Sample, compare, enough
from benchmarks.rollout.session import ModelSession, Options
from benchmarks.rollout.variants import STOCK, VARIANTS, variants
from benchmarks.rollout.works import WORKS, chosen, tiny
from consistent_kernels.errors import InvalidInputError

PROMPTS = RandomPrompts(1280)
MODEL = Checkpoint(Path("somewhere"), PROMPTS, weight_bytes=1000, kv_bytes=64)
LOGPROB = np.float32(-0.7)
NEXT = np.nextafter(LOGPROB, np.float32(0))


class Fake:
    """Stands for an engine's or a trainer's process; `faults` names what goes wrong.

    Faults: (variant, role, method) -> "one bit" flips a score, an exception is raised,
    of a list the last entry is taken.
    """

    faults: ClassVar[dict[tuple[str, str, str], Any]] = {}
    calls: ClassVar[list[tuple[str, str]]] = []
    logprob: ClassVar[np.float32] = LOGPROB

    def __init__(self, name: str, module: str, environment: dict[str, str], logs: Path) -> None:
        role = "trainer" if name.endswith("-trainer") else "engine"
        self.variant = name.removesuffix("-trainer").rpartition("-")[2]
        self.role = role
        self.environment = environment
        self.answers: list[Any] = []
        self.closed = False

    def send(self, method: str, **arguments: Any) -> None:
        self.answers.append((method, arguments))

    def result(self) -> Any:
        method, arguments = self.answers.pop(0)
        Fake.calls.append((self.variant, method))
        fault = self.faults.get((self.variant, self.role, method))
        if isinstance(fault, list):
            fault = fault.pop()
        if isinstance(fault, Exception):
            raise fault
        return getattr(self, method)(fault, **arguments)

    def call(self, method: str, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.result()

    def close(self) -> None:
        self.closed = True

    def prepare(self, fault: Any) -> None:
        return None

    def load(self, fault: Any, model: str) -> None:
        return None

    def bridge(self, fault: Any, device: str, contract: Any) -> None:
        return None

    def start(self, fault: Any, model: str, arguments: Any, consistent: bool) -> dict[str, Any]:
        report = {"digest": "d1", "runner": "V2"} if consistent else None
        started = {"seconds": 30.0, "contract": {"name": "made up"}, "report": report}
        return started | {"environment": {"VLLM_OF": self.variant}}

    def rollout(
        self, fault: Any, prompts: Any, tokens: int, measure: str, cached: bool
    ) -> dict[str, Any]:
        scores = np.full(tokens, self.logprob, np.float32)
        samples = [Sample(ids, [5] * tokens, scores) for ids in prompts]
        return {"value": 80.0 if self.variant != STOCK else 100.0, "samples": samples}

    def score(self, fault: Any, samples: list[Sample], **options: Any) -> list[np.ndarray]:
        scores = [sample.logprobs.copy() for sample in samples]
        if fault == "one bit":
            scores[-1][-1] = np.nextafter(scores[-1][-1], np.float32(0))
        return scores

    def profile(self, fault: Any, prompts: Any, steps: int) -> dict[str, Any]:
        return {"steps": steps, "kernels": []}

    def profile_prefill(self, fault: Any, prompts: Any) -> dict[str, Any]:
        return {"steps": len(prompts), "kernels": []}


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Process", Fake)
    monkeypatch.setattr(Fake, "faults", {})
    monkeypatch.setattr(Fake, "calls", [])
    monkeypatch.setattr(Fake, "logprob", LOGPROB)


def options(*names: str, **fields: Any) -> Options:
    given: dict[str, Any] = {
        "variants": variants(list(names) or ["consistent"], with_stock=True),
        "pairs": 3,
        "peer_pairs": 3,
        "warmups": 1,
        "parity_tokens": 8,
        "device": "cpu",
        "engine_args": {},
        "packed_tokens": 64,
        "environment": {},
        "logs": Path("logs"),
        "profile_steps": 0,
        "cache_state": "cold",
    }
    return Options(**(given | fields))


def finished(
    *keys: str, told: Options | None = None, keep: Any = lambda result: None
) -> ModelSession:
    """Run a session of tiny works on fakes."""
    works = [tiny(work) for work in chosen(keys or ("qwen3_0_6b.256",))]
    return run_through(ModelSession(works, told or options(), Clock(lambda text: None)), keep)


def run_through(made: ModelSession, keep: Any = lambda result: None) -> ModelSession:
    made.launch()
    made.begin(MODEL)
    made.settle()
    made.smoke()
    made.time()
    made.check(keep)
    made.close()
    return made


def dies_after(variant: str, method: str, calls: int) -> None:
    """Let an engine answer `calls` calls of a method and die in the next one."""
    Fake.faults[(variant, "engine", method)] = [ProcessError("it died")] + [None] * calls


def test_rows_hold_what_the_table_needs() -> None:
    result = finished().result
    assert result.refusals == []
    (row,) = result.rows
    assert row["ratio_to_stock"] == row["ratio_low"] == row["ratio_high"] == pytest.approx(0.8)
    assert (row["ours"], row["stock"], row["unit"], row["pairs"]) == (80.0, 100.0, "tokens/s", 3)
    assert (row["mismatched_tokens"], row["stock_mismatched_tokens"]) == (0, 0)
    assert (row["contract"], row["runner"]) == ("d1", "V2")
    assert (row["stock_environment"], row["engine_args"]) == ({"VLLM_OF": STOCK}, {})
    assert row["compared_tokens"] >= 8
    assert row["mean_logprob"] == pytest.approx(float(LOGPROB))
    assert row["start_seconds"] == {"ours": 30.0, "stock": 30.0, "cache": "cold"}


def test_engines_take_turns_forwards_and_backwards() -> None:
    finished(told=options("consistent", "batch_invariant", warmups=0))
    timed = [variant for variant, method in Fake.calls if method == "rollout"][1:]  # first: smoke
    forwards = [STOCK, "consistent", "batch_invariant"]
    assert timed[:9] == [*forwards, *forwards[::-1], *forwards]


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_one_differing_bit_refuses_the_speed(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if role == "engine":  # let the first samples pass, so that the last check is what refuses
        monkeypatch.setattr(ModelSession, "smoke", lambda self: None)
    Fake.faults[("consistent", role, "score")] = "one bit"
    result = finished().result
    assert result.rows == []
    (line,) = result.refusals
    assert "1 of 12 log-probs differ" in line
    assert f"{role} 1" in line
    assert f"first at request 1, token 5: sampled {LOGPROB.item()!r}" in line
    assert f"{role} {NEXT.item()!r}" in line
    assert "no speed is reported" in line


def test_differing_first_samples_stop_the_engine_before_it_is_timed() -> None:
    Fake.faults[("consistent", "engine", "score")] = "one bit"
    result = finished().result
    assert result.rows == []
    assert "nothing was timed" in result.refusals[0]
    assert [call for call in Fake.calls if call == ("consistent", "rollout")] == [
        ("consistent", "rollout")
    ]


def test_flat_logits_refuse_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "logprob", np.float32(-3.0))
    result = finished().result
    assert result.rows == []
    assert "too flat" in result.refusals[0]


def test_a_peer_is_measured_with_its_mismatch() -> None:
    Fake.faults[("batch_invariant", "engine", "score")] = "one bit"
    rows = {
        row["variant"]: row
        for row in finished(told=options("consistent", "batch_invariant")).result.rows
    }
    assert rows["batch_invariant"]["mismatched_tokens"] == 1
    assert rows["batch_invariant"]["mismatched_trainer"] is None
    assert rows["consistent"]["mismatched_tokens"] == 0


def test_too_few_tokens_are_topped_up() -> None:
    told = options(parity_tokens=200)
    (row,) = finished("qwen3_0_6b.1", told=told).result.rows
    assert 200 <= row["compared_tokens"] < 212


def test_a_variant_that_does_not_start_is_left_out() -> None:
    Fake.faults[("batch_invariant", "engine", "start")] = ProcessError("no such backend")
    result = finished(told=options("consistent", "batch_invariant")).result
    assert [row["variant"] for row in result.rows] == ["consistent"]
    assert "no such backend" in result.broken[0]


def test_without_stock_nothing_is_measured() -> None:
    Fake.faults[(STOCK, "engine", "start")] = ProcessError("out of memory")
    result = finished().result
    assert result.rows == []
    assert "out of memory" in result.broken[0]
    assert ("consistent", "rollout") not in Fake.calls


def test_what_was_timed_before_stock_died_is_kept() -> None:
    dies_after(STOCK, "rollout", 4)
    result = finished("qwen3_8b.256", "qwen3_8b.1").result
    assert [row["work"] for row in result.rows] == [tiny(chosen(["qwen3_8b.256"])[0]).name]
    assert len(result.broken) == 1


def test_a_work_checked_before_the_engine_died_is_kept() -> None:
    """Smoke, 2 works of 4 rounds; the engine dies where the second one's parity begins."""
    dies_after("consistent", "rollout", 9)
    kept: list[int] = []
    told = options(parity_tokens=30)
    result = finished(
        "qwen3_8b.256", "qwen3_8b.1", told=told, keep=lambda r: kept.append(len(r.rows))
    ).result
    assert [row["work"] for row in result.rows] == [tiny(chosen(["qwen3_8b.256"])[0]).name]
    assert kept == [1]
    assert "died" in result.broken[0]


def test_rows_are_kept_as_they_are_checked() -> None:
    kept: list[int] = []
    told = options("consistent", "triton", "batch_invariant")
    finished("qwen3_8b.256", "qwen3_8b.1", told=told, keep=lambda r: kept.append(len(r.rows)))
    assert kept == [1, 2, 3, 4, 5, 6]


def test_a_variant_has_left_before_the_next_ones_trainer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here: list[str] = []
    bridge, close = Fake.bridge, Fake.close

    def bridged(self: Fake, fault: Any, **arguments: Any) -> None:
        assert here == []
        here.append(self.variant)
        bridge(self, fault, **arguments)

    def closed(self: Fake) -> None:
        if self.variant in here and self.role == "trainer":
            here.remove(self.variant)
        close(self)

    monkeypatch.setattr(Fake, "bridge", bridged)
    monkeypatch.setattr(Fake, "close", closed)
    result = finished(told=options("consistent", "triton")).result
    assert [row["variant"] for row in result.rows] == ["consistent", "triton"]


def test_peers_take_part_in_fewer_rounds() -> None:
    told = options("consistent", "triton", pairs=4, peer_pairs=2, warmups=0)
    assert {row["variant"]: row["pairs"] for row in finished(told=told).result.rows} == {
        "consistent": 4,
        "triton": 2,
    }


def test_a_peer_samples_anew_for_a_part_of_the_tokens() -> None:
    told = options("consistent", "batch_invariant", parity_tokens=40)
    work = dataclasses.replace(tiny(chosen(["qwen3_8b.ttft2k"])[0]), parity=(2, 8))
    made = ModelSession([work], told, Clock(lambda text: None))
    rows = {row["variant"]: row["compared_tokens"] for row in run_through(made).result.rows}
    assert rows == {"consistent": 48, "batch_invariant": 12}


def test_stock_ends_before_the_trainer_takes_its_memory() -> None:
    made = ModelSession([tiny(chosen(["smollm2.256"])[0])], options(), Clock(lambda text: None))
    made.launch()
    made.begin(MODEL)
    made.settle()
    made.time()
    stock = made.stock.engine
    bridge = Fake.bridge

    def checked(self: Fake, fault: Any, **arguments: Any) -> None:
        assert stock.closed
        bridge(self, fault, **arguments)

    Fake.bridge = checked
    try:
        made.check()
    finally:
        Fake.bridge = bridge
    assert made.result.rows


def test_trainer_runs_in_its_engines_environment() -> None:
    made = ModelSession([tiny(WORKS[0])], options(environment={"A": "1"}), Clock(lambda text: None))
    made.launch()
    seat = next(seat for seat in made.seats if seat.variant.name == "consistent")
    assert seat.trainer.environment == seat.engine.environment
    assert seat.engine.environment == {"A": "1"} | VARIANTS["consistent"].environment


def samples(*lengths: int) -> list[Sample]:
    return [Sample([1, 2], [3] * n, np.full(n, LOGPROB, np.float32)) for n in lengths]


def test_compare_counts_bits_not_values() -> None:
    given = [Sample([1], [2, 3], np.array([0.0, np.nan], np.float32))]
    same = [np.array([0.0, np.nan], np.float32)]
    assert compare(given, same, same).mismatched == 0
    found = compare(given, [np.array([-0.0, np.nan], np.float32)], same)
    assert (found.engine, found.trainer, found.mismatched) == (1, 0, 1)
    assert found.first.startswith("request 0, token 0: sampled 0.0, engine -0.0")


def test_compare_counts_a_token_once_and_names_the_first() -> None:
    given = samples(2, 3)
    other = [sample.logprobs.copy() for sample in given]
    other[1][1] = NEXT
    found = compare(given, other, other)
    assert (found.tokens, found.engine, found.trainer, found.mismatched) == (5, 1, 1, 1)
    assert found.first.startswith("request 1, token 1")


def test_enough_is_evenly_spread_and_no_more() -> None:
    given = samples(*[10] * 8)
    assert enough(given, 20) == [given[0], given[4]]
    assert enough(given, 1000) == given
    assert enough([], 5) == []


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(run.app, list(arguments))


def tiny_arguments(folder: Path) -> tuple[str, ...]:
    work = ("--tiny", "--work", "qwen3_0_6b.1", "--parity-tokens", "12", "--commit", "4" * 40)
    return (*work, "--scratch", str(folder / "scratch"), "--out", str(folder / "rows.json"))


def test_command_writes_rows_and_profiles(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    done = invoke(*tiny_arguments(tmp_path), "--profile", str(profile))
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["commit"] == "4" * 40
    assert row["versions"]["torch"]
    assert {p["variant"] for p in json.loads(profile.read_text())} == {STOCK, "consistent"}


def test_command_exits_with_1_and_reports_no_speed(tmp_path: Path) -> None:
    Fake.faults[("consistent", "trainer", "score")] = "one bit"
    done = invoke(*tiny_arguments(tmp_path))
    assert done.exit_code == 1
    assert "no speed is reported" in done.output
    assert json.loads((tmp_path / "rows.json").read_text()) == []
    assert "0.800" not in done.output, "the ratio must not appear"


def test_command_exits_with_3_when_an_engine_breaks(tmp_path: Path) -> None:
    Fake.faults[("batch_invariant", "engine", "start")] = ProcessError("no such backend")
    both = ("--variant", "consistent", "--variant", "batch_invariant")
    done = invoke(*tiny_arguments(tmp_path), *both)
    assert done.exit_code == 3
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 1
    Fake.faults[(STOCK, "engine", "start")] = ProcessError("no memory")
    assert invoke(*tiny_arguments(tmp_path)).exit_code == 3


def test_command_seats_variants_that_do_not_fit_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_by_two(loads: Any, wanted: Any, free: int) -> Any:
        return [[(0, [wanted[0], one])] for one in wanted[1:]]

    monkeypatch.setattr(run, "waves", two_by_two)
    Fake.faults[(STOCK, "engine", "start")] = [None, ProcessError("no memory"), None]
    names = ("consistent", "triton", "batch_invariant")
    asked = [word for name in names for word in ("--variant", name)]
    done = invoke(*tiny_arguments(tmp_path), *asked)
    assert done.exit_code == 3
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["variant"] for row in rows] == ["consistent", "batch_invariant"]
    states = [row["start_seconds"]["cache"] for row in rows]
    assert states == ["cold", "cold, stock's warm"]


def test_command_checks_parity_alone(tmp_path: Path) -> None:
    done = invoke(*tiny_arguments(tmp_path), "--parity-only")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "rows.json").read_text()) == []
    assert {variant for variant, _ in Fake.calls} == {"consistent"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--work", "nonsense"], "work 'nonsense' is not supported"),
        (["--variant", "stock"], "impl 'stock' is not supported"),
        (["--engine-arg", "max_num_seqs"], "NAME=JSON"),
        (["--engine-arg", "a=b"], "NAME=JSON"),
        (["--pairs", "1"], "greater than or equal to 2"),
    ],
)
def test_command_rejects_bad_arguments(arguments: list[str], text: str) -> None:
    done = invoke("--tiny", "--commit", "5" * 40, *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.output


@pytest.mark.parametrize("few", ["--pairs", "--peer-pairs"])
def test_command_writes_no_ratio_of_fewer_than_five_pairs(tmp_path: Path, few: str) -> None:
    done = invoke("--commit", "5" * 40, "--out", str(tmp_path / "rows.json"), few, "4")
    assert done.exit_code == 2
    assert "5 or more where rows are written" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_command_without_a_gpu_says_so() -> None:
    done = invoke("--commit", "5" * 40)
    assert done.exit_code == 2
    assert "use --tiny" in done.output


def test_engine_options_are_json() -> None:
    assert run.engine_options(["a=1", 'b={"c": [1]}']) == {"a": 1, "b": {"c": [1]}}
    with pytest.raises(InvalidInputError):
        run.engine_options(["=1"])


def test_list_names_every_work() -> None:
    done = invoke("--list")
    assert all(work.key in done.output for work in WORKS)
