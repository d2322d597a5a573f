"""`python -m benchmarks.rollout`: our engine against stock vLLM, resident side by side."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.clock import Clock
from benchmarks.common.record import provenance
from benchmarks.common.rows import Row, merge_into, require_mergeable
from benchmarks.common.stats import require_pairs, require_tokens
from benchmarks.rollout import models
from benchmarks.rollout.models import Checkpoint, checkpoint
from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.session import (
    ModelSession,
    Options,
    Result,
    engine_arguments,
)
from benchmarks.rollout.stock import startable
from benchmarks.rollout.variants import STOCK, VARIANTS, Variant, variants
from benchmarks.rollout.works import WORKS, Work, chosen, tiny
from consistent_kernels.errors import ConfigurationError, ConsistencyError, invalid
from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.interrupts import interruptible

KEY = ("work", "variant")
"""Rows of equal values here replace each other in a result file."""

_ENGINE_OVERHEAD = 5 << 30
"""Bytes of an engine beside weights and pages: activations, graphs, workspaces, context."""

_TRAINER_OVERHEAD = 10 << 30
"""Bytes of a trainer beside its weights: activations of the longest sequence, context."""

_MEMORY_SHARE = 0.97
_CHECKPOINT_ROOM = 40 << 30

app = typer.Typer(add_completion=False)


@dataclasses.dataclass(frozen=True)
class Load:
    """Device memory of one model's works, in bytes.

    Attributes:
        name: of the model.
        engine: one engine.
        trainer: one trainer; one at a time is there, after stock has ended.
    """

    name: str
    engine: int
    trainer: int


def load(works: Sequence[Work], model: Checkpoint, options: Options) -> Load:
    """Return what engines and trainer of the works' model take."""
    arguments = engine_arguments(works, model, options.device) | options.engine_args
    engine = model.weight_bytes + arguments["kv_cache_memory_bytes"] + _ENGINE_OVERHEAD
    return Load(works[0].model, engine, model.weight_bytes + _TRAINER_OVERHEAD)


def seatings(one: Load, wanted: Sequence[Variant], free: int) -> list[list[Variant]]:
    """Cut the variants into groups that fit into `free` bytes, each beside a stock engine.

    Raises:
        ConfigurationError: not even one variant fits (with stock, where stock is wanted).
    """
    stock = [variant for variant in wanted if variant.name == STOCK]
    others = [variant for variant in wanted if variant.name != STOCK]
    most = min(free // one.engine - len(stock), (free - one.trainer) // one.engine)
    if most < 1:
        raise ConfigurationError(
            [
                f"{one.name}: {len(stock) + 1} engines of {one.engine / 1e9:.0f} GB, or one and a "
                f"trainer of {one.trainer / 1e9:.0f} GB, do not fit into {free / 1e9:.0f} GB; name "
                "fewer works in one run"
            ],
            "benchmarks.rollout",
        )
    return [[*stock, *others[start : start + most]] for start in range(0, len(others), most)]


def waves(
    loads: Sequence[Load], wanted: Sequence[Variant], free: int
) -> list[list[tuple[int, list[Variant]]]]:
    """Group engines, in order, so that those of a group fit into `free` bytes together.

    Returns:
        For each group (index of the model, its variants there).

    Raises:
        ConfigurationError: the smallest seating of a model does not fit.
    """
    groups: list[list[tuple[int, list[Variant]]]] = []
    room = 0
    for index, one in enumerate(loads):
        for seating in seatings(one, wanted, free):
            needs = one.engine * len(seating)
            again = bool(groups) and any(index == other for other, _ in groups[-1])
            if needs > room or again:
                groups.append([])
                room = free
            groups[-1].append((index, seating))
            room -= needs
    return groups


def measure(
    works: Sequence[Work],
    options: Options,
    clock: Clock,
    scratch: Path,
    shapes: dict[str, models.Shape | None],
    real: Path | None,
    keep: Any,
) -> Result:
    """Run the sessions of all works' models; `keep` gets a session's result whenever it grows.

    Memory is planned before any engine starts. Where a session's stock engine does not start, the
    other sessions are run all the same.
    """
    names = list(dict.fromkeys(work.model for work in works))
    parts = [[work for work in works if work.model == name] for name in names]
    found = []
    for name in names:
        with clock.phase(f"{name}: checkpoint"):
            found.append(checkpoint(name, scratch, shapes=shapes, real=real, notify=clock.tell))
    loads = [load(part, model, options) for part, model in zip(parts, found, strict=True)]
    planned = waves(loads, options.variants, _free(options.device))
    for wave in planned:
        for index, seating in wave:
            engines = ", ".join(variant.name for variant in seating)
            clock.tell(f"{names[index]}: {engines}, {loads[index].engine / 1e9:.0f} GB an engine")
    total = Result()
    runs: dict[str, int] = {}
    for wave in planned:
        sessions = []
        for index, seating in wave:
            runs[names[index]] = run = runs.get(names[index], 0) + 1
            quantized = isinstance(shapes[names[index]], models.Fp8MoeShape)
            told = dataclasses.replace(options, variants=startable(seating, quantized))
            if run > 1:  # stock has compiled by now, the variants have not
                told = dataclasses.replace(told, cache_state=f"{options.cache_state}, stock's warm")
            name = names[index] if run == 1 else f"{names[index]}-{run}"
            sessions.append((index, ModelSession(parts[index], told, clock, name)))
        try:
            with clock.phase(f"{', '.join(one.name for _, one in sessions)}: start engines"):
                for index, session in sessions:
                    session.launch()
                    session.begin(found[index])
                for _, session in sessions:
                    session.settle()
            for _, session in sessions:
                if session.seats:
                    _one(session, options, keep)
        finally:
            for _, session in sessions:
                session.close()
                _gather(total, session.result)
    return total


def _gather(total: Result, result: Result) -> None:
    for field in dataclasses.fields(Result):
        getattr(total, field.name).extend(getattr(result, field.name))


def _one(session: ModelSession, options: Options, keep: Any) -> None:
    with session.clock.phase(f"{session.name}: first samples"):
        session.smoke()
    if options.pairs:
        session.time()
    if options.profile_steps:
        session.profile()
        keep(session.result)
    session.check(keep)
    session.close()
    keep(session.result)


def _free(device: str) -> int:
    if device == "cpu":
        return 1 << 62
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0] * _MEMORY_SHARE)


def table(rows: Sequence[Row]) -> Table:
    """Return the rows for a terminal."""
    shown = Table("work", "variant", "ours", "stock", "unit", "ratio", "95%", "differing")
    for row in rows:
        shown.add_row(
            row["work"],
            row["variant"],
            f"{row['ours']:.5g}",
            f"{row['stock']:.5g}",
            row["unit"],
            f"{row['ratio_to_stock']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{row['mismatched_tokens']} of {row['compared_tokens']}",
        )
    return shown


def engine_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=JSON pairs.

    Raises:
        InvalidInputError: no `=`, or a value that is no JSON.
    """
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            parsed[name] = json.loads(text)
        except ValueError as error:
            raise invalid("benchmarks.rollout", "--engine-arg", "NAME=JSON", pair) from error
        if not equals or not name:
            raise invalid("benchmarks.rollout", "--engine-arg", "NAME=JSON", pair)
    return parsed


def _environment(cache: Path) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are taken in turn, and profiled
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }


def _cache_state(cache: Path) -> str:
    compiled = cache / "vllm" / "torch_compile_cache"
    return "warm" if compiled.is_dir() and any(compiled.iterdir()) else "cold"


@app.command()
def main(
    work: Annotated[
        list[str] | None,
        typer.Option(help="work or model to measure; repeat it. All by default. See --list."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"engine beside stock; repeat it: {', '.join(list(VARIANTS)[1:])}"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--json", help="merge the rows into this JSON list")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="merge where the time of a decode step or a first token goes into this list"
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=2, help="timed rounds of each work")] = 5,
    peer_pairs: Annotated[
        int,
        typer.Option(
            min=2, help="rounds that variants other than consistent take part in, at most --pairs"
        ),
    ] = 5,
    warmups: Annotated[int, typer.Option(min=0, help="rounds before them")] = 1,
    parity_tokens: Annotated[
        int, typer.Option(min=1, help="sampled tokens to compare for each work")
    ] = 16_384,
    parity_only: Annotated[
        bool, typer.Option(help="start no stock engine and time nothing; only check")
    ] = False,
    model_path: Annotated[
        Path | None, typer.Option(help="folder of SmolLM2; by default it is converted once")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="folder for checkpoints, caches and logs; kept")
    ] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON, a further argument of every engine")
    ] = None,
    tiny_size: Annotated[
        bool,
        typer.Option("--tiny", help="tiny models and works, to test this command"),
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="hash of the sources, where this is no git checkout")
    ] = None,
    list_works: Annotated[bool, typer.Option("--list", help="print the works and stop")] = False,
) -> None:
    """Measure rollout speed against stock vLLM and check every sampled log-prob's bits.

    Stock and the variants of a model are resident together, each in its own process, as many as
    memory holds (further variants follow with a stock engine of their own); one runs while the
    others idle, in the order A B B A. Rows are written as they are checked. A speed is reported
    only where every compared log-prob has the bits of the engine's own score and of the bridged
    trainer's.

    Exit codes: 0 all reported, 1 a speed is not reported because parity failed, 2 bad arguments,
    3 an engine or the benchmark died (what was checked is kept), 130 interrupted (likewise).
    """
    if list_works:
        for item in WORKS:
            typer.echo(f"{item.key:18} {item.name} [{item.unit}]")
        return
    try:
        if out is not None and not (tiny_size or parity_only):
            require_pairs("benchmarks.rollout", min(pairs, peer_pairs))
            require_tokens("benchmarks.rollout", "--parity-tokens", parity_tokens)
        works = [tiny(item) if tiny_size else item for item in chosen(work or ())]
        wanted = variants(variant or ["consistent"], with_stock=not parity_only)
        if not tiny_size and not torch.cuda.is_available():
            raise ConfigurationError(["no CUDA device is there; use --tiny on a CPU"], "benchmark")
        source = provenance(commit)
        require_mergeable([path for path in (out, profile) if path], source.hardware)
        further = engine_options(engine_arg or ())
        folder = scratch or Path(tempfile.mkdtemp(prefix="rollout-", dir=_roomy()))
        options = Options(
            variants=wanted,
            pairs=0 if parity_only else pairs,
            peer_pairs=0 if parity_only else min(pairs, peer_pairs),
            warmups=warmups,
            parity_tokens=parity_tokens,
            device="cuda" if torch.cuda.is_available() else "cpu",
            engine_args=further,
            packed_tokens=16_384,
            environment=_environment(folder / "cache"),
            logs=folder / "logs",
            profile_steps=8 if profile else 0,
            cache_state=_cache_state(folder / "cache"),
        )
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error
    clock = Clock(lambda text: typer.echo(text, err=True))

    def keep(result: Result) -> None:
        for path, rows in ((out, result.rows), (profile, result.profiles)):
            if path is not None:
                merge_into(path, [row | source.to_dict() for row in rows], KEY)

    shapes = models.TINY_MODELS if tiny_size else models.MODELS
    try:
        with interruptible():
            result = measure(works, options, clock, folder / "models", shapes, model_path, keep)
    except KeyboardInterrupt as error:
        raise typer.Exit(exit_codes.INTERRUPTED) from error
    except ProcessError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.FAILED) from error
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error
    except Exception as error:
        traceback.print_exc()  # Python would end with 1, which means a mismatch here
        raise typer.Exit(exit_codes.FAILED) from error
    finally:
        if scratch is None:
            shutil.rmtree(folder, ignore_errors=True)
        for line in clock.summary():
            typer.echo(line, err=True)
    Console().print(table(result.rows))
    for line in (*result.refusals, *result.broken):
        typer.echo(line, err=True)
    if result.refusals:
        raise typer.Exit(exit_codes.MISMATCH)
    if result.broken:
        raise typer.Exit(exit_codes.FAILED)


def _roomy() -> str | None:
    """Return a memory-backed folder with room: checkpoints are read from there fastest."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > _CHECKPOINT_ROOM
    return str(shared) if roomy else None
