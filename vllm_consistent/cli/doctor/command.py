"""`vllm-consistent doctor`: what would part rollout and training, before a GPU is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from consistent_kernels.errors import ConsistencyError
from vllm_consistent.cli import exit_codes


def doctor(
    config: Annotated[
        str,
        typer.Argument(
            help="A recipe's folder, a .yaml file, or the name of a shipped configuration."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE, as for main_ppo.", show_default=False)
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON on stdout.")
    ] = False,
) -> None:
    """Check a verl configuration: each finding names the key to change.

    Looks at the configuration, the model folder, installed versions, the plugin and the
    environment of this machine. `python -m train_bridge.verl.main_ppo` runs the same check first.

    Exit codes: 0 nothing found; 1 findings, all listed; 2 CONFIG or an override cannot be used.

    Example: vllm-consistent doctor true_on_policy_grpo_fsdp actor_rollout_ref.model.path=FOLDER
    """
    from vllm_consistent.cli.doctor.compose import locate
    from vllm_consistent.cli.plan.recipe import compose_recipe

    try:
        path = locate(config)
        findings = examine(compose_recipe(str(path), overrides or [], "doctor"), path)
    except ConsistencyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(exit_codes.USAGE) from None
    typer.echo(json.dumps(findings, indent=1) if json_ else in_words(findings))
    raise typer.Exit(exit_codes.OK if findings["passes"] else exit_codes.REFUSED)


def examine(composed: Any, path: Path) -> dict[str, Any]:
    """Return the findings about a composed configuration, as plain JSON types."""
    from train_bridge.verl.preflight import violations
    from train_bridge.verl.preflight.checkpoint import contract_digest, local_folder
    from train_bridge.verl.preflight.installation import installed_versions
    from train_bridge.verl.preflight.view import View

    found, view = violations(composed), View(composed)
    folder = local_folder(view)
    return {
        "config": str(path),
        "passes": not found,
        "violations": [item.to_dict() for item in found],
        "model": None if folder is None else str(folder),
        "contract_digest": contract_digest(view),
        "versions": installed_versions(),
    }


def in_words(findings: dict[str, Any]) -> str:
    """Return the findings as text."""
    lines = [
        f"{number}. {item['key']}={item['value']!r}\n   {item['why']}; use {item['use']}"
        for number, item in enumerate(findings["violations"], start=1)
    ]
    if lines:
        lines.insert(0, f"{findings['config']}: {len(lines)} finding(s)")
    else:
        lines.append(f"{findings['config']}: nothing found")
    if findings["model"] is None:
        lines.append("The model is not a folder here: architecture, vocabulary and positions are")
        lines.append("checked by the workers when they load it.")
    if findings["contract_digest"] is None:
        lines.append("The contract's digest is known only on a machine with the training device.")
    else:
        lines.append(f"contract {findings['contract_digest']}")
    return "\n".join(lines)
