"""Turns padded, packed and varlen inputs into one packed token list, and results back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from consistent_kernels.attention import AttentionParameters, plan_attention
from consistent_kernels.attention.plan import AttentionPlan
from consistent_kernels.errors import invalid
from consistent_kernels.protocol.temperature import check_temperature
from train_bridge.functions.ambient import plain_settings


@dataclasses.dataclass(frozen=True)
class Kept:
    """Some columns of a batch.

    Attributes:
        rows: [N] int64, packed tokens in them.
        index: [N] int64, where those stand in the flattened columns.
        shape: (B, columns).
    """

    rows: torch.Tensor
    index: torch.Tensor
    shape: tuple[int, int]

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Put [N, ...] back to [B, columns, ...]; 0 where there was padding."""
        return _spread(values, self.index, self.shape)


class PackedBatch:
    """Real tokens of a batch, sequence after sequence; padding is never computed.

    A plain class: FSDP2 casts float tensors in pytrees and dataclasses that cross a layer's border.

    Attributes:
        ids: [T] int64.
        positions: [T] int64, from 0 in each sequence.
        cu_seqlens: [S + 1] int32, on the device.
        offsets: the same numbers on the host.
        index: [T] int64, where each token stands in the flattened input.
        shape: (B, L) of the input.
        plan: what attention computes once for all layers, where `planned` was called.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        offsets: tuple[int, ...],
        index: torch.Tensor,
        shape: tuple[int, int],
        plan: AttentionPlan | None = None,
    ) -> None:
        self.ids = ids
        self.positions = positions
        self.cu_seqlens = cu_seqlens
        self.offsets = offsets
        self.index = index
        self.shape = shape
        self.plan = plan

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.offsets[-1]

    def planned(self, params: AttentionParameters, impl: str) -> PackedBatch:
        """Return the batch with attention's plan."""
        with plain_settings(self.ids.device.type):
            plan = plan_attention(
                self.cu_seqlens,
                params=params,
                num_tokens=self.num_tokens,
                impl=impl,
                cu_seqlens_k=self.cu_seqlens,
            )
        return PackedBatch(
            self.ids, self.positions, self.cu_seqlens, self.offsets, self.index, self.shape, plan
        )

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Put [T, ...] back to [B, L, ...]; 0 where there was padding."""
        return _spread(values, self.index, self.shape)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Take a [B, L] tensor at the real tokens: [T]."""
        return values.reshape(-1)[self.index]

    def next_ids(self) -> torch.Tensor:
        """[T] int64: the token after each one in its sequence, -1 after the last."""
        ids = torch.full_like(self.ids, -1)
        ids[:-1] = torch.where(self.positions[1:] == 0, -1, self.ids[1:])
        return ids

    def per_token(
        self, temperature: float | torch.Tensor | None, tokens: torch.Tensor
    ) -> float | torch.Tensor:
        """Return the temperature of the given packed tokens, one number or [N] fp32.

        Args:
            temperature: one number, or a float tensor [B], [B, 1] or [B, L]; None means 1.
            tokens: [N] int64.

        Raises:
            InvalidInputError: another shape, a dtype that cannot hold the engine's divisor, or a
                value that vLLM would not divide by.
        """
        if temperature is None:
            return 1.0
        if not isinstance(temperature, torch.Tensor):
            check_temperature("forward", temperature)
            return float(temperature)
        if temperature.dtype not in (torch.float32, torch.float64):
            raise invalid(
                "forward",
                "temperature",
                "float32 or a Python number",
                temperature.dtype,
                "A cast of the inputs (FSDP, autocast) has rounded it; pass a number instead",
            )
        rows, width = self.shape
        grid = temperature.to(self.ids.device, torch.float32)
        if grid.dim() == 1 and grid.numel() == rows:
            grid = grid.unsqueeze(1)
        if grid.dim() > 2 or not all(
            size in (1, full) for size, full in zip(grid.shape[::-1], (width, rows), strict=False)
        ):
            raise invalid(
                "forward",
                "temperature",
                f"of shape ({rows},), ({rows}, 1) or ({rows}, {width})",
                tuple(temperature.shape),
            )
        mine = self.take(grid.expand(rows, width)).index_select(0, tokens)
        check_temperature("forward", mine)
        return mine

    def kept(self, logits_to_keep: int | torch.Tensor) -> Kept | None:
        """Return the columns that Hugging Face's `logits_to_keep` leaves; None means all."""
        rows, width = self.shape
        if isinstance(logits_to_keep, int):
            if logits_to_keep == 0:
                return None
            columns = torch.arange(max(width - logits_to_keep, 0), width)
        else:
            columns = logits_to_keep
        columns = columns.to(self.ids.device).remainder(width)
        at = torch.full((rows * width,), -1, device=self.ids.device)
        at[self.index] = torch.arange(self.num_tokens, device=self.ids.device)
        chosen = at.view(rows, width)[:, columns]
        index = (chosen.reshape(-1) >= 0).nonzero().squeeze(1)
        return Kept(chosen.reshape(-1)[index], index, (rows, columns.numel()))

    def sequences(self, start: int, stop: int) -> PackedBatch:
        """Return sequences [start, stop) alone, as one packed row."""
        first, last = self.offsets[start], self.offsets[stop]
        tokens = last - first
        return PackedBatch(
            ids=self.ids[first:last],
            positions=self.positions[first:last],
            cu_seqlens=self.cu_seqlens[start : stop + 1] - first,
            offsets=tuple(offset - first for offset in self.offsets[start : stop + 1]),
            index=torch.arange(tokens, device=self.ids.device),
            shape=(1, tokens),
        )

    def micro_batches(
        self, max_sequences: int | None, max_tokens: int | None
    ) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of consecutive sequences within both limits, in order.

        A sequence longer than `max_tokens` forms a micro-batch of its own.
        """
        count = len(self.offsets) - 1
        start = 0
        for stop in range(1, count + 1):
            full = stop == count
            full |= max_sequences is not None and stop - start >= max_sequences
            if not full and max_tokens is not None:
                full = self.offsets[stop + 1] - self.offsets[start] > max_tokens
            if full:
                yield start, stop
                start = stop


def _spread(values: torch.Tensor, index: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    size = shape[0] * shape[1]
    if index.numel() != size:
        full = values.new_zeros((size, *values.shape[1:]))
        values = full.index_copy(0, index, values)
    return values.reshape(*shape, *values.shape[1:])


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    *,
    vocab_size: int,
    max_position: int,
) -> PackedBatch:
    """Find the sequences of a batch.

    A sequence starts where a row starts, where `position_ids` is 0, or where `cu_seqlens` says.
    Positions always count from 0 inside a sequence, also after left padding.

    Args:
        input_ids: [B, L] integers.
        attention_mask: [B, L], bool or 0/1, 1 on real tokens; None means all are.
        position_ids: [B, L] or [1, L] integers; must count from 0 in each sequence.
        cu_seqlens: [S + 1] ascending from 0 to B * L, as in varlen attention; without a mask only.
        vocab_size: ids lie below.
        max_position: sequences are at most this long.

    Raises:
        InvalidInputError: a shape, an id or a position that is none of the above.
    """
    _check_shapes(input_ids, attention_mask, position_ids, cu_seqlens)
    rows, width = input_ids.shape
    device = input_ids.device
    if attention_mask is None:
        index = torch.arange(rows * width, device=device)
    else:
        real = is_marked("attention_mask", attention_mask.to(device))
        index = real.reshape(-1).nonzero().squeeze(1)
    if index.numel() == 0:
        raise invalid("forward", "input_ids", "one real token at least", f"{rows}x{width} padding")
    ids = input_ids.reshape(-1)[index].long()
    given = None
    if position_ids is not None:
        given = position_ids.to(device).expand(rows, width).reshape(-1)[index].long()
    starts_here = _sequence_starts(index, width, given, cu_seqlens)
    starts = starts_here.nonzero().squeeze(1)
    positions = torch.arange(index.numel(), device=device)
    positions = positions - starts[starts_here.cumsum(0) - 1]
    _check_positions(index, width, positions, given, starts_here)
    _check_range("input_ids", ids, index, width, vocab_size, "")
    _check_range(
        "a sequence",
        positions,
        index,
        width,
        max_position,
        "max_position_embeddings bounds the length of a sequence",
    )
    offsets = (*starts.tolist(), index.numel())
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    return PackedBatch(ids, positions, cu, offsets, index, (rows, width))


def _check_shapes(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
) -> None:
    if input_ids.dim() != 2 or not _integral(input_ids):
        raise invalid(
            "forward",
            "input_ids",
            "integers of shape (B, L)",
            f"{input_ids.dtype} of shape {tuple(input_ids.shape)}",
        )
    shape = tuple(input_ids.shape)
    if attention_mask is not None and tuple(attention_mask.shape) != shape:
        raise invalid(
            "forward",
            "attention_mask",
            f"of shape {shape}",
            tuple(attention_mask.shape),
            "Give the 2-D padding mask; causality is built in",
        )
    if position_ids is not None and (
        tuple(position_ids.shape) not in (shape, (1, shape[1])) or not _integral(position_ids)
    ):
        raise invalid(
            "forward",
            "position_ids",
            f"integers of shape {shape}",
            f"{position_ids.dtype} of shape {tuple(position_ids.shape)}",
        )
    if cu_seqlens is not None and attention_mask is not None:
        raise invalid(
            "forward",
            "cu_seqlens",
            "given without attention_mask",
            "both",
            "Remove the padding, or drop cu_seqlens",
        )


def _integral(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def is_marked(name: str, mask: torch.Tensor, op: str = "forward") -> torch.Tensor:
    """Return `mask` as bool.

    Raises:
        InvalidInputError: a value other than 0 and 1: an additive mask has 0 on the tokens that
            count, and a mask of sequence numbers would join the sequences.
    """
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        wrong = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        raise invalid(
            op,
            name,
            "bool, or 0 and 1",
            f"{mask.dtype} with {wrong}",
            "1 marks a real token; sequences of a packed row are told apart by position_ids",
        )
    return mask != 0


def _sequence_starts(
    index: torch.Tensor,
    width: int,
    given: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
) -> torch.Tensor:
    """[T] bool: where sequences start."""
    starts = torch.ones(index.numel(), dtype=torch.bool, device=index.device)
    row = torch.div(index, width, rounding_mode="floor")
    starts[1:] = row[1:] != row[:-1]
    if cu_seqlens is not None:
        cuts = torch.as_tensor(cu_seqlens, device=index.device).long()
        ascending = cuts.numel() >= 2 and bool((cuts[1:] >= cuts[:-1]).all())
        if not ascending or int(cuts[0]) != 0 or int(cuts[-1]) != index.numel():
            raise invalid(
                "forward", "cu_seqlens", f"ascending from 0 to {index.numel()}", cuts.tolist()[:8]
            )
        starts[cuts[cuts < index.numel()]] = True
    elif given is not None:
        starts |= given == 0
    return starts


def _check_positions(
    index: torch.Tensor,
    width: int,
    positions: torch.Tensor,
    given: torch.Tensor | None,
    starts_here: torch.Tensor,
) -> None:
    gap = (index[1:] - index[:-1] != 1) & ~starts_here[1:]
    if bool(gap.any()):
        token = int(index[1:][gap][0])
        raise invalid(
            "forward",
            "attention_mask",
            "one run of ones for each sequence",
            f"a gap before row {token // width}, column {token % width}",
            "Positions after a gap are ambiguous: pad on one side only",
        )
    if given is None or bool((given == positions).all()):
        return
    wrong = int((given != positions).nonzero()[0])
    token = int(index[wrong])
    raise invalid(
        "forward",
        "position_ids",
        f"{int(positions[wrong])} at row {token // width}, column {token % width}",
        int(given[wrong]),
        "Positions count from 0 in each sequence, as the engine counts them",
    )


def _check_range(
    what: str, values: torch.Tensor, index: torch.Tensor, width: int, limit: int, hint: str
) -> None:
    low, high = (int(value) for value in values.aminmax())
    if low >= 0 and high < limit:
        return
    wrong = int(((values < 0) | (values >= limit)).nonzero()[0])
    token = int(index[wrong])
    raise invalid(
        "forward",
        what,
        f"below {limit}",
        f"{int(values[wrong])} at row {token // width}, column {token % width}",
        hint,
    )
