"""The `vllm-consistent` command line: each command lives in a package of its own."""

from __future__ import annotations

import typer

from vllm_consistent.cli.demo.command import demo
from vllm_consistent.cli.doctor.capture import capture
from vllm_consistent.cli.doctor.command import doctor
from vllm_consistent.cli.plan.command import plan

app = typer.Typer(
    name="vllm-consistent",
    help="Rollout and training log-probs that are equal bit for bit, with vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Rollout and training log-probs that are equal bit for bit, with vLLM."""


app.command()(demo)
app.command()(doctor)
app.command()(capture)
app.command()(plan)
