"""The report: one file, nothing external, and it says what happened."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vllm_consistent.cli.demo import report
from vllm_consistent.cli.demo.metrics import Row

EXTERNAL = ("http:", "https:", "//", "file:")
VOID = {"meta", "link", "br", "img", "hr", "input"}


def make_row(step: int, *, wrong: int = 0, stock: bool = True) -> Row:
    row: Row = {
        "training/global_step": step,
        "true_on_policy/num_tokens": 300,
        "true_on_policy/mismatched_tokens": wrong,
        "true_on_policy/logprob_abs_diff_max": 0.25 * wrong,
        "true_on_policy/logprob_abs_diff_mean": 0.01 * wrong,
        "true_on_policy/logprob_abs_diff_std": 0.01 * wrong,
        "true_on_policy/k3_kl": 1e-4 * wrong,
        "critic/rewards/mean": 0.5 + 0.01 * step,
        "reward/accuracy": 0.4,
        "response_length/mean": 20.0,
        "perf/rollout_tokens_per_s": 180.0,
        "timing_s/gen": 2.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/update_actor": 4.0,
        "timing_s/update_weights": 0.5,
        "timing_s/save_checkpoint": 1.5,
        "actor/grad_norm": 3.25,
        "weights/version": step + 1,
        "weights/digest": "0123456789abcdef",
    }
    if stock:
        row |= {
            "stock/true_on_policy/num_tokens": 64,
            "stock/true_on_policy/mismatched_tokens": 63,
            "stock/true_on_policy/logprob_abs_diff_max": 0.2,
            "stock/true_on_policy/logprob_abs_diff_mean": 0.01,
            "stock/true_on_policy/logprob_abs_diff_std": 0.02,
            "stock/true_on_policy/k3_kl": 1.5e-3,
            "stock/perf/rollout_tokens_per_s": 40.0,
        }
    return row


def make_rates(ours: float | None, stock: float | None, ratio: float | None) -> dict[str, Any]:
    found = {"consistent": ours, "stock": stock, "ratio": ratio}
    return {**found, "decode": found, "concurrency": 16, "tokens_per_response": 40, "rounds": 5}


def make_summary(rows: list[Row], **changes: Any) -> dict[str, Any]:
    wrong = sum(row["true_on_policy/mismatched_tokens"] for row in rows)
    summary = {
        "steps_done": len(rows),
        "steps": len(rows),
        "tokens": 300 * len(rows),
        "mismatched_tokens": wrong,
        "stopped_because": None,
        "first_mismatch": None,
        "stock": {
            "tokens": 64 * len(rows),
            "mismatched_tokens": 63 * len(rows),
            "mismatched_share": 63 / 64,
            "logprob_abs_diff_max": 0.2,
            "samples": 2,
            "max_tokens": 8,
        },
        "throughput": make_rates(200.0, 50.0, 4.0),
        "contract": {"name": "dense_bf16_v1", "digest": "ab" * 32},
        "model": {"name": "Tiny <model>", "folder": "/models/tiny", "fingerprint": "cd" * 32},
        "problems": "small sums",
        "options": {
            "steps": len(rows),
            "prompts": 4,
            "samples": 4,
            "max_tokens": 40,
            "temperature": 1.0,
            "seed": 0,
        },
        "versions": {"python": "3.12.1", "torch": "2.11.0"},
        "hardware": {"processor": "Example & Co"},
        "consistency_report": {"requested": True, "calls": {"linear": {"reference": 12}}},
    }
    return summary | changes


class Page(HTMLParser):
    """Collects text, links and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page() -> tuple[str, Page]:
    rows = [make_row(step) for step in range(3)]
    html = report.build(make_summary(rows), rows)
    return html, Page(html)


def test_report_is_well_formed_and_loads_nothing(page: tuple[str, Page]) -> None:
    html, parsed = page
    assert parsed.open == []
    assert not {"script", "link", "iframe", "img"} & set(parsed.tags)
    assert [ref for ref in parsed.references if ref.startswith(EXTERNAL)] == []
    assert "url(http" not in html
    assert "@import" not in html
    assert "<!DOCTYPE svg" not in html


def test_report_holds_six_charts_a_table_and_the_facts(page: tuple[str, Page]) -> None:
    html, parsed = page
    text = " ".join(parsed.text)
    assert parsed.tags.count("svg") == 6
    for fact in (
        "0 / 900",
        "189 / 192",
        "4.00 x",
        "dense_bf16_v1",
        "ab" * 32,
        "2.11.0",
        "3.25",
        "v3 01234567",
    ):
        assert fact in text, fact
    assert "All 900 log-probs of 3 step(s) are equal bit for bit." in text
    assert "Tiny &lt;model&gt;" in html
    assert "Example &amp; Co" in html
    assert '"reference": 12' in text


def test_report_names_the_first_mismatch() -> None:
    rows = [make_row(0), make_row(1, wrong=2)]
    first = {"step": 1, "sample": 3, "position": 7, "rollout bits": "0xbf800000"}
    parsed = Page(report.build(make_summary(rows, first_mismatch=first), rows))
    text = " ".join(parsed.text)
    assert "2 of 600 tokens differ" in text
    assert "0xbf800000" in text


def test_report_without_the_stock_pair() -> None:
    rows = [make_row(0, stock=False)]
    rates = make_rates(200.0, None, None)
    html = report.build(make_summary(rows, stock=None, throughput=rates), rows)
    assert "plugin off" not in html
    assert Page(html).tags.count("svg") == 6


def test_report_of_an_interrupted_run_says_so() -> None:
    rows = [make_row(0)]
    summary = make_summary(rows, steps=5, stopped_because="it was interrupted")
    assert "stopped after 1 of 5 steps: it was interrupted" in report.build(summary, rows)


def test_report_before_the_first_step() -> None:
    summary = make_summary(
        [], steps=5, stopped_because="it was interrupted", stock=None, contract=None,
        consistency_report=None, throughput=make_rates(None, None, None),
    )  # fmt: skip
    html = report.build(summary, [])
    assert "No step was finished." in html
    assert Page(html).tags.count("svg") == 0


def test_report_draws_non_finite_numbers() -> None:
    row = make_row(0, wrong=1) | {
        "true_on_policy/logprob_abs_diff_max": "nan",
        "true_on_policy/k3_kl": "inf",
    }
    assert "nan" in report.build(make_summary([row]), [row])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0, "0"), (-0.0, "0"), (1234, "1,234"), (0.2634, "0.263"), (2.7e-5, "2.70e-05"),
     (None, ""), ("nan", "nan"), (1e9, "1.00e+09")],
)  # fmt: skip
def test_number_shows_exact_zero_only_for_zero(value: object, text: str) -> None:
    assert report.number(value) == text


def test_write_replaces_the_report_at_once(tmp_path: Path) -> None:
    rows = [make_row(0)]
    for _ in range(2):
        report.write(tmp_path / "report.html", make_summary(rows), rows)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
