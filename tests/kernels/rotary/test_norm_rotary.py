"""q and k norm with rotary in one launch: the bits of the separate ops, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.rms_norm import rms_norm
from consistent_kernels.rotary import RopeParameters, norm_rotary, rotary
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    norm_weight,
)

ROPES = {
    "head_64": RopeParameters(64, 64, 1e5, 8192),
    "head_128": RopeParameters(128, 128, 1e6, 4096),
    "head_80": RopeParameters(80, 80, 1e4, 2048),
    "partial": RopeParameters(96, 48, 1e4, 2048),
}
EPS = 1e-6

ropes = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def inputs(
    tokens: int, rope: RopeParameters, device: str, heads: tuple[int, int] = (9, 3)
) -> tuple[torch.Tensor, ...]:
    """Positions, then q and k as views of one fused row, then their norm weights."""
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.randint(rope.max_position, (tokens,), generator=generator).to(device)
    count = sum(heads) + heads[1]
    qkv = hazard_activations((tokens, count, rope.head_dim), seed=5, device=device)
    weights = (norm_weight(rope.head_dim, seed=s, device=device) for s in (1, 2))
    return positions, qkv[:, : heads[0]], qkv[:, heads[0] : sum(heads)], *weights


@ropes
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_norm_rotary_equals_separate_ops(
    impl_device: tuple[str, str], rope: RopeParameters, tokens: int
) -> None:
    impl, device = impl_device
    positions, q, k, q_weight, k_weight = inputs(tokens, rope, device)
    expected = rotary(
        positions,
        rms_norm(q, q_weight, EPS, impl=impl),
        rms_norm(k, k_weight, EPS, impl=impl),
        rope=rope,
        impl=impl,
    )
    actual = norm_rotary(positions, q, k, q_weight, k_weight, EPS, rope=rope, impl=impl)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_bitwise_equal(mine, theirs)


@ropes
def test_norm_rotary_is_batch_invariant(impl_device: tuple[str, str], rope: RopeParameters) -> None:
    impl, device = impl_device
    positions, q, k, *weights = inputs(300, rope, device)
    whole = norm_rotary(positions, q, k, *weights, EPS, rope=rope, impl=impl)
    for rows in (size for size in BATCH_SIZES if size <= 300):
        for start in {0, 300 - rows}:
            part = slice(start, start + rows)
            actual = norm_rotary(
                positions[part], q[part], k[part], *weights, EPS, rope=rope, impl=impl
            )
            for mine, theirs in zip(actual, whole, strict=True):
                assert_bitwise_equal(mine, theirs[part])


def test_control_norm_without_its_rounding_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    rope = ROPES["head_128"]
    positions, q, k, q_weight, k_weight = inputs(64, rope, device)
    rounded, _ = norm_rotary(positions, q, k, q_weight, k_weight, EPS, rope=rope, impl=impl)
    exact = rms_norm(q.float(), q_weight.float(), EPS, impl=impl)
    late, _ = rotary(positions, exact, k.float(), rope=rope, impl=impl)
    assert not bitwise_equal(late.bfloat16(), rounded)


def test_norm_rotary_rejects_a_weight_of_another_width(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    rope = ROPES["head_64"]
    positions, q, k, q_weight, _ = inputs(4, rope, device)
    with pytest.raises(InvalidInputError, match="k_weight must be of shape"):
        norm_rotary(positions, q, k, q_weight, q_weight[:32], EPS, rope=rope, impl=impl)
