"""`vllm-consistent plan CONFIG`."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Annotated

import typer

from consistent_kernels.errors import ConsistencyError
from vllm_consistent.cli import exit_codes

DOES_NOT_FIT = 1


class Gpu(StrEnum):
    """Devices whose memory is known."""

    H100 = "h100"
    H200 = "h200"
    B200 = "b200"
    GB200 = "gb200"


MIB_OF_GPU = {Gpu.H100: 81559, Gpu.H200: 143771, Gpu.B200: 183359, Gpu.GB200: 189471}
"""MiB that nvidia-smi lists: H100 SXM 80 GB, H200, B200, GB200."""


def plan(
    config: Annotated[str, typer.Argument(help="A recipe's folder, or a yaml file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE, as on verl's command line.")
    ] = None,
    gpu: Annotated[Gpu, typer.Option(help="The device.")] = Gpu.H100,
    gpu_gib: Annotated[
        float | None, typer.Option(min=1, help="Its memory in GiB, instead of --gpu.")
    ] = None,
    reserve_gib: Annotated[
        float,
        typer.Option(min=0, help="Contexts, graphs, communication, fragmentation: assumed."),
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory per GPU, KV cache and bytes moved per step of a recipe.

    Offline: the model's sizes come from its config.json, or from a table of known models. Exit
    codes: 0 it fits, 1 it does not, 2 the recipe cannot be read.
    """
    from vllm_consistent.cli.plan.estimate import GIB, MIB, make_plan
    from vllm_consistent.cli.plan.output import show, to_dict
    from vllm_consistent.cli.plan.recipe import compose_recipe, read_recipe
    from vllm_consistent.cli.plan.shapes import find_shape

    for name, size in (("--gpu-gib", gpu_gib), ("--reserve-gib", reserve_gib)):
        if size is not None and not math.isfinite(size):
            raise typer.BadParameter(f"{name} must be a finite number of GiB, got {size}")
    device = MIB_OF_GPU[gpu] * MIB if gpu_gib is None else int(gpu_gib * GIB)
    try:
        recipe = read_recipe(compose_recipe(config, overrides or []))
        made = make_plan(recipe, find_shape(recipe.model), device, int(reserve_gib * GIB))
    except ConsistencyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(exit_codes.USAGE) from error
    if as_json:
        typer.echo(json.dumps(to_dict(made), indent=2))
    else:
        from rich.console import Console

        show(made, Console())
    raise typer.Exit(exit_codes.OK if made.fits else DOES_NOT_FIT)
