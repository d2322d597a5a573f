"""`python -m benchmarks.train`: forward and backward of the bridged model against stock's."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.clock import Clock
from benchmarks.common.record import provenance
from benchmarks.common.rows import Row, merge_into, require_mergeable
from benchmarks.common.stats import (
    INTERVAL,
    LEAST_LOGPROB,
    LEAST_PAIRS,
    paired_ratio,
    require_pairs,
    require_tokens,
)
from benchmarks.rollout.models import MODELS, TINY_MODELS, Shape
from benchmarks.train.parity import Parity, check
from benchmarks.train.step import (
    STOCK,
    Batch,
    Pair,
    Step,
    build,
    make_batch,
    our_logprobs,
    timed_step,
)
from consistent_kernels.errors import ConsistencyError, require_implementation
from vllm_consistent.cli import exit_codes

KEY = ("work", "variant", "stock_logprobs")
"""Rows of equal values here replace each other in a result file."""

_MODEL = "qwen3_8b"
_MEMORY_SHARE = 0.88
OURS = "ours"

app = typer.Typer(add_completion=False)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        shape: of the model; its number of layers is a limit.
        device: "cuda" or "cpu".
        sequences, length: of the batch.
        pairs, warmups: rounds.
        stock: keys of `step.STOCK`.
        recompute: activation recomputation (gradient checkpointing) on both sides.
        layers: None to take as many as fit.
    """

    shape: Shape
    device: str
    sequences: int
    length: int
    pairs: int
    warmups: int
    stock: tuple[str, ...]
    recompute: bool
    layers: int | None

    def work(self, layers: int) -> str:
        """Name of the row."""
        kept = ", recomputed activations" if self.recompute else ""
        name = "Qwen3-8B shape" if self.shape == MODELS[_MODEL] else "tiny"
        return (
            f"{name}, {layers} layers, {self.sequences} x {self.length:,} packed tokens, "
            f"forward + backward{kept}"
        )


def fitting_layers(setting: Setting, batch: Batch, clock: Clock) -> int:
    """Return how many layers fit, from the peaks of one and two layers of both sides."""
    if setting.device == "cpu" or setting.shape != MODELS[_MODEL]:
        return setting.shape.num_hidden_layers
    sides = {OURS: our_logprobs, setting.stock[0]: STOCK[setting.stock[0]]}
    peaks: dict[str, list[int]] = {name: [] for name in sides}
    for layers in (1, 2):
        pair = build(setting.shape, layers, setting.device, recompute=setting.recompute)
        for name, logprobs in sides.items():
            model = pair.ours if name == OURS else pair.stock
            peaks[name].append(timed_step(logprobs, model, batch, pair).peak_bytes)
        del pair
        _release()
    room = torch.cuda.mem_get_info()[0] * _MEMORY_SHARE
    fits = []
    for name, (one, two) in peaks.items():
        fits.append(1 + int((room - one) // (two - one)))
        clock.tell(f"{name}: {one / 1e9:.1f} GB with one layer, {(two - one) / 1e9:.1f} GB a layer")
    return max(1, min(*fits, setting.shape.num_hidden_layers))


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_rounds(
    pair: Pair,
    batch: Batch,
    setting: Setting,
    clock: Clock,
    keep: Callable[[dict[str, list[Step]]], None] = lambda steps: None,
) -> tuple[dict[str, list[Step]], list[str]]:
    """Return the timed steps of each side, in turn, and what did not fit into memory.

    `keep` gets the steps so far after each round from the last that must be there on.
    """
    sides = {OURS: (our_logprobs, pair.ours)} | {
        name: (STOCK[name], pair.stock) for name in setting.stock
    }
    steps: dict[str, list[Step]] = {name: [] for name in sides}
    missing: list[str] = []
    for turn in range(-setting.warmups, setting.pairs):
        if len(sides) == 1:
            break
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            try:
                step = timed_step(*sides[name], batch, pair)
            except torch.cuda.OutOfMemoryError:
                if name == OURS:
                    raise
                clock.tell(f"stock with {name} logits does not fit into memory; left out")
                missing.append(name)
                del sides[name], steps[name]
                pair.forget_gradients()
                _release()
                continue
            if turn >= 0:
                steps[name].append(step)
        if turn + 1 >= min(LEAST_PAIRS, setting.pairs):
            keep(steps)
    return steps, missing


def rows_of(
    steps: dict[str, list[Step]], layers: int, parity: Parity, setting: Setting
) -> list[Row]:
    """Return one row for each kind of stock trainer."""
    ours = steps[OURS]
    rows = []
    for name, stock in steps.items():
        if name == OURS:
            continue
        ratio = paired_ratio([s.seconds for s in ours], [s.seconds for s in stock])
        peaks = [max(s.peak_bytes for s in side) for side in (ours, stock)]
        rows.append(
            {
                "work": setting.work(layers),
                "variant": "consistent",
                "stock_logprobs": name,
                "layers": layers,
                "ratio_to_stock": ratio.median,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "interval": INTERVAL,
                "pairs": ratio.pairs,
                "ours": statistics.median(s.seconds for s in ours),
                "stock": statistics.median(s.seconds for s in stock),
                "unit": "s",
                "lower_is_better": True,
                "ours_peak_bytes": peaks[0],
                "stock_peak_bytes": peaks[1],
                "peak_memory_ratio": peaks[0] / peaks[1] if peaks[1] else None,
                "mismatched_tokens": parity.mismatched,
                "compared_tokens": parity.compared,
                "mean_logprob": parity.mean_logprob,
                "mean_entropy": parity.mean_entropy,
            }
        )
    return rows


def refused(parity: Parity) -> str | None:
    """Return why no speed is reported, or None."""
    if parity.mismatched:
        return (
            f"{parity.mismatched} of {parity.compared} tokens differ ({parity.runs}); "
            "no speed is reported"
        )
    if not parity.mean_entropy < -LEAST_LOGPROB:  # NaN has equal bits in all runs
        return (
            f"mean entropy {parity.mean_entropy:.2f} is not below {-LEAST_LOGPROB}: logits are too "
            "flat for the comparison to mean much; no speed is reported"
        )
    return None


def measure(
    setting: Setting, clock: Clock, keep: Callable[[list[Row]], None] = lambda rows: None
) -> tuple[list[Row], str | None]:
    """Return the rows, or no row and why no speed is reported.

    `keep` gets them as soon as there are `LEAST_PAIRS`: a run cut short leaves what it has.
    """
    batch = make_batch(setting.shape, setting.sequences, setting.length, setting.device)
    layers = setting.layers
    if layers is None:
        with clock.phase("how many layers fit"):
            layers = fitting_layers(setting, batch, clock)
    with clock.phase(f"build {layers} layers"):
        pair = build(setting.shape, layers, setting.device, recompute=setting.recompute)
    with clock.phase("parity"):
        parity = check(pair.ours, batch)
    clock.tell(f"{parity.mismatched} of {parity.compared} tokens differ: {parity.runs}")
    refusal = refused(parity)
    if refusal:
        return [], refusal
    _release()
    with clock.phase(f"{setting.pairs} rounds"):
        steps, _ = run_rounds(
            pair,
            batch,
            setting,
            clock,
            lambda so_far: keep(rows_of(so_far, layers, parity, setting)),
        )
    return rows_of(steps, layers, parity, setting), None


def table(rows: list[Row]) -> Table:
    """Return the rows for a terminal."""
    shown = Table("work", "stock", "ours s", "stock s", "time ratio", "95%", "memory ratio")
    for row in rows:
        memory = row["peak_memory_ratio"]
        shown.add_row(
            row["work"],
            f"{row['stock_logprobs']} logits",
            f"{row['ours']:.3f}",
            f"{row['stock']:.3f}",
            f"{row['ratio_to_stock']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{memory:.3f}" if memory else "",
        )
    return shown


@app.command()
def main(
    out: Annotated[
        Path | None, typer.Option("--out", "--json", help="merge the rows into this JSON list")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="layers; as many as fit by default")
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="sequences of a batch")] = 8,
    length: Annotated[int, typer.Option(min=2, help="tokens of each")] = 4096,
    stock: Annotated[
        list[str] | None,
        typer.Option(help="stock trainer's logits: chunked, full; repeat it. Both by default."),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="recompute activations, on both sides")
    ] = False,
    pairs: Annotated[int, typer.Option(min=2, help="timed rounds")] = 5,
    warmups: Annotated[int, typer.Option(min=0, help="rounds before them")] = 1,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="a tiny model, also on a CPU, to test this command")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="hash of the sources, where this is no git checkout")
    ] = None,
) -> None:
    """Time forward + backward of the Qwen3-8B shape against stock Hugging Face, interleaved.

    Stock is the Hugging Face model in bf16 with PyTorch's flash attention; its log-probs come from
    all logits at once ("full") or from 2,048 rows at a time, recomputed in the backward
    ("chunked"). A stock trainer that does not fit into memory is left out.

    Exit codes: 0 reported, 1 no speed is reported because parity failed, 2 bad arguments,
    3 out of memory (ours, or every stock trainer), or it died (rows of five pairs and more are
    kept), 130 interrupted (likewise).
    """
    try:
        if out is not None and not tiny:
            require_pairs("benchmarks.train", pairs)
            compared = sequences * (length - 1)
            require_tokens("benchmarks.train", "--sequences times (--length - 1)", compared)
        kinds = tuple(dict.fromkeys(stock or STOCK))
        for kind in kinds:
            require_implementation("benchmarks.train --stock", kind, STOCK)
        if not tiny and not torch.cuda.is_available():
            raise typer.BadParameter("no CUDA device is there; use --tiny on a CPU")
        source = provenance(commit)
        require_mergeable([out] if out else [], source.hardware)
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error
    setting = Setting(
        shape=(TINY_MODELS if tiny else MODELS)[_MODEL],
        device="cuda" if torch.cuda.is_available() else "cpu",
        sequences=2 if tiny else sequences,
        length=33 if tiny else length,
        pairs=pairs,
        warmups=warmups,
        stock=kinds,
        recompute=recompute,
        layers=layers,
    )
    clock = Clock(lambda text: typer.echo(text, err=True))

    def keep(rows: list[Row]) -> None:
        if out is not None and rows:
            merge_into(out, [row | source.to_dict() for row in rows], KEY)

    try:
        rows, refusal = measure(setting, clock, keep)
    except torch.cuda.OutOfMemoryError as error:
        typer.echo(f"out of memory: {error}. Give fewer --layers", err=True)
        raise typer.Exit(exit_codes.FAILED) from error
    except Exception as error:
        traceback.print_exc()  # Python would end with 1, which means a mismatch here
        raise typer.Exit(exit_codes.FAILED) from error
    if refusal:
        typer.echo(refusal, err=True)
        raise typer.Exit(exit_codes.MISMATCH)
    if not rows:
        typer.echo("no stock trainer fits into memory; no speed is reported", err=True)
        raise typer.Exit(exit_codes.FAILED)
    keep(rows)
    Console().print(table(rows))
