"""`python -m benchmarks.table`: write the README's tables from `benchmarks/results/*.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.record import ROOT
from benchmarks.common.rows import Row, read_rows
from benchmarks.rollout.variants import OURS
from benchmarks.rollout.works import WORKS, Work
from benchmarks.train.aims import MEMORY_AIM, TIME_AIM
from consistent_kernels.errors import ConsistencyError, invalid
from vllm_consistent.cli import exit_codes

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"

app = typer.Typer(add_completion=False)


def block(results: Path) -> str:
    """Return the text between the markers; empty where there is no result."""
    parts = [
        _rollout(read_rows(results / "rollout_h200.json")),
        _train(read_rows(results / "train_h200.json")),
        _ops(read_rows(results / "ops_h200.json")),
    ]
    return "\n".join(part for part in parts if part)


def replaced(text: str, inner: str) -> str:
    """Return `text` with what stands between its markers replaced by `inner`.

    Raises:
        InvalidInputError: the markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise invalid("benchmarks.table", "README", f"one {BEGIN} and one {END} behind it", "none")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    middle = f"\n{inner}\n" if inner else "\n"
    return f"{before}{BEGIN}{middle}{END}{after}"


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _source(rows: Sequence[Row]) -> str:
    """One line: where the rows come from, each machine with its versions and commits once."""
    sources: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        commits = sources.setdefault((row["hardware"], _version(row)), {})
        commits[_commit(row["commit"])] = None
    return "; ".join(
        f"{where}, {version}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
        for (where, version), commits in sources.items()
    )


def _commit(text: str) -> str:
    """Ten digits, and what says that the tree held changes."""
    digits, dash, changed = text.partition("-")
    return f"{digits[:10]}{dash}{changed}"


def _version(row: Row) -> str:
    versions = row["versions"]
    names = [name for name in ("vllm", "torch", "triton") if name in versions]
    return ", ".join(f"{name} {versions[name]}" for name in names)


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit == "tokens/s" and value >= 1000 else f"{value:,.3g}"


SLACK = 0.02
"""How far an interval may go beyond the aim of its median."""

LEGEND = (
    f"An aim is met where the median reaches it and the interval ends at most {SLACK} beyond it. "
    "`consistent` and `triton` are reported only with 0 differing log-probs, against the engine's "
    "own score and the trainer's; `batch_invariant` is vLLM's, with what its own score differs in."
)


def _aim(row: Row, aims: dict[str, Work]) -> str:
    """The aim of our row and whether it is met; "" where none was set."""
    work = aims.get(row["work"])
    if work is None or work.aim is None or row["variant"] != OURS:
        return ""
    if work.lower_is_better:
        text, sign, end = f"at most {work.aim}", -1, row["ratio_high"]
    else:
        text, sign, end = f"at least {work.aim}", 1, row["ratio_low"]
    if sign * row["ratio_to_stock"] < sign * work.aim:
        return f"{text}: not met"
    if sign * end < sign * work.aim - SLACK:
        return f"{text}: by the median alone"
    return f"{text}: met"


def _named(row: Row) -> str:
    """The work, and what the engines were told beside their usual arguments."""
    told = row.get("engine_args") or {}
    further = "".join(f", {name}={json.dumps(value)}" for name, value in told.items())
    return row["work"] + further


def _rollout(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    order = {work.name: index for index, work in enumerate(WORKS)}
    works = {work.name: work for work in WORKS}
    lines = [
        [
            _named(row),
            row["variant"],
            f"{row['ratio_to_stock']:.3f}",
            _aim(row, works),
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{_number(row['ours'], row['unit'])} {row['unit']}",
            f"{_number(row['stock'], row['unit'])} {row['unit']}",
            f"{row['mismatched_tokens']:,} of {row['compared_tokens']:,}",
        ]
        for row in sorted(
            rows, key=lambda row: (order.get(row["work"], len(order)), row["variant"])
        )
    ]
    header = ("rollout", "engine", "ratio", "aim", "95%", "its", "stock's", "differing log-probs")
    return _markdown(header, lines) + f"\n{LEGEND}\n\n{_source(rows)}.\n"


def _train(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        [
            row["work"],
            f"{row['stock_logprobs']} logits",
            f"{row['ratio_to_stock']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{row['ours']:.2f} s",
            f"{row['stock']:.2f} s",
            f"{row['peak_memory_ratio']:.3f}" if row["peak_memory_ratio"] else "",
        ]
        for row in rows
    ]
    header = (
        "training",
        "stock with",
        f"time ratio, aim {TIME_AIM:.2f}",
        "95%",
        "ours",
        "stock's",
        f"memory ratio, aim {MEMORY_AIM:.2f}",
    )
    return _markdown(header, lines) + f"\n{_source(rows)}.\n"


def _ops(rows: Sequence[Row]) -> str:
    """Per op and program, the range of its ratios; the file has every shape."""
    timed = [row for row in rows if row["relations_ok"] and row["ratio_to_stock"]]
    if not timed:
        return ""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in timed:
        groups.setdefault((row["op"], row["impl"]), []).append(row)
    lines = []
    for (op, impl), members in sorted(groups.items()):
        ratios = [row["ratio_to_stock"] for row in members]
        worst = max(members, key=lambda row: row["ratio_to_stock"])
        lines.append(
            [op, impl, str(len(members)), f"{min(ratios):.2f}", f"{max(ratios):.2f}",
             worst["shape"]]
        )  # fmt: skip
    header = ("op", "program", "shapes", "least time ratio", "largest", "at")
    return _markdown(header, lines) + f"\n{_source(timed)}.\n"


@app.command()
def main(
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit 1 if the README is out of date")
    ] = False,
    results: Annotated[Path, typer.Option(help="folder of the JSON files")] = RESULTS,
    readme: Annotated[Path, typer.Option(help="file with the markers")] = README,
) -> None:
    """Write the tables of `benchmarks/results` into the README, between its markers.

    Exit codes: 0 up to date or written, 1 out of date (with --check), 2 a file is not usable.
    """
    try:
        old = readme.read_text()
        new = replaced(old, block(results))
    except (OSError, KeyError, ConsistencyError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(exit_codes.USAGE) from error
    if check:
        if new != old:
            typer.echo(f"{readme} is out of date; run python -m benchmarks.table", err=True)
            raise typer.Exit(exit_codes.MISMATCH)
        return
    if new != old:
        readme.write_text(new)
