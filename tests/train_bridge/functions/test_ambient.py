"""Every autograd Function by itself: autocast around it moves no bit; it has one backward.

Trainers (verl among them) run forward and backward inside `torch.autocast`; a Function that is
called without a bridged module around it, as the expert parallel one is, must not follow it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable

import pytest
import torch
from expert_cases import Shape, masters, prepared, routing, tokens
from router_cases import case as router_case
from strided_cases import Place, packed, strided, turned

import train_bridge.functions
from consistent_kernels.compressor import CompressorParameters, packed_windows
from consistent_kernels.expert_parallel import ExpertPlacement
from consistent_kernels.fp8_experts import quantize_expert_weight
from consistent_kernels.kv_cache_fp8 import V4
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations
from train_bridge.expert_parallel import (
    ExpertParallel,
    ExpertParallelFunction,
    Fp8ExpertParallelFunction,
)
from train_bridge.functions import (
    compressor,
    experts,
    fp8_experts,
    fp8_linear,
    grouped_linear,
    hyper_connections,
    interleaved_rotary,
    kv_cache_fp8,
    rms_norm,
    router,
    silu_and_mul,
    sparse_attention,
)
from train_bridge.functions import linear as linear_function
from train_bridge.functions.ambient import OpFunction

Call = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Gives the differentiable results of a Function, and its leaves."""
SHAPE = Shape(3, 2, 128, 128)
ROPE = RopeParameters(head_dim=128, rotary_dim=64, theta=1e4, max_position=64)
WINDOW = CompressorParameters(4, True, 128, 1e-6)


class OneRank:
    """An exchange with nobody else in it."""

    rank, world_size = 0, 1

    def deliver(self, rows: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        return rows


def rows(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return hazard_activations(shape, seed=seed, dtype=dtype)


def fp32(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def calls() -> dict[str, Call]:
    """Return {Function: call}."""

    def leaves(*values: torch.Tensor) -> list[torch.Tensor]:
        return [value.clone().requires_grad_() for value in values]

    x, grouped_x = tokens(SHAPE, 9, "cpu", seed=1), rows(9, 3, 64, seed=2)
    ids, weights = routing(SHAPE, 9, "cpu", seed=2)
    w13, w2 = masters(SHAPE, "cpu")
    ready = prepared(SHAPE, "reference", "cpu")
    options = {"scale_format": "ue8m0", "impl": "reference"}
    quantized = tuple(quantize_expert_weight(w, **options) for w in (w13, w2))
    square = fp32(128, 128, seed=3)
    fp8 = quantize_weight(square, **options)
    plain = prepare_weight(square, dtype=torch.bfloat16, impl="reference")
    logits, bias, parameters = router_case("deepseek-v3", 9, "cpu", seed=4)
    streams, fn, scale, base = rows(9, 4, 32, seed=5), fp32(24, 128, seed=6), fp32(3, seed=7), None
    base, post, comb = fp32(24, seed=8), fp32(9, 4, seed=9), fp32(9, 4, 4, seed=10)
    maps = hyper_connections.HyperConnectionParameters(1e-6, 1e-6, 20)
    kv_score, ape = fp32(13, 4 * 128, seed=11), fp32(4, 2 * 128, seed=12)
    windows, first, _ = packed_windows(torch.tensor([0, 9, 13]), WINDOW)
    places = torch.cat((torch.arange(9), torch.arange(4)))
    q, kv, sinks = rows(5, 2, 512, seed=13), rows(9, 512, seed=14), fp32(2, seed=15)
    named = torch.tensor([[0, 3, 8], [2, -1, 1], [8, 7, 6], [4, 4, 4], [-1, -1, -1]]).int()
    heads, norm = rows(9, 2, 128, seed=16), fp32(128, seed=17)
    alone = ExpertParallel(OneRank(), ExpertPlacement(SHAPE.experts, 1))
    ref = "reference"

    def of(function: type, tensors: tuple, build: Callable[..., tuple]) -> Call:
        def call() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            given = leaves(*tensors)
            result = function.apply(*build(*given))
            parts = result if isinstance(result, tuple) else (result,)
            return [part for part in parts if part.requires_grad], given

        return call

    found = {
        ExpertParallelFunction: (
            (x, w13, w2, weights),
            lambda x, a, b, w: (x, a, b, ids, w, None, ready, alone, None, ref),
        ),
        Fp8ExpertParallelFunction: (
            (x, w13, w2, weights),
            lambda x, a, b, w: (x, a, b, ids, w, None, quantized, "ue8m0", alone, None, ref),
        ),
        experts.ExpertsFunction: (
            (x, w13, w2, weights),
            lambda x, a, b, w: (x, a, b, ids, w, None, ready, None, ref),
        ),
        fp8_experts.Fp8ExpertsFunction: (
            (x, w13, w2, weights),
            lambda x, a, b, w: (x, a, b, ids, w, None, quantized, "ue8m0", None, ref),
        ),
        fp8_linear.Fp8LinearFunction: (
            (x, square),
            lambda x, w: (x, w, *fp8, "ue8m0", ref, None),
        ),
        linear_function.LinearFunction: (
            (x, square),
            lambda x, w: (x, w, None, plain, ref, None),
        ),
        router.RouterFunction: ((logits,), lambda x: (x, bias, None, None, parameters, ref)),
        hyper_connections.HyperPreFunction: (
            (streams, fn, scale, base),
            lambda *given: (*given, maps, ref),
        ),
        hyper_connections.HyperPostFunction: (
            (streams[:, 0], streams, post, comb),
            lambda *given: (*given, ref),
        ),
        hyper_connections.HyperHeadFunction: (
            (streams, fn[:4], scale[:1], base[:4]),
            lambda *given: (*given, 1e-6, 1e-6, ref),
        ),
        grouped_linear.GroupedLinearFunction: (
            (grouped_x, fp32(3, 32, 64, seed=18)),
            lambda x, w: (x, w, ref),
        ),
        compressor.CompressorStateFunction: (
            (kv_score, ape),
            lambda x, bias: (x, bias, places, ref),
        ),
        compressor.CompressFunction: (
            (kv_score, norm),
            lambda x, w: (x, w, windows, first, ROPE, WINDOW, torch.bfloat16, ref),
        ),
        sparse_attention.SparseAttentionFunction: (
            (q, kv, sinks),
            lambda q, kv, s: (q, kv, named, s, 0.05, 512, ref),
        ),
        sparse_attention.SparseAttentionFP8Function: (
            (q, kv, sinks),
            lambda q, kv, s: (q, kv, named, None, None, s, 0.05, V4, ref, ref),
        ),
        kv_cache_fp8.KVCacheFP8Function: ((kv,), lambda kv: (kv, V4, ref)),
        interleaved_rotary.InterleavedRotaryFunction: (
            (heads,),
            lambda x: (torch.arange(9), x, ROPE, False, ref),
        ),
        rms_norm.RMSNormFunction: ((heads, norm), lambda x, w: (x, w, 1e-6, ref)),
        silu_and_mul.SiluAndMulFunction: ((x, x), lambda gate, up: (gate, up, ref)),
    }
    return {function.__name__: of(function, *given) for function, given in found.items()}


def train(call: Call, place: Place = packed) -> list[torch.Tensor]:
    results, leaves = call()
    grads = [hazard_activations(tuple(x.shape), seed=30, dtype=x.dtype) for x in results]
    torch.autograd.backward(results, [place(grad) for grad in grads])
    return [*(x.detach() for x in results), *(leaf.grad for leaf in leaves)]


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_functions_ignore_autocast(name: str) -> None:
    expected = train(CALLS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = train(CALLS[name])
    for ours, plain in zip(actual, expected, strict=True):
        assert_bitwise_equal(ours, plain)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("place", [strided, turned])
def test_functions_ignore_where_a_gradient_lies(name: str, place: Place) -> None:
    """Autograd hands over views of any strides."""
    for ours, plain in zip(train(CALLS[name], place), train(CALLS[name]), strict=True):
        assert_bitwise_equal(ours, plain)


@pytest.mark.parametrize("name", CALLS)
def test_functions_refuse_a_second_backward(name: str) -> None:
    results, leaves = CALLS[name]()
    loss = sum(result.float().square().sum() for result in results)
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(grad.float().square().sum() for grad in grads).backward()


def test_every_function_has_this_base() -> None:
    for found in pkgutil.iter_modules(train_bridge.functions.__path__, "train_bridge.functions."):
        module = __import__(found.name, fromlist=["_"])
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, torch.autograd.Function):
                assert issubclass(kind, OpFunction), kind
    assert issubclass(ExpertParallelFunction, OpFunction)
    assert issubclass(Fp8ExpertParallelFunction, OpFunction)


def test_control_autocast_rounds_operands_of_a_bare_op() -> None:
    x, weight = fp32(16, 256, seed=1), fp32(64, 256, seed=2)
    exact = linear(x, weight, impl="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not bitwise_equal(linear(x, weight, impl="reference"), exact)
