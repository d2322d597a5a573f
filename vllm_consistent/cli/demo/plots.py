"""The report's charts, as SVG text that can stand inside an HTML page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vllm_consistent.cli.demo.metrics import STOCK, Row

CONSISTENT_COLOUR = "#1d4ed8"
STOCK_COLOUR = "#d97706"
_SIZE = (4.6, 2.9)
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
_TIMINGS = (
    ("timing_s/gen", "rollout", "#1d4ed8"),
    ("timing_s/old_log_prob", "score", "#0891b2"),
    ("timing_s/update_actor", "train", "#7c3aed"),
    ("timing_s/update_weights", "push weights", "#65a30d"),
    ("timing_s/save_checkpoint", "checkpoint", "#9ca3af"),
)


def charts(rows: Sequence[Row], throughput: dict[str, Any]) -> list[dict[str, str]]:
    """Return the report's charts as {"title", "caption", "svg"}.

    Args:
        rows: one metrics row per step, at least one.
        throughput: tokens/s under "consistent" and "stock", or None; of decode under "decode".
    """
    return [
        {"title": title, "caption": caption, "svg": _svg(draw, title)}
        for title, caption, draw in (
            (
                "Tokens whose log-probs differ",
                "Share of sampled tokens whose two log-probs differ in at least one bit.",
                lambda axes: _mismatch(axes, rows),
            ),
            (
                "Largest log-prob difference",
                "Largest |rollout - trainer| of a step. Points on the bottom line are exactly 0.",
                lambda axes: _on_zero_scale(axes, rows, "logprob_abs_diff_max", "|difference|"),
            ),
            (
                "k3 KL between rollout and trainer",
                "Mean of r - 1 - log r over the tokens of a step. The bottom line is exactly 0.",
                lambda axes: _on_zero_scale(axes, rows, "k3_kl", "k3 KL"),
            ),
            (
                "Reward",
                "Mean reward of the samples, and the share of right answers.",
                lambda axes: _reward(axes, rows),
            ),
            (
                "Throughput",
                "Tokens/s of both engines on one and the same work at the run's concurrency.",
                lambda axes: _throughput(axes, throughput),
            ),
            (
                "Where a step's time goes",
                "Seconds per step by phase.",
                lambda axes: _timing(axes, rows),
            ),
        )
    ]


def _svg(draw: Callable[[Axes], None], title: str) -> str:
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=_NO_METADATA)
    text = stream.getvalue()
    # The XML prologue names a DTD by URL and has no place inside HTML.
    body = text[text.index("<svg") :]
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{title}" ', body, count=1)


def _steps(rows: Sequence[Row]) -> list[int]:
    return [row["training/global_step"] for row in rows]


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values where `name` is there; text stands for a non-finite number."""
    present = [row for row in rows if row.get(name) is not None]
    return _steps(present), [float(row[name]) for row in present]


def _mismatch(axes: Axes, rows: Sequence[Row]) -> None:
    width = 0.38
    for prefix, label, colour, shift in (
        ("", "consistent", CONSISTENT_COLOUR, -width / 2),
        (STOCK, "stock", STOCK_COLOUR, width / 2),
    ):
        steps, wrong = _series(rows, f"{prefix}true_on_policy/mismatched_tokens")
        _, total = _series(rows, f"{prefix}true_on_policy/num_tokens")
        if not steps:
            continue
        share = [100.0 * w / t for w, t in zip(wrong, total, strict=True)]
        bars = axes.bar([s + shift for s in steps], share, width, color=colour, label=label)
        if len(steps) <= 12:
            labels = [
                f"{w:.0f}" if w == 0 else f"{s:.0f}%" for w, s in zip(wrong, share, strict=True)
            ]
            axes.bar_label(bars, labels=labels, fontsize=7, padding=2)
    axes.set_ylabel("% of tokens")
    axes.set_ylim(0, 112)
    _step_axis(axes)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.14))


def _on_zero_scale(axes: Axes, rows: Sequence[Row], name: str, label: str) -> None:
    values: list[float] = []
    for prefix, who, colour, marker in (
        ("", "consistent", CONSISTENT_COLOUR, "o"),
        (STOCK, "stock", STOCK_COLOUR, "s"),
    ):
        steps, series = _series(rows, f"{prefix}true_on_policy/{name}")
        if steps:
            axes.plot(steps, series, marker=marker, color=colour, label=who, clip_on=False)
            values += series
    finite = [value for value in values if value and math.isfinite(value)]
    axes.set_yscale("symlog", linthresh=min(finite, default=1.0) / 10)
    axes.set_ylim(0, 3 * max(finite, default=1.0))
    axes.set_ylabel(label)
    _step_axis(axes)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.14))


def _reward(axes: Axes, rows: Sequence[Row]) -> None:
    for name, label, colour, style in (
        ("critic/rewards/mean", "mean reward", CONSISTENT_COLOUR, "-"),
        ("reward/accuracy", "right answers", "#059669", "--"),
    ):
        axes.plot(*_series(rows, name), style, marker="o", color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("reward")
    _step_axis(axes)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.14))


def _throughput(axes: Axes, rates: dict[str, Any]) -> None:
    width = 0.38
    for who, colour, shift in (
        ("consistent", CONSISTENT_COLOUR, -width / 2),
        ("stock", STOCK_COLOUR, width / 2),
    ):
        measured = [(i, kind[who]) for i, kind in enumerate((rates, rates["decode"])) if kind[who]]
        if measured:
            places, values = zip(*measured, strict=True)
            bars = axes.bar([i + shift for i in places], values, width, color=colour, label=who)
            axes.bar_label(bars, fmt="%.0f", padding=2)
            axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    axes.set_xticks([0, 1], ["whole rollout", "decode"])
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.12)


def _timing(axes: Axes, rows: Sequence[Row]) -> None:
    steps = _steps(rows)
    bottom = [0.0] * len(steps)
    for name, label, colour in _TIMINGS:
        values = [float(row.get(name) or 0.0) for row in rows]
        axes.bar(steps, values, 0.6, bottom=bottom, color=colour, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_ylabel("seconds")
    _step_axis(axes)
    axes.legend(frameon=False, ncols=3, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.18))
