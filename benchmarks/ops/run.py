"""`python -m benchmarks.ops`: measure the ops that have a case file; write rows."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.record import Provenance, provenance
from benchmarks.common.rows import Row, merge_into
from benchmarks.ops.case import Case, Setting, case_modules, cases_of
from benchmarks.ops.timing import interleaved_us
from consistent_kernels.errors import ConsistencyError, NumericsError
from vllm_consistent.cli import exit_codes

KEY = ("op", "shape", "impl")
"""Rows of equal values here replace each other in a result file."""

AIM = 1.10
"""Slower than this against stock, a row should say why."""

app = typer.Typer(add_completion=False)


@dataclasses.dataclass
class Outcome:
    """Rows so far and what went wrong.

    Attributes:
        rows: one for each case, refused ones included.
        failed: op to traceback, where a case raised anything but a failed relation.
    """

    rows: list[Row]
    failed: dict[str, str]

    @property
    def refused(self) -> list[Row]:
        """Rows of cases whose relations fail: they carry no time."""
        return [row for row in self.rows if not row["relations_ok"]]


def measure_case(
    case: Case,
    setting: Setting,
    repeats: int,
    relation: Callable[[Callable[[], None]], str | None],
) -> Row:
    """Return the row of one case, without times where its relations fail."""
    row: Row = {"op": case.op, "shape": case.shape, "impl": case.impl}
    broken = relation(case.relations)
    ours = stock = None
    if broken is None:
        ours, stock = interleaved_us(
            case.ours, case.stock, device=setting.device, repeats=repeats, graph=case.graph
        )
    return row | {
        "ours_us": ours,
        "stock_us": stock,
        "ratio_to_stock": ours / stock if ours and stock else None,
        "relations_ok": broken is None,
        "reason": case.reason if broken is None else broken,
        "timing": ("cuda graph" if case.graph else "eager") if setting.device == "cuda" else "cpu",
        "repeats": repeats,
    }


def measure(
    modules: list[Any],
    setting: Setting,
    repeats: int,
    source: Provenance,
    tell: Callable[[str], None],
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> Outcome:
    """Measure every case of `modules`; an op that breaks does not stop the others.

    Args:
        modules: case files.
        setting: device and size.
        repeats: timed calls of each side.
        source: hardware, versions, commit of the rows.
        tell: told each case as it is done.
        keep: given each row as it is measured, so that an interruption loses one case at most.
    """
    outcome = Outcome([], {})
    for module in modules:
        relation = functools.cache(_broken)  # per op: it holds the op's tensors
        begin = time.perf_counter()
        try:
            for case in cases_of(module, setting):
                row = measure_case(case, setting, repeats, relation) | source.to_dict()
                outcome.rows.append(row)
                keep([row])
                tell(_line(row))
                del case
                gc.collect()
        except Exception:
            outcome.failed[module.OP] = traceback.format_exc()
            tell(f"{module.OP}: failed\n{outcome.failed[module.OP]}")
        tell(f"{module.OP}: {time.perf_counter() - begin:.1f} s")
        del relation
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return outcome


def _broken(check: Callable[[], None]) -> str | None:
    try:
        check()
    except (AssertionError, NumericsError) as error:
        # NumericsError: a start-up probe found what the relation would.
        return f"relation fails: {error}"
    return None


def _line(row: Row) -> str:
    name = f"{row['op']} [{row['impl']}] {row['shape']}"
    if not row["relations_ok"]:
        return f"{name}: refused, {row['reason']}"
    stock = f"stock {row['stock_us']:.1f} us" if row["stock_us"] else f"no stock: {row['reason']}"
    return f"{name}: ours {row['ours_us']:.1f} us, {stock}"


def table(rows: list[Row]) -> Table:
    """Return the rows for a terminal."""
    shown = Table("op", "impl", "shape", "ours us", "stock us", "ratio", "note")
    for row in rows:
        if not row["relations_ok"]:
            shown.add_row(row["op"], row["impl"], row["shape"], "refused", "", "", row["reason"])
            continue
        ratio, stock = row["ratio_to_stock"], row["stock_us"]
        note = row["reason"] or ("slower, no reason given" if ratio and ratio > AIM else "")
        shown.add_row(
            row["op"],
            row["impl"],
            row["shape"],
            f"{row['ours_us']:.1f}",
            f"{stock:.1f}" if stock else "",
            f"{ratio:.3f}" if ratio else "",
            note,
        )
    return shown


@app.command()
def main(
    op: Annotated[
        list[str] | None, typer.Option(help="case file to run; repeat it. All by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--json", help="merge the rows into this JSON list")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    small: Annotated[bool, typer.Option(help="tiny shapes, to test a case file")] = False,
    repeats: Annotated[int, typer.Option(min=2, help="timed calls of each side")] = 50,
    commit: Annotated[
        str | None, typer.Option(help="hash of the sources, where this is no git checkout")
    ] = None,
) -> None:
    """Time ops against stock's kernels, interleaved; an op whose relations fail gets no time.

    Exit codes: 0 all measured, 1 relations failed (those ops are refused), 2 bad arguments,
    3 a case broke (the others are kept).
    """
    console = Console()
    try:
        if device not in ("cuda", "cpu"):
            raise typer.BadParameter(f"--device is {device!r}; use cuda or cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise typer.BadParameter("--device cuda, but no CUDA device is there")
        modules = case_modules(op or ())
        source = provenance(commit)
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error

    def keep(rows: list[Row]) -> None:
        if out is not None:
            merge_into(out, rows, KEY)

    outcome = measure(
        modules,
        Setting(device, small),
        repeats,
        source,
        functools.partial(typer.echo, err=True),
        keep,
    )
    console.print(table(outcome.rows))
    for row in outcome.refused:
        typer.echo(f"refused: {row['op']} {row['shape']}: {row['reason']}", err=True)
    if outcome.failed:
        typer.echo(f"failed: {', '.join(outcome.failed)}", err=True)
        raise typer.Exit(exit_codes.FAILED)
    if outcome.refused:
        raise typer.Exit(exit_codes.MISMATCH)
