"""Triton launches without Triton's own work at every call.

Outside CUDA graphs (prompts) an engine launches some 180 Triton kernels a step, and Triton binds,
specializes and looks up every one of them: 25 of 30 microseconds. Here the compiled form of a call
is kept under all that Triton specializes on, and launched directly. (`triton.cdiv` and
`triton.next_power_of_2` cost microseconds, too; launchers in the way of prompts do without.)
"""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.errors import invalid

PAST_BINDING = False
"""Off until a GPU has run it (`pytest -m gpu`) and the 2k prompt of `benchmarks.rollout` has shown
what it gains: every launch then goes the way it always went."""

_COMPILED: dict[tuple[Any, ...], Any] = {}


def _key(
    kernel: Any, device: int, args: tuple[Any, ...], fixed: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What the compiled form of a call may depend on; at least what Triton looks at."""
    parts: list[Any] = [id(kernel), device]
    for arg in args:
        if isinstance(arg, torch.Tensor):
            parts += (arg.dtype, arg.data_ptr() & 15 == 0)
        elif isinstance(arg, int):
            parts += (arg & 15 == 0, arg == 1, arg.bit_length() > 31)
        else:
            parts.append(type(arg))
    return (*parts, *fixed)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """Run `kernel[grid](*args, **constants, **options)`.

    Args:
        kernel: a `triton.jit` function, which must stay alive.
        grid: one to three sizes.
        args: tensors and numbers, in the order of its signature.
        constants: its constexpr parameters, which follow in the same order.
        options: num_warps and the like.

    Raises:
        InvalidInputError: names out of order.
    """
    if not PAST_BINDING or not args[0].is_cuda:  # not on CUDA: Triton's interpreter
        kernel[grid](*args, **constants, **options)
        return
    device = torch.cuda.current_device()
    key = _key(kernel, device, args, (*constants.values(), *options.values()))
    compiled = _COMPILED.get(key)
    if compiled is None:
        if tuple(kernel.arg_names[len(args) :]) != tuple(constants):
            raise invalid("launch", "constants", kernel.arg_names[len(args) :], tuple(constants))
        _COMPILED[key] = kernel[grid](*args, **constants, **options)
        return
    x, y, z = (*grid, 1, 1)[:3]
    # As JITFunction.run (Triton 3.6.0), without its hooks, which only Triton's own profiler sets.
    compiled.run(
        x, y, z, torch._C._cuda_getCurrentRawStream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *args, *constants.values(),
    )  # fmt: skip
