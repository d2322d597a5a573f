"""The compiled loop has the reference's bytes, so which of them runs is scheduling."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="the compiled loops need Numba, which comes with vLLM")

from consistent_kernels.rotary import loops
from consistent_kernels.rotary.reference import rotary_ref
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

LIMIT = 300


def tables(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(LIMIT).double(), 10.0 ** -torch.arange(half).double())
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (96, 48), (128, 64), (128, 32)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_loop_has_the_references_bits(head_dim: int, half: int, dtype: torch.dtype) -> None:
    q = hazard_activations((37, 9, head_dim), seed=1)
    k = hazard_activations((37, 3, head_dim), seed=2)
    positions = torch.randint(0, LIMIT, (37,), generator=torch.Generator().manual_seed(3)).to(dtype)
    ours = loops.rotary_loop(positions, q, k, *tables(half))
    theirs = rotary_ref(positions, q, k, *tables(half))
    for name, a, b in zip("qk", ours, theirs, strict=True):
        assert_bitwise_equal(a, b, name)
    assert loops.has_reference_bits(head_dim, half)


def test_slices_of_a_fused_projection() -> None:
    fused = hazard_activations((11, 15, 64), seed=4)
    q, k = fused[:, :9], fused[:, 9:12]
    positions = torch.arange(11)
    ours = loops.rotary_loop(positions, q, k, *tables(32))
    theirs = rotary_ref(positions, q.contiguous(), k.contiguous(), *tables(32))
    for a, b in zip(ours, theirs, strict=True):
        assert_bitwise_equal(a, b)


def test_control_contracted_products_have_other_bits() -> None:
    """With one rounding less (a fused multiply-add) some values differ: the comparison sees it."""
    q = hazard_activations((64, 9, 64), seed=5)
    cos, sin = tables(32)
    positions = torch.arange(64)
    ours, _ = loops.rotary_loop(positions, q, q[:, :1], cos, sin)
    c, s = cos[positions][:, None].double(), sin[positions][:, None].double()
    x1, x2 = q[..., :32].double(), q[..., 32:].double()
    fused = torch.cat(((x1 * c - x2 * s), (x2 * c + x1 * s)), dim=-1).bfloat16()
    assert not bitwise_equal(ours, fused)


@pytest.mark.parametrize("position", [-1, LIMIT])
def test_a_position_without_a_table_row_raises_as_in_the_reference(position: int) -> None:
    q = hazard_activations((2, 2, 64), seed=6)
    with pytest.raises((IndexError, RuntimeError)):
        loops.rotary_loop(torch.tensor([0, position]), q, q, *tables(32))
