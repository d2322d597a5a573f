"""`report.html`: one file without external parts, for a reader who sees it for the first time."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from vllm_consistent.cli.demo.metrics import STOCK, Row, plain, write_atomically

COLUMNS = (
    "step",
    "tokens",
    "mismatched",
    "max |diff|",
    "mean |diff|",
    "std |diff|",
    "k3 KL",
    "reward",
    "right",
    "length",
    "rollout tok/s",
    "train s",
    "grad norm",
    "engine's weights",
)
SPEED_COLUMNS = ("equal work", "consistent tok/s", "stock tok/s", "ratio")
_DIGEST_CHARS = 8


def number(value: Any) -> str:
    """Return a short text: exact zero as "0", small and large values in scientific form."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:,.3g}"


def step_cells(row: Row, prefix: str = "") -> list[str]:
    """Return the texts of `COLUMNS` for one row; `prefix` "stock/" gives the stock pair's.

    Empty where the pair has no such number (the stock pair is not trained).
    """

    def get(name: str) -> Any:
        return row.get(f"{prefix}{name}")

    trained = [get(f"timing_s/{name}") for name in ("old_log_prob", "update_actor")]
    return [
        f"{row['training/global_step']}{' stock' if prefix else ''}",
        number(get("true_on_policy/num_tokens")),
        number(get("true_on_policy/mismatched_tokens")),
        number(get("true_on_policy/logprob_abs_diff_max")),
        number(get("true_on_policy/logprob_abs_diff_mean")),
        number(get("true_on_policy/logprob_abs_diff_std")),
        number(get("true_on_policy/k3_kl")),
        number(get("critic/rewards/mean")),
        number(get("reward/accuracy")),
        number(get("response_length/mean")),
        number(get("perf/rollout_tokens_per_s")),
        number(sum(trained)) if None not in trained else "",
        number(get("actor/grad_norm")),
        f"v{get('weights/version')} {str(get('weights/digest'))[:_DIGEST_CHARS]}"
        if get("weights/digest")
        else "",
    ]


def speed_cells(rates: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the speed table, `SPEED_COLUMNS` each; empty where nothing was timed."""
    return [
        [name, number(found["consistent"]), number(found["stock"]), number(found["ratio"])]
        for name, found in (("whole rollout", rates), ("its decode steps", rates["decode"]))
        if found["consistent"]
    ]


def speed_title(rates: dict[str, Any]) -> str:
    """Say what was timed."""
    return (
        f"Rollout speed: {rates['concurrency']} samples of {rates['tokens_per_response']} tokens, "
        f"prompts read; median of {rates['rounds']} rounds"
    )


def has_stock(row: Row) -> bool:
    """Return whether the row also holds the stock pair's numbers."""
    return f"{STOCK}true_on_policy/num_tokens" in row


def verdict(summary: dict[str, Any]) -> dict[str, str]:
    """Return {"kind", "title", "text"}: the result in two sentences."""
    tokens, wrong = summary["tokens"], summary["mismatched_tokens"]
    done, asked = summary["steps_done"], summary["steps"]
    partial = (
        ""
        if done == asked
        else f" The run stopped after {done} of {asked} steps: "
        + (summary["stopped_because"] or "unknown reason")
    )
    if not done:
        return {"kind": "open", "title": "No step was finished.", "text": partial.strip()}
    if wrong:
        return {
            "kind": "bad",
            "title": f"{wrong:,} of {tokens:,} tokens differ between rollout and trainer.",
            "text": f"The pair is not consistent; the first difference is named below.{partial}",
        }
    text = "Maximum, mean and standard deviation of the difference and the k3 KL are exactly 0."
    stock = summary.get("stock")
    if stock:
        text += (
            f" Stock software on the same prompts: {stock['mismatched_tokens']:,} of "
            f"{stock['tokens']:,} tokens differ ({100 * stock['mismatched_share']:.1f}%), by up to "
            f"{number(stock['logprob_abs_diff_max'])}."
        )
    return {
        "kind": "good" if done == asked else "open",
        "title": f"All {tokens:,} log-probs of {done} step(s) are equal bit for bit.",
        "text": text + partial,
    }


def _tiles(summary: dict[str, Any]) -> list[dict[str, str]]:
    if not summary["steps_done"]:
        return []
    rates = summary["throughput"]
    tiles = [
        {
            "value": f"{summary['mismatched_tokens']:,} / {summary['tokens']:,}",
            "label": "mismatched tokens, consistent",
        }
    ]
    stock = summary.get("stock")
    if stock:
        tiles.append(
            {
                "value": f"{stock['mismatched_tokens']:,} / {stock['tokens']:,}",
                "label": "mismatched tokens, stock",
            }
        )
    if rates["consistent"]:
        tiles.append(
            {"value": f"{rates['consistent']:.0f} tok/s", "label": "rollout, consistent engine"}
        )
    if rates.get("ratio"):
        tiles.append({"value": f"{rates['ratio']:.2f} x", "label": "rollout, against stock vLLM"})
    return tiles


def _table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    table = []
    for row in rows:
        for prefix in ("", STOCK) if has_stock(row) else ("",):
            cells = [{"text": text, "wrong": False} for text in step_cells(row, prefix)]
            cells[2]["wrong"] = not prefix and bool(row["true_on_policy/mismatched_tokens"])
            table.append({"stock": bool(prefix), "cells": cells})
    return table


def build(summary: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page's HTML.

    Args:
        summary: what `run.summarize` returns.
        rows: one metrics row per finished step; may be empty.
    """
    from vllm_consistent.cli.demo.plots import charts

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vllm_consistent.cli.demo"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    contract = summary["contract"] or {}
    consistency = summary["consistency_report"]
    now = datetime.datetime.now(datetime.UTC)
    return environment.get_template("report.html.j2").render(
        model=summary["model"],
        problems=summary["problems"],
        options=summary["options"],
        rows=rows,
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        verdict=verdict(summary),
        tiles=_tiles(summary),
        stock=summary.get("stock"),
        first_mismatch=summary["first_mismatch"],
        charts=charts(rows, summary["throughput"]) if rows else [],
        columns=COLUMNS,
        table=_table(rows),
        speed={
            "title": speed_title(summary["throughput"]),
            "columns": SPEED_COLUMNS,
            "rows": speed_cells(summary["throughput"]),
        },
        environment=[
            ("Versions", summary["versions"]),
            ("Machine", summary["hardware"]),
            ("Contract", contract),
            ("Model", summary["model"]),
        ],
        consistency=json.dumps(plain(consistency), indent=2) if consistency else "",
    )


def write(path: Path, summary: dict[str, Any], rows: Sequence[Row]) -> None:
    """Build the page and write it atomically; raises RunError when the folder is not writable."""
    write_atomically(path, build(summary, rows))
