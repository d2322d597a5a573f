"""What the user sees while the run goes on, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

from vllm_consistent.cli.demo.metrics import STOCK, Row
from vllm_consistent.cli.demo.report import (
    COLUMNS,
    SPEED_COLUMNS,
    has_stock,
    number,
    speed_cells,
    speed_title,
    step_cells,
)

_PLAIN_WIDTH = 150
_TERMINAL_COLUMNS = COLUMNS.index("grad norm") + 1


class Display:
    """Progress on one stream, the table on another; plain lines where there is no terminal."""

    def __init__(self, progress: IO[str], result: IO[str] | None) -> None:
        self._console = _console(progress)
        self._result = _console(result) if result is not None else self._console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            Elapsed(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("Starting", total=None)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def steps(self, done: int, total: int) -> None:
        """Show how many steps are done."""
        self._progress.update(self._task, completed=done, total=total)

    def stage(self, text: str) -> None:
        """Show what goes on now."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self.note(text)

    def phase(self, text: str) -> None:
        """Show a short phase of a step; silent without a terminal."""
        self._progress.update(self._task, description=text)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step_done(self, row: Row) -> None:
        """Print the result of a step in a line."""
        wrong, total = (
            row[f"true_on_policy/{name}"] for name in ("mismatched_tokens", "num_tokens")
        )
        text = f"step {row['training/global_step']}: {wrong} of {total} tokens differ"
        if has_stock(row):
            text += (
                f" (stock {row[f'{STOCK}true_on_policy/mismatched_tokens']} of "
                f"{row[f'{STOCK}true_on_policy/num_tokens']})"
            )
        text += f", reward {number(row['critic/rewards/mean'])}"
        text += f", {number(row['perf/rollout_tokens_per_s'])} tokens/s"
        if "actor/grad_norm" in row:
            text += f", grad norm {number(row['actor/grad_norm'])}"
        self.note(text)

    def table(self, rows: Sequence[Row]) -> None:
        """Print the table of all steps on the result stream."""
        table = Table(
            title="Rollout against trainer, per step",
            header_style="bold",
            box=SIMPLE,
            padding=(0, 1),
        )
        for name in COLUMNS[:_TERMINAL_COLUMNS]:
            table.add_column(name, justify="left" if name == "step" else "right")
        for row in rows:
            table.add_row(*step_cells(row)[:_TERMINAL_COLUMNS])
            if has_stock(row):
                table.add_row(*step_cells(row, STOCK)[:_TERMINAL_COLUMNS], style="yellow")
        self._result.print(table)

    def speed(self, rates: dict[str, Any]) -> None:
        """Print how fast the two engines did equal work, on the result stream."""
        table = Table(header_style="bold", box=SIMPLE, padding=(0, 1))
        for name in SPEED_COLUMNS:
            table.add_column(name, justify="left" if name == SPEED_COLUMNS[0] else "right")
        for cells in speed_cells(rates):
            table.add_row(*cells)
        self.result(speed_title(rates))
        self._result.print(table)

    def result(self, text: str) -> None:
        """Print a line on the result stream."""
        self._result.print(text, highlight=False, markup=False, soft_wrap=True)


def _console(stream: IO[str]) -> Console:
    console = Console(file=stream)
    # A pipe has no width of its own; 80 columns would cut the table.
    return console if console.is_terminal else Console(file=stream, width=_PLAIN_WIDTH)
