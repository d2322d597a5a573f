"""`vllm-consistent capture`: what a run wrote when it stopped at a mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from consistent_kernels.errors import ConsistencyError
from vllm_consistent.cli import exit_codes

_SHOWN = 8


def capture(
    folder: Annotated[Path, typer.Argument(help="The folder that the error named.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Show a captured mismatch: weights, contract, sampling parameters, and where bits differ.

    Exit codes: 0 it could be read; 2 it could not.
    """
    try:
        found = describe(folder)
    except ConsistencyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(exit_codes.USAGE) from None
    typer.echo(json.dumps(found, indent=1) if json_ else in_words(found))


def describe(folder: Path) -> dict[str, Any]:
    """Return a capture as plain JSON types, with the mismatching tokens of each sample."""
    from train_bridge.verl.capture import read_capture

    read = read_capture(folder)
    samples = []
    for sample in read.samples:
        report = sample.report()
        samples.append(
            {
                "key": sample.key,
                "index": sample.index,
                "prompt_tokens": sample.input_ids.numel() - sample.response_mask.numel(),
                "response_tokens": sample.response_mask.numel(),
                "mismatched_tokens": report.mismatched_tokens,
                "logprob_abs_diff_max": report.logprob_abs_diff_max,
                "first": None if report.first is None else str(report.first),
            }
        )
    return {
        "step": read.step,
        "contract": dict(read.contract),
        "weights": {key: read.weights.get(key) for key in ("version", "total")},
        "sampling": dict(read.sampling),
        "mismatched_tokens": read.report["mismatched_tokens"],
        "num_tokens": read.report["num_tokens"],
        "samples": samples,
    }


def in_words(found: dict[str, Any]) -> str:
    """Return the capture as text."""
    lines = [
        f"step {found['step']}: {found['mismatched_tokens']} of {found['num_tokens']} log-probs",
        f"contract {found['contract'].get('name')} {found['contract'].get('digest')}",
        f"weights  version {found['weights']['version']}, digest {found['weights']['total']}",
        "sampling " + ", ".join(f"{key}={value}" for key, value in found["sampling"].items()),
    ]
    for sample in found["samples"][:_SHOWN]:
        lines.append(
            f"sample {sample['index']} ({sample['key']}): {sample['prompt_tokens']} prompt tokens, "
            f"{sample['mismatched_tokens']} of {sample['response_tokens']} differ, by at most "
            f"{sample['logprob_abs_diff_max']:.9g}; first at {sample['first']}"
        )
    return "\n".join(lines)
