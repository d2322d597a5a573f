"""Which tokens form which compressed entry: integers only, the same packed and paged."""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.index_range import check_range


@dataclasses.dataclass(frozen=True)
class CompressorParameters:
    """The numbers of one compressor.

    Attributes:
        ratio: tokens of one window (V4: 4 and 128).
        overlap: an entry also takes the window before its own (V4: at ratio 4).
        head_dim: columns of an entry (V4: 512, its indexer 128).
        norm_eps: of the entry's RMS norm.
    """

    ratio: int
    overlap: bool
    head_dim: int
    norm_eps: float

    def __post_init__(self) -> None:
        for name in ("ratio", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise invalid("compressor", name, "an integer, at least 1", value)
        if self.tokens & (self.tokens - 1):
            raise invalid(
                "compressor", "ratio", "such that an entry takes a power of two tokens", self.ratio
            )

    @property
    def tokens(self) -> int:
        """Tokens that an entry is made of."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def state_width(self) -> int:
        """Columns of kv, and of scores, that a token leaves: one series, or two with overlap."""
        return self.head_dim * (2 if self.overlap else 1)


_NO_BOUND = 1 << 31


def _check_integers(op: str, name: str, value: torch.Tensor, dims: int) -> None:
    if value.dim() != dims or value.is_floating_point():
        given = f"{value.dtype} {tuple(value.shape)}"
        raise invalid(op, name, f"{dims}-D integers", given)


def _window_positions(last: torch.Tensor, params: CompressorParameters) -> torch.Tensor:
    """[E, tokens] positions of the tokens of the entries that end at `last` [E]."""
    column = torch.arange(params.tokens, device=last.device)
    return last.unsqueeze(1) - (params.tokens - 1) + column


def paged_windows(
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    params: CompressorParameters,
) -> torch.Tensor:
    """State rows of the entry that each token closes, -1 where it closes none.

    Args:
        positions: [T] of the tokens inside their requests; requests: [T] rows of the block table.
        block_table: [B, n] pages of the state cache; block_size: tokens of a page.

    Returns:
        [T, tokens] int32, rows of the state cache seen as [pages * block_size, ...]; a position
        before the request's first is -1.

    Raises:
        InvalidInputError: shape or dtype; on a CPU, a request or a position that the block table
            does not hold, or a page below 0 that an entry needs.
    """
    op = "paged_windows"
    _check_integers(op, "positions", positions, 1)
    _check_integers(op, "block_table", block_table, 2)
    if requests.shape != positions.shape or requests.is_floating_point():
        given = f"{requests.dtype} {tuple(requests.shape)}"
        raise invalid(op, "requests", f"integers of shape {tuple(positions.shape)}", given)
    if block_size < 1:
        raise invalid(op, "block_size", "at least 1", block_size)
    on_host = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host:
        tokens = block_table.shape[1] * block_size
        check_range(op, "requests", requests, 0, len(block_table))
        check_range(op, "positions", positions, 0, tokens)
    closes = (positions + 1) % params.ratio == 0
    places = _window_positions(positions.long(), params)
    exists = (places >= 0) & closes.unsqueeze(1)
    column = places.clamp_min(0) // block_size
    pages = block_table[requests.long().unsqueeze(1), column.clamp_max(block_table.shape[1] - 1)]
    if on_host:
        needed = torch.where(exists, pages, 0)
        check_range(op, "block_table[requests]", needed, 0, _NO_BOUND, "a page, at least 0")
    rows = pages.long() * block_size + places.clamp_min(0) % block_size
    return torch.where(exists, rows, -1).to(torch.int32)


def packed_windows(
    cu_seqlens: torch.Tensor, params: CompressorParameters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """State rows of all entries of packed sequences, in order.

    Reads the lengths on the host.

    Args:
        cu_seqlens: [B + 1] integers, rows of the packed state at which sequences begin.

    Returns:
        (rows [E, tokens] int32, positions [E] int64 of the entries' first own tokens,
        cu_entries [B + 1] int64).

    Raises:
        InvalidInputError: shape, dtype, or sequences of less than no tokens.
    """
    _check_integers("packed_windows", "cu_seqlens", cu_seqlens, 1)
    starts = cu_seqlens.to("cpu", torch.int64)
    if bool((starts[:1] < 0).any() or (starts[1:] < starts[:-1]).any()):
        raise invalid("packed_windows", "cu_seqlens", "ascending from at least 0", starts.tolist())
    counts = (starts[1:] - starts[:-1]) // params.ratio
    cu_entries = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    sequence = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
    entry = torch.arange(int(cu_entries[-1])) - cu_entries[sequence]
    first = entry * params.ratio
    places = _window_positions(first + params.ratio - 1, params)
    rows = torch.where(places >= 0, places + starts[sequence].unsqueeze(1), -1)
    device = cu_seqlens.device
    return rows.to(device, torch.int32), first.to(device), cu_entries.to(device)
