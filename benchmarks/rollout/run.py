"""`python -m benchmarks.rollout`: our engine against stock vLLM, resident side by side."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.clock import Clock
from benchmarks.common.record import provenance
from benchmarks.common.rows import Row, merge_into
from benchmarks.rollout import models
from benchmarks.rollout.models import Checkpoint, checkpoint
from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.session import (
    ModelSession,
    Options,
    Result,
    engine_arguments,
)
from benchmarks.rollout.variants import VARIANTS, variants
from benchmarks.rollout.works import WORKS, Work, chosen, tiny
from consistent_kernels.errors import ConfigurationError, ConsistencyError, invalid
from vllm_consistent.cli import exit_codes

KEY = ("work", "variant")
"""Rows of equal values here replace each other in a result file."""

_ENGINE_OVERHEAD = 5 << 30
"""Bytes of an engine beside weights and pages: activations, graphs, workspaces, context."""

_MEMORY_SHARE = 0.97
_CHECKPOINT_ROOM = 40 << 30

app = typer.Typer(add_completion=False)


def waves(
    sessions: Sequence[ModelSession], found: Sequence[Checkpoint], free: int
) -> list[list[int]]:
    """Group sessions, in order, so that the engines of a group fit into `free` bytes together.

    Raises:
        ConfigurationError: one session alone does not fit.
    """
    groups: list[list[int]] = []
    room = 0
    for index, (session, model) in enumerate(zip(sessions, found, strict=True)):
        arguments = engine_arguments(session.works, model, session.options.device)
        pages = (arguments | session.options.engine_args)["kv_cache_memory_bytes"]
        each = model.weight_bytes + pages + _ENGINE_OVERHEAD
        needs = each * len(session.options.variants)
        if needs > free:
            raise ConfigurationError(
                [
                    f"{session.name}: {len(session.options.variants)} engines of "
                    f"{each / 1e9:.0f} GB do not fit into {free / 1e9:.0f} GB; name fewer works "
                    "or variants in one run"
                ],
                "benchmarks.rollout",
            )
        if needs > room:
            groups.append([])
            room = free
        groups[-1].append(index)
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
    """Run the sessions of all works' models; `keep` gets each session's result at its end."""
    names = list(dict.fromkeys(work.model for work in works))
    sessions = [
        ModelSession([work for work in works if work.model == name], options, clock)
        for name in names
    ]
    total = Result()
    try:
        for session in sessions:
            session.launch()
        found = []
        for name in names:
            with clock.phase(f"{name}: checkpoint"):
                found.append(checkpoint(name, scratch, shapes=shapes, real=real, notify=clock.tell))
        for group in waves(sessions, found, _free(options.device)):
            together = ", ".join(names[index] for index in group)
            with clock.phase(f"{together}: start engines"):
                for index in group:
                    sessions[index].begin(found[index])
                for index in group:
                    sessions[index].settle()
            for index in group:
                _one(sessions[index], options, total, keep)
    finally:
        for session in sessions:
            session.close()
    return total


def _one(session: ModelSession, options: Options, total: Result, keep: Any) -> None:
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
    for field in dataclasses.fields(Result):
        getattr(total, field.name).extend(getattr(session.result, field.name))


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
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
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

    All engines of a model are resident, each in its own process; one runs while the others idle,
    in the order A B B A. A speed is reported only where every compared log-prob has the bits of
    the engine's own score and of the bridged trainer's.

    Exit codes: 0 all reported, 1 a speed is not reported because parity failed, 2 bad arguments,
    3 an engine did not start or died (the others are kept).
    """
    if list_works:
        for item in WORKS:
            typer.echo(f"{item.key:18} {item.name} [{item.unit}]")
        return
    folder = scratch or Path(tempfile.mkdtemp(prefix="rollout-", dir=_roomy()))
    try:
        works = [tiny(item) if tiny_size else item for item in chosen(work or ())]
        wanted = variants(variant or ["consistent"], with_stock=not parity_only)
        if not tiny_size and not torch.cuda.is_available():
            raise ConfigurationError(["no CUDA device is there; use --tiny on a CPU"], "benchmark")
        source = provenance(commit)
        options = Options(
            variants=wanted,
            pairs=0 if parity_only else pairs,
            warmups=warmups,
            parity_tokens=parity_tokens,
            device="cuda" if torch.cuda.is_available() else "cpu",
            engine_args=engine_options(engine_arg or ()),
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
        result = measure(works, options, clock, folder / "models", shapes, model_path, keep)
    except ProcessError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.FAILED) from error
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error
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
