"""The compiled loop has the reference's bytes, so which of them runs is scheduling."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="the compiled loops need Numba, which comes with vLLM")

from consistent_kernels.rms_norm import api, loops, rms_norm
from consistent_kernels.rms_norm.reference import add_rms_norm_ref, rms_norm_ref
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    norm_weight,
)

SIZES = (1, 2, 3, 17, 64, 80, 96, 128, 192, 256, 576, 1000, 1536, 4096)


@pytest.mark.parametrize("size", SIZES)
def test_loop_has_the_references_bits(size: int) -> None:
    x = hazard_activations((33, size), seed=1)
    residual = hazard_activations((33, size), seed=2)
    weight = norm_weight(size, seed=3)
    assert_bitwise_equal(loops.rms_norm_loop(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
    for ours, theirs in zip(
        loops.add_rms_norm_loop(x, residual, weight, 1e-5),
        add_rms_norm_ref(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert_bitwise_equal(ours, theirs)
    assert loops.has_reference_bits(size)


def test_loop_is_batch_invariant() -> None:
    x, weight = hazard_activations((max(BATCH_SIZES), 576), seed=4), norm_weight(576, seed=5)
    whole = loops.rms_norm_loop(x, weight, 1e-5)
    for rows in BATCH_SIZES:
        assert_bitwise_equal(loops.rms_norm_loop(x[:rows], weight, 1e-5), whole[:rows])


def test_loop_rounds_every_bf16_value_and_tie_as_pytorch_does() -> None:
    """Sums of all pairs of bf16 mantissas at several distances: ties, overflow, zeros' signs."""
    one = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16)
    scales = 2.0 ** torch.tensor([-140.0, -126, -9, -8, -7, -1, 0, 1, 120, 127])
    other = (one[:, None].float() * scales).flatten().bfloat16()
    other = torch.cat((other, -other, torch.tensor([0.0, -0.0, torch.inf]).bfloat16()))
    x = one.repeat_interleave(len(other)).view(-1, 1)
    residual = other.repeat(len(one)).view(-1, 1)
    weight = torch.ones(1, dtype=torch.bfloat16)
    for sign in (1, -1):
        _, ours = loops.add_rms_norm_loop(sign * x, residual, weight, 1e-5)
        _, theirs = add_rms_norm_ref(sign * x, residual, weight, 1e-5)
        assert_bitwise_equal(ours, theirs)


def test_nan_rows_are_nan_and_reach_no_other() -> None:
    x, weight = hazard_activations((5, 64), seed=6), norm_weight(64, seed=7)
    clean = loops.rms_norm_loop(x, weight, 1e-5)
    x[2, 9] = torch.nan
    poisoned = loops.rms_norm_loop(x, weight, 1e-5)
    assert bool(poisoned[2].isnan().all())
    keep = torch.tensor([0, 1, 3, 4])
    assert_bitwise_equal(poisoned[keep], clean[keep])


def test_control_another_tree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def ascending(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        total = torch.zeros(x.shape[0], 1)
        for column in x.float().split(1, dim=1):
            total = total + column * column
        scale = 1 / (total / x.shape[1] + eps).sqrt()
        return (x.float() * scale * weight.float()).bfloat16()

    monkeypatch.setattr(loops, "rms_norm_ref", ascending)
    assert any(not loops.has_reference_bits.__wrapped__(size) for size in (576, 1000, 4096))


def test_op_takes_the_loop_and_works_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = hazard_activations((16, 576), seed=8), norm_weight(576, seed=9)
    assert api._loops(x, weight) is loops
    assert api._loops(x.float(), weight) is None
    with_loop = rms_norm(x, weight, 1e-5, impl="reference")
    monkeypatch.setattr(api, "_loops_module", lambda: None)
    assert_bitwise_equal(rms_norm(x, weight, 1e-5, impl="reference"), with_loop)


def test_strided_rows_and_no_rows() -> None:
    wide, weight = hazard_activations((8, 2, 64), seed=10), norm_weight(64, seed=11)
    strided = wide[:, 1]
    expected = rms_norm_ref(strided.contiguous(), weight, 1e-5)
    assert_bitwise_equal(loops.rms_norm_loop(strided, weight, 1e-5), expected)
    assert loops.rms_norm_loop(wide[:0, 0], weight, 1e-5).shape == (0, 64)
    assert not bitwise_equal(expected[:1], expected[1:2])
