"""Settings around a block move no bit: autocast (verl trains in it), default dtype, recompute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from block_cases import BLOCKS, BlockCase, prefill_then_decode
from torch.utils.checkpoint import checkpoint

from consistent_kernels.testing import assert_bitwise_equal
from train_bridge.blocks import PackedSequences, packed_attention
from train_bridge.functions import ambient

LENGTHS = [3, 0, 29]
Trained = dict[str, torch.Tensor]


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND = {"autocast": autocast, "default dtype": default_dtype}


def train(case: BlockCase, hidden: torch.Tensor, recompute: bool = False) -> Trained:
    """Forward and backward; return the output and all gradients."""
    block, leaf = case.trainer(), hidden.clone().requires_grad_()
    sequences = PackedSequences.from_lengths(LENGTHS)
    call: Callable[..., torch.Tensor] = block
    if recompute:
        call = lambda *args: checkpoint(block, *args, use_reentrant=False)  # noqa: E731
    out = call(leaf, sequences)
    out.backward(hidden.flip(0))
    grads = {name: value.grad for name, value in block.named_parameters()}
    return {"out": out.detach(), "hidden": leaf.grad, **grads}


@pytest.fixture(params=BLOCKS)
def case(request: pytest.FixtureRequest) -> BlockCase:
    return BlockCase.make(request.param, "cpu")


@pytest.mark.parametrize("around", AROUND)
def test_block_trainer_ignores_settings(case: BlockCase, around: str) -> None:
    hidden = case.hidden(sum(LENGTHS), seed=21)
    expected = train(case, hidden)
    with AROUND[around]():
        got = train(case, hidden)
    for name, value in expected.items():
        assert_bitwise_equal(got[name], value, name)


def test_control_autocast_reaches_a_block_without_protection(
    case: BlockCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "plain_settings", contextlib.nullcontext)
    monkeypatch.setattr(ambient, "plain_settings", contextlib.nullcontext)
    hidden = case.hidden(sum(LENGTHS), seed=21)
    train(case, hidden)
    with autocast(), pytest.raises(RuntimeError, match="converted to type c10::BFloat16"):
        train(case, hidden)


def test_block_engine_ignores_the_default_dtype(case: BlockCase) -> None:
    """vLLM leaves the model's dtype set."""
    lengths = [3, 29]
    hidden = case.hidden(sum(lengths), seed=22)
    sequences = PackedSequences.from_lengths(lengths)
    plan = prefill_then_decode(lengths, 2)
    expected = case.engine(lengths).run(hidden, sequences, plan)
    with default_dtype():
        got = case.engine(lengths).run(hidden, sequences, plan)
    assert_bitwise_equal(got, expected)


def test_block_recompute_moves_no_bit(case: BlockCase) -> None:
    hidden = case.hidden(sum(LENGTHS), seed=23)
    expected = train(case, hidden)
    for name, value in train(case, hidden, recompute=True).items():
        assert_bitwise_equal(value, expected[name], name)
