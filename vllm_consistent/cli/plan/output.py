"""A plan as a table for people, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_consistent.cli.plan.estimate import GIB, Line, Phase, Plan, gib


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return plain JSON types; sizes in bytes."""
    return {
        "fits": plan.fits,
        "problems": list(plan.problems),
        "model": dataclasses.asdict(plan.shape) | {"parameters": plan.shape.parameters},
        "recipe": dataclasses.asdict(plan.recipe),
        "gpu_bytes": plan.gpu_bytes,
        "training": _phase(plan.training),
        "rollout": _phase(plan.rollout),
        "kv_cache": {
            "token_bytes": plan.kv_token_bytes,
            "tokens": plan.kv_tokens,
            "full_length_sequences": plan.full_length_sequences,
        },
        "weight_sync": {
            "per_gpu": [dataclasses.asdict(line) for line in plan.sync],
            "all_gpus_bytes": plan.recipe.gpus * sum(line.bytes for line in plan.sync),
        },
        "step": {
            "sequences": plan.recipe.prompts * plan.recipe.samples,
            "sequences_per_replica": plan.recipe.sequences_per_replica,
            "tokens_at_most": plan.recipe.tokens_per_step,
        },
    }


def _phase(phase: Phase) -> dict[str, Any]:
    lines = [dataclasses.asdict(line) for line in phase.lines]
    return {"bytes": phase.bytes, "lines": lines}


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    recipe = plan.recipe
    console.print(
        f"{recipe.model}: {plan.shape.parameters / 1e9:.2f} B parameters, {recipe.gpus} GPUs of "
        f"{gib(plan.gpu_bytes)} GiB, masters over {recipe.shard_gpus}"
    )
    for phase in (plan.training, plan.rollout):
        console.print(_table(f"{phase.name}, per GPU", phase.lines, phase.bytes))
    console.print(
        f"KV cache of a replica: {plan.kv_tokens:,} tokens of {plan.kv_token_bytes:,} bytes, "
        f"{plan.full_length_sequences} sequences of {recipe.max_model_len:,} at once; a step "
        f"brings {recipe.sequences_per_replica}"
    )
    moved = sum(line.bytes for line in plan.sync)
    console.print(_table("weight update, moved per GPU and step", plan.sync, moved))
    for problem in plan.problems:
        console.print(f"does not fit: {problem}", soft_wrap=True)
    if plan.fits:
        console.print("fits")


def _table(title: str, lines: tuple[Line, ...], total: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("bytes", justify="left")
    for line in lines:
        table.add_row(line.name, f"{line.bytes / GIB:.2f}", line.formula)
    table.add_section()
    table.add_row("together", f"{total / GIB:.2f}", "")
    return table
