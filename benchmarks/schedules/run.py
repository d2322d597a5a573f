"""`python -m benchmarks.schedules`: time schedules of ours, and stock, in turn; write rows."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.common.record import Provenance, provenance
from benchmarks.common.rows import Row, merge_into
from benchmarks.ops.case import Setting
from benchmarks.ops.kernels import kernels_us
from benchmarks.ops.timing import medians_us
from benchmarks.schedules import (
    constants,
    fp8_experts,
    gather,
    grouped_linear,
    hyper_connections,
    top_k,
)
from benchmarks.schedules.group import Group
from consistent_kernels.errors import ConsistencyError
from vllm_consistent.cli import exit_codes

KEY = ("op", "shape", "variant")
"""Rows of equal values here replace each other in a result file."""

SWEEPS: dict[str, Callable[[Setting], Iterator[Group]]] = {
    "top_k": top_k.groups,
    "hyper_connections": hyper_connections.groups,
    "compressor": constants.compressors,
    "router": constants.routers,
    "gather": gather.gathers,
    "decode": gather.decodes,
    "experts": constants.experts,
    "fp8_experts": fp8_experts.groups,
    "indexer": constants.indexers,
    "grouped_linear": grouped_linear.groups,
}

app = typer.Typer(add_completion=False)


def measure(group: Group, setting: Setting, repeats: int, warm: bool = False) -> list[Row]:
    """Return a row for each variant and each kernel of stock.

    A variant whose bytes are not the chosen one's has `same_bits` false, one whose rows follow
    their number `same_rows` false; one that does not compile has `error` and no time.
    """
    first = group.result(group.chosen)
    calls, rows = dict(group.stock), []
    for name, variant in group.variants.items():
        row: Row = {"variant": name, "chosen": name == group.chosen, "same_bits": None, "us": None}
        try:
            row["same_bits"] = group.same(name, first)
            kept = group.keeps_rows(name)
            if kept is not None:
                row["same_rows"] = kept
            calls[name] = variant
        except Exception as error:  # the others are worth their time; the row says what failed
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows.append(row)
    rows += [
        {"variant": name, "chosen": False, "same_bits": None, "us": None} for name in group.stock
    ]
    times = medians_us(calls, device=setting.device, repeats=repeats)
    hot = medians_us(calls, device=setting.device, repeats=repeats, cold=False) if warm else {}
    for row in rows:
        row["us"] = times.get(row["variant"])
        if warm:
            row["warm_cache_us"] = hot.get(row["variant"])
    return [{"op": group.op, "shape": group.shape} | row for row in rows]


def sweep(
    name: str,
    setting: Setting,
    repeats: int,
    warm: bool,
    source: Provenance,
    until: float,
    keep: Callable[[list[Row]], None],
    kernels: bool = False,
) -> list[Row]:
    """Measure a sweep's groups until `time.monotonic()` passes `until`; `keep` gets each group.

    With `kernels` the kernels of each variant and of stock are printed too.
    """
    rows: list[Row] = []
    for group in SWEEPS[name](setting):
        if time.monotonic() > until:
            typer.echo(f"{name}: stopped before {group.shape}: out of time", err=True)
            break
        found = [row | source.to_dict() for row in measure(group, setting, repeats, warm)]
        keep(found)
        rows += found
        for row in found:
            mark = "" if row["same_bits"] in (True, None) else " OTHER BITS"
            mark += " ROWS DIFFER" if row.get("same_rows") is False else ""
            us = row.get("error") or f"{row['us']:.2f} us"
            chosen = " (chosen)" if row["chosen"] else ""
            typer.echo(f"{row['op']} {row['shape']} {row['variant']}{chosen}: {us}{mark}")
        if kernels:
            _print_kernels(group, found)
        del group
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def _print_kernels(group: Group, rows: list[Row]) -> None:
    timed = {row["variant"] for row in rows if row["us"] is not None}
    calls = {name: call for name, call in group.variants.items() if name in timed}
    for name, call in (calls | dict(group.stock)).items():
        typer.echo(f"kernels of {group.op} {group.shape} {name}")
        for kernel, launches, us in kernels_us(call):
            typer.echo(f"  {us:8.2f} us  {launches:.1f} x  {kernel[:120]}")


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(SWEEPS)}")] = None,
    out: Annotated[Path | None, typer.Option(help="merge the rows into this JSON list")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    small: Annotated[bool, typer.Option(help="tiny shapes, to test the sweeps")] = False,
    repeats: Annotated[int, typer.Option(min=2, help="timed calls of each variant")] = 30,
    seconds: Annotated[float, typer.Option(help="start no group after this time")] = 600.0,
    warm: Annotated[bool, typer.Option(help="time on a warm L2 cache as well")] = False,
    kernels: Annotated[
        bool, typer.Option(help="print the kernels of each variant and of stock")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="hash of the sources, where this is no git checkout")
    ] = None,
) -> None:
    """Time schedules that move no bit.

    Exit codes: 0 all measured, 1 other bits or other rows, 2 bad arguments, 3 a sweep broke.
    """
    until = time.monotonic() + seconds
    for name in only or ():
        if name not in SWEEPS:
            raise typer.BadParameter(f"--only is {name!r}; use one of {', '.join(SWEEPS)}")
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device is {device!r}; use cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda, but no CUDA device is there")
    try:
        source = provenance(commit)
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error

    def keep(rows: list[Row]) -> None:
        if out is not None:
            merge_into(out, rows, KEY)

    setting, rows, broken = Setting(device, small), [], []
    for name in only or SWEEPS:
        try:
            rows += sweep(name, setting, repeats, warm, source, until, keep, kernels)
        except Exception:  # the other sweeps go on
            broken.append(name)
            typer.echo(f"{name}: failed\n{traceback.format_exc()}", err=True)
    if broken:
        raise typer.Exit(exit_codes.FAILED)
    if any(False in (row["same_bits"], row.get("same_rows")) for row in rows):
        raise typer.Exit(exit_codes.MISMATCH)
