"""Draws metrics.jsonl of run.py: mismatch, KL and reward of both runs, a picture for docs/.

python benchmarks/verl_smollm2/plot.py METRICS.jsonl docs/verl_smollm2_h200.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLORS = {"consistent": "#1b7837", "stock": "#b2182b"}
LABELS = {"consistent": "this project", "stock": "stock verl and vLLM"}
PANELS = (
    ("true_on_policy/mismatched_tokens", "log-probs that differ, % of tokens"),
    ("true_on_policy/logprob_abs_diff_max", "largest |difference| of log-probs"),
    ("true_on_policy/k3_kl", "k3 KL, rollout to trainer"),
    ("critic/score/mean", "share of right answers"),
)


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return entries by run, in step order; steps without a comparison are left out."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "true_on_policy/num_tokens" in entry:
            runs.setdefault(entry["run"], []).append(entry)
    return runs


def series(entries: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values; mismatches as a share of the tokens compared."""
    steps = [entry["step"] for entry in entries]
    values = [entry[name] for entry in entries]
    if name.endswith("mismatched_tokens"):
        totals = [entry["true_on_policy/num_tokens"] for entry in entries]
        values = [100 * value / total for value, total in zip(values, totals, strict=True)]
    return steps, values


def draw(source: Path, target: Path, title: str) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = read(source)
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for axis, (name, panel) in zip(axes.flat, PANELS, strict=True):
        for run, entries in runs.items():
            steps, values = series(entries, name)
            style = {"color": COLORS[run], "label": LABELS[run], "marker": ".", "clip_on": False}
            axis.plot(steps, values, **style)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel("GRPO step", fontsize=9)
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if name.endswith(("k3_kl", "abs_diff_max")):
            axis.set_yscale("symlog", linthresh=1e-9)
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(target, dpi=110)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of run.py")
    parser.add_argument("picture", type=Path, help="file to write; its ending names the format")
    parser.add_argument("--title", default="SmolLM2-135M-Instruct, verl GRPO on sums, one H200")
    args = parser.parse_args()
    draw(args.metrics, args.picture, args.title)


if __name__ == "__main__":
    main()
