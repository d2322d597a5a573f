"""What a trainer on CUDA compiles and probes before its first forward of a size."""

from __future__ import annotations

import torch

from consistent_kernels.deep_gemm_start import Shape
from consistent_kernels.token_logprobs.spec import BACKWARD_ROWS, STREAM_ROWS
from train_bridge.fp8 import Fp8ExpertsForward, Fp8LinearForward
from train_bridge.modules import Bridged
from train_bridge.state import BridgeState

_FEWEST_ROWS = 1024


def prepare_kernels(model: torch.nn.Module, state: BridgeState, tokens: int) -> None:
    """Compile and probe DeepGEMM for every weight shape of the model, once a size of batch.

    Args:
        model: bridged, the language model.
        state: its state; keeps the number of rows prepared so far.
        tokens: rows of the coming forward.

    Raises:
        NumericsError: a row's bits follow the number of rows on this machine.
        MissingBinaryError: a kernel does not compile.
    """
    ops = ("linear", "experts", "fp8_linear", "fp8_experts")
    impls = {state.impl(op) for op in ops if op in state.contract.programs}
    if "deep_gemm" not in impls or tokens <= state.prepared_rows:
        return
    from consistent_kernels.deep_gemm_start import prepare

    # Powers of two, so that growing batches prepare a few times and not at every step.
    rows = max(_FEWEST_ROWS, 1 << (tokens - 1).bit_length())
    shapes = _grouped_shapes(model, state, rows) | _dense_shapes(model, state, rows)
    shapes |= _fp8_shapes(model, state, rows)
    prepare(shapes, torch.device("cuda", torch.cuda.current_device()))
    state.prepared_rows = rows


def prepare_head(model: torch.nn.Module, state: BridgeState, rows: int) -> None:
    """Compile and probe the head for calls of whole logits, where they are larger than any before.

    Scores come from tiles of logits, for which `prepare_kernels` has prepared it.

    Args:
        model, state: as there.
        rows: of the logits.

    Raises:
        NumericsError, MissingBinaryError: as there.
    """
    if state.impl("linear") != "deep_gemm" or rows <= _streamed_rows(state):
        return
    from consistent_kernels.deep_gemm_start import pieces, prepare
    from consistent_kernels.linear.deep_gemm_start import GemmShape, served_shapes

    largest = max(pieces(rows))
    if largest <= max(state.prepared_head, _streamed_rows(state)):
        return
    shapes = {
        GemmShape(gemm.columns, gemm.inner, largest, gemm.out_fp32)
        for module in model.modules()
        if isinstance(module, Bridged)
        for gemm in module.gemms()
        if gemm.streamed
    }
    prepare(served_shapes(shapes), torch.device("cuda", torch.cuda.current_device()))
    state.prepared_head = largest


def _streamed_rows(state: BridgeState) -> int:
    head = state.impl("token_logprobs")
    return max(STREAM_ROWS[head], BACKWARD_ROWS[head])


def _dense_shapes(model: torch.nn.Module, state: BridgeState, rows: int) -> set[Shape]:
    if state.impl("linear") != "deep_gemm":
        return set()
    from consistent_kernels.linear.deep_gemm_start import LARGEST_ROWS, GemmShape, served_shapes

    probed = min(rows, LARGEST_ROWS)
    streamed = min(probed, _streamed_rows(state))
    shapes = {
        GemmShape(gemm.columns, gemm.inner, streamed if gemm.streamed else probed, gemm.out_fp32)
        for module in model.modules()
        if isinstance(module, Bridged)
        for gemm in module.gemms()
    }
    return served_shapes(shapes)


def _grouped_shapes(model: torch.nn.Module, state: BridgeState, rows: int) -> set[Shape]:
    stacks = [m.expert_stack() for m in model.modules() if isinstance(m, Bridged)]
    stacks = [stack for stack in stacks if stack is not None]
    if not stacks or state.impl("experts") != "deep_gemm":
        return set()
    from consistent_kernels.experts.deep_gemm_start import layer_shapes

    shapes: set[Shape] = set()
    for stack in stacks:
        shapes.update(layer_shapes(*stack, rows * state.router.top_k))
    return shapes


def _fp8_shapes(model: torch.nn.Module, state: BridgeState, rows: int) -> set[Shape]:
    if "fp8_linear" not in state.contract.programs or state.impl("fp8_linear") != "deep_gemm":
        return set()
    from consistent_kernels.fp8_experts.deep_gemm_start import layer_shapes
    from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
    from consistent_kernels.linear.deep_gemm_start import LARGEST_ROWS

    scale_format, shapes = state.facts.scale_format, set()
    for module in model.modules():
        if isinstance(module, Fp8LinearForward):
            shape = (*module.weight.shape, min(rows, LARGEST_ROWS))
            shapes.add(Fp8GemmShape(*shape, scale_format))
        elif isinstance(module, Fp8ExpertsForward):
            slots = rows * state.router.top_k
            shapes.update(layer_shapes(*module.down_proj.shape, slots, scale_format))
    return shapes
