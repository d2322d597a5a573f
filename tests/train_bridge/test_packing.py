"""Padded, packed and varlen inputs become the same token list."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from train_bridge.packing import PackedBatch, pack

LENGTHS = (3, 1, 5)
LIMITS = {"vocab_size": 100, "max_position": 16}


def sequences() -> list[torch.Tensor]:
    return list(torch.arange(1, 1 + sum(LENGTHS)).split(LENGTHS))


def padded(side: str, fill: int = 99) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(LENGTHS) + 1
    ids = torch.full((len(LENGTHS), width), fill)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences()):
        where = slice(width - len(tokens), width) if side == "left" else slice(0, len(tokens))
        ids[row, where], mask[row, where] = tokens, 1
    return ids, mask


def assert_same_tokens(a: PackedBatch, b: PackedBatch) -> None:
    assert a.ids.tolist() == b.ids.tolist()
    assert a.positions.tolist() == b.positions.tolist()
    assert a.offsets == b.offsets
    assert a.cu_seqlens.tolist() == b.cu_seqlens.tolist() == list(a.offsets)


def one_row() -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return torch.cat(sequences())[None], positions[None]


@pytest.mark.parametrize("side", ["left", "right"])
def test_packing_of_padding_equals_packed_row(side: str) -> None:
    ids, mask = padded(side)
    packed_ids, positions = one_row()
    expected = pack(packed_ids, None, positions, **LIMITS)
    assert_same_tokens(pack(ids, mask, **LIMITS), expected)
    assert_same_tokens(pack(ids, mask.bool(), **LIMITS), expected)
    explicit = (mask.cumsum(1) - 1).clamp(min=0)
    assert_same_tokens(pack(ids, mask, explicit, **LIMITS), expected)
    cu = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    assert_same_tokens(pack(packed_ids, cu_seqlens=cu, **LIMITS), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpack_puts_values_back_and_zeros_padding(side: str) -> None:
    ids, mask = padded(side)
    batch = pack(ids, mask, **LIMITS)
    assert torch.equal(batch.unpack(batch.ids), ids * mask)
    assert torch.equal(batch.unpack(batch.ids[:, None].float()).squeeze(-1).long(), ids * mask)
    assert torch.equal(batch.take(ids), batch.ids)


def test_rows_without_mask_are_sequences() -> None:
    batch = pack(torch.ones(2, 4, dtype=torch.long), **LIMITS)
    assert batch.offsets == (0, 4, 8)
    assert batch.positions.tolist() == [0, 1, 2, 3] * 2


def test_next_ids_stop_at_the_end_of_a_sequence() -> None:
    ids, positions = one_row()
    batch = pack(ids, None, positions, **LIMITS)
    assert batch.next_ids().tolist() == [2, 3, -1, -1, 6, 7, 8, 9, -1]


def test_micro_batches_cover_all_sequences_in_order() -> None:
    ids, mask = padded("left")
    batch = pack(ids, mask, **LIMITS)
    assert list(batch.micro_batches(None, None)) == [(0, 3)]
    assert list(batch.micro_batches(2, None)) == [(0, 2), (2, 3)]
    assert list(batch.micro_batches(None, 4)) == [(0, 2), (2, 3)]
    assert list(batch.micro_batches(None, 2)) == [(0, 1), (1, 2), (2, 3)]
    parts = [batch.sequences(a, b) for a, b in batch.micro_batches(1, None)]
    assert torch.cat([part.ids for part in parts]).tolist() == batch.ids.tolist()
    assert [part.cu_seqlens.tolist() for part in parts] == [[0, n] for n in LENGTHS]


def test_temperature_reaches_each_token() -> None:
    ids, mask = padded("left")
    batch = pack(ids, mask, **LIMITS)
    tokens = torch.arange(9)
    by_row = torch.tensor([0.5, 0.7, 1.3])
    expected = by_row.repeat_interleave(torch.tensor(LENGTHS))
    for given in (by_row, by_row[:, None], by_row[:, None].expand(3, 6), by_row.double()):
        assert torch.equal(batch.per_token(given, tokens), expected)
    assert batch.per_token(None, tokens) == 1.0
    with pytest.raises(InvalidInputError, match="float32 or a Python number"):
        batch.per_token(by_row.bfloat16(), tokens)
    with pytest.raises(InvalidInputError, match="temperature must be of shape"):
        batch.per_token(torch.ones(3, 5), tokens)


@pytest.mark.parametrize("value", [0.0099, 1e-6, -1.0, 2.1, float("nan"), float("inf")])
def test_temperature_that_vllm_does_not_divide_by_is_refused(value: float) -> None:
    batch = pack(*padded("left"), **LIMITS)
    tokens = torch.arange(9)
    for given in (value, torch.tensor([1.0, 0.0, value])):
        with pytest.raises(InvalidInputError, match=r"temperature must be 0 .* or 0\.01 to 2\.0"):
            batch.per_token(given, tokens)
    # Of a row that is not scored nothing is asked.
    first = tokens[: LENGTHS[0]]
    assert torch.equal(batch.per_token(torch.tensor([1.0, 0.0, value]), first), first * 0 + 1.0)


def test_lowest_temperature_is_vllms() -> None:
    batch = pack(*padded("left"), **LIMITS)
    assert batch.per_token(0.01, torch.arange(9)) == 0.01
    rows = torch.full((3,), 0.01)
    assert torch.equal(batch.per_token(rows, torch.arange(9)), torch.full((9,), 0.01))


def test_kept_columns_follow_hugging_face() -> None:
    ids, mask = padded("right")
    batch = pack(ids, mask, **LIMITS)
    values = batch.ids.float()
    assert batch.kept(0) is None
    for keep, columns in ((2, slice(-2, None)), (torch.tensor([0, 4]), [0, 4])):
        kept = batch.kept(keep)
        expected = (ids * mask).float()[:, columns]
        assert torch.equal(kept.unpack(values.index_select(0, kept.rows)), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(4, dtype=torch.long)}, "input_ids must be integers of shape"),
        ({"input_ids": torch.ones(1, 4)}, "input_ids must be integers"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask must be of shape"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "a gap before row 0, column 2"),
        ({"attention_mask": torch.zeros(1, 4)}, "one real token at least"),
        (
            {"attention_mask": torch.tensor([[0.0, 0.0, 0.0, -torch.inf]])},
            "attention_mask must be bool, or 0 and 1, got torch.float32 with -inf",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 2, 2]])},
            "got torch.int64 with 2.* told apart by position_ids",
        ),
        ({"attention_mask": torch.full((1, 4), torch.nan)}, "got torch.float32 with nan"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.bool)}, "integers .*, got torch.bool"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.complex64)}, "integers .*, got torch.complex"),
        ({"position_ids": torch.ones(1, 4, dtype=torch.bool)}, "position_ids must be integers"),
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "must be 2 at row 0, column 2, got 3"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "must be 0 at row 0, column 0, got 1"),
        ({"position_ids": torch.zeros(3, 1, 4, dtype=torch.long)}, "position_ids must be integers"),
        ({"input_ids": torch.tensor([[1, 2, 100, 3]])}, "below 100, got 100 at row 0, column 2"),
        ({"input_ids": torch.tensor([[1, -100, 5, 3]])}, "got -100 at row 0, column 1"),
        ({"input_ids": torch.ones(1, 17, dtype=torch.long)}, "a sequence must be below 16"),
        ({"cu_seqlens": [0, 3]}, "ascending from 0 to 4"),
        (
            {"cu_seqlens": [0, 4], "attention_mask": torch.ones(1, 4)},
            "given without attention_mask",
        ),
    ],
)
def test_pack_rejects_what_is_ambiguous(arguments: dict, message: str) -> None:
    arguments = {"input_ids": torch.ones(1, 4, dtype=torch.long)} | arguments
    with pytest.raises(InvalidInputError, match=message):
        pack(**arguments, **LIMITS)


def test_packing_control_left_padding_needs_counted_positions() -> None:
    ids, mask = padded("left")
    stock_positions = torch.arange(ids.shape[1])[None]
    with pytest.raises(InvalidInputError, match="count from 0 in each sequence"):
        pack(ids, mask, stock_positions, **LIMITS)
