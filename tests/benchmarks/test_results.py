"""The committed results of `benchmarks.ops`: what each row must say, and what must have rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.rows import read_rows
from benchmarks.ops.run import AIM, KEY

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FIELDS = {"op", "shape", "ours_us", "stock_us", "ratio_to_stock", "hardware", "versions", "commit"}
BATCHES = ("1", "64", "256")
FORMS = {
    "experts": ("E=128 K=8 H=2048 I=768",),
    "fp8_experts": ("fp32", "ue8m0"),
    "fp8_linear": ("N=4096 K=4096", "N=24576 K=1536", "N=7168 K=2048", "N=4096 K=12288"),
    "quantize_rows": ("fp32", "ue8m0"),
    "router": ("Qwen3-30B-A3B", "DeepSeek-V3", "DeepSeek-V4-Flash"),
    "compressor": ("csa", "hca", "index"),
    "gather_kv_fp8": ("v32", "v4"),
    "grouped_linear": ("v32 k_up", "v32 v_up", "v4 out_a"),
    "indexer_scores_paged": ("keys=4096", "keys=32768", "keys=131072"),
    "interleaved_rotary": ("v32", "v4 inverse"),
    "hc_head": ("",),
    "hc_post": ("",),
    "hc_pre": ("",),
    "sparse_attention": ("v32", "v4"),
    "sparse_attention_fp8": ("v32", "v4"),
    "sparse_attention_fp8_decode": ("v32", "v4"),
    "sparse_topk": ("positions=4096", "positions=32768", "positions=131072"),
    "write_kv_fp8": ("v32", "v4", "indexer"),
}
"""Ops of experts and of the sparse attention blocks to the forms that each batch is measured in."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path)
    assert rows, path
    return rows


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What a row leaves out, or claims without a reason."""
    found = []
    for row in rows:
        name = " ".join(str(row.get(field)) for field in KEY)
        missing = sorted(FIELDS - set(row))
        if missing:
            found.append(f"{name}: without {missing}")
            continue
        if row.get("relations_ok") is not True:
            found.append(f"{name}: its relations fail")
        elif not row["ours_us"] > 0:
            found.append(f"{name}: no time")
        elif (
            row["stock_us"] and abs(row["ours_us"] / row["stock_us"] - row["ratio_to_stock"]) > 1e-9
        ):
            found.append(f"{name}: another ratio than its times")
        slow = row["ratio_to_stock"] is None or row["ratio_to_stock"] > AIM
        if slow and not row.get("reason"):
            found.append(f"{name}: {row['ratio_to_stock']} of stock without a reason")
    return found


def test_every_op_row_is_whole_and_a_slow_one_says_why() -> None:
    rows = rows_of(RESULTS / "ops_h200.json")
    assert faults(rows) == []
    names = [tuple(row[field] for field in KEY) for row in rows]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", FORMS)
def test_ops_have_rows_at_every_batch(op: str) -> None:
    rows = [row for row in rows_of(RESULTS / "ops_h200.json") if row["op"] == op]
    for form in FORMS[op]:
        shapes = [row["shape"].split() for row in rows if form in row["shape"]]
        found = {
            word.split("=")[1]
            for shape in shapes
            for word in shape
            if word[-1].isdigit() and word.split("=")[0] in ("M", "rows", "tokens", "queries")
        }
        assert found >= set(BATCHES), f"{form}: {sorted(found)}"


def test_control_faults_are_found() -> None:
    good = dict.fromkeys(FIELDS, "x") | {
        "impl": "triton", "ours_us": 3.0, "stock_us": 2.0, "ratio_to_stock": 1.5,
        "relations_ok": True, "reason": "it sorts",
    }  # fmt: skip
    assert faults([good]) == []
    for change in (
        {"reason": None},
        {"relations_ok": False},
        {"ours_us": 0.0},
        {"ratio_to_stock": 1.2},
        {"stock_us": None, "ratio_to_stock": None, "reason": ""},
    ):
        assert len(faults([good | change])) == 1, change
    assert faults([{key: value for key, value in good.items() if key != "commit"}])
