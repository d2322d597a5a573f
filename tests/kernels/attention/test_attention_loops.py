"""The gathering loop moves what two PyTorch calls moved, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="the compiled loops need Numba, which comes with vLLM")

from consistent_kernels.attention import AttentionParameters, attention_varlen, loops, reference
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations


@pytest.mark.parametrize(("heads", "width"), [(1, 64), (3, 64), (2, 80), (8, 128)])
@pytest.mark.parametrize("row_step", [1, 3])
def test_gather_equals_index_select(heads: int, width: int, row_step: int) -> None:
    """Contiguous rows, and rows of pages that stand apart; NaN payloads too."""
    pages = hazard_activations((200, heads, width), seed=1)
    pages.view(torch.int16)[7] = 0x7FC5
    rows = pages[::row_step]
    index = torch.randint(0, len(rows), (5 * 64,), generator=torch.Generator().manual_seed(2))
    tiles = torch.full((5, heads, 64, width), torch.nan)
    assert loops.gather_tiles(rows, index, tiles)
    expected = rows[index].view(5, 64, heads, width).transpose(1, 2).float()
    assert_bitwise_equal(tiles, expected.contiguous())


def test_other_layouts_and_bad_indices_are_left_to_pytorch() -> None:
    rows = hazard_activations((20, 2, 64), seed=3)
    tiles = torch.empty(1, 2, 64, 64)
    index = torch.zeros(64, dtype=torch.int64)
    assert not loops.gather_tiles(rows.float(), index, tiles)
    assert not loops.gather_tiles(rows.transpose(0, 1), index, tiles)
    for bad in (-1, 20):
        index[5] = bad
        assert not loops.gather_tiles(rows, index, tiles)


def test_attention_has_the_same_bits_without_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    params = AttentionParameters(6, 2, 64, 0.125)
    q = hazard_activations((90, 6, 64), seed=4)
    k, v = (hazard_activations((90, 2, 64), seed=seed) for seed in (5, 6))
    cu = torch.tensor([0, 1, 20, 90], dtype=torch.int32)
    with_loop = attention_varlen(q, k, v, cu, cu, params=params, impl="reference")
    monkeypatch.setattr(reference, "_loops_module", lambda: None)
    without = attention_varlen(q, k, v, cu, cu, params=params, impl="reference")
    for a, b in zip(with_loop, without, strict=True):
        assert_bitwise_equal(a, b)


def test_control_a_shifted_row_is_seen() -> None:
    rows = hazard_activations((20, 2, 64), seed=7)
    index = torch.arange(64) % 19
    tiles, other = torch.empty(2, 1, 2, 64, 64).unbind(0)
    assert loops.gather_tiles(rows, index, tiles)
    assert loops.gather_tiles(rows, index + 1, other)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(tiles, other)
