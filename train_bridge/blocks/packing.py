"""What a packed batch says of its tokens: integers, shared by all layers."""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.errors import invalid


@dataclasses.dataclass(frozen=True)
class PackedSequences:
    """Sequences one after another, each from its position 0.

    Attributes:
        cu_seqlens: [B + 1] int64 rows at which sequences begin.
        positions: [T] int64 inside the sequence.
        starts: [T] int64 first row of each token's sequence.
        sequence: [T] int64 number of each token's sequence.
    """

    cu_seqlens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    sequence: torch.Tensor

    @classmethod
    def from_lengths(
        cls, lengths: list[int], device: torch.device | str = "cpu"
    ) -> PackedSequences:
        """Describe sequences of the given lengths.

        Raises:
            InvalidInputError: a length below 0.
        """
        if min(lengths, default=0) < 0:
            raise invalid("PackedSequences", "lengths", "at least 0", lengths)
        counts = torch.tensor(lengths, dtype=torch.int64)
        borders = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        starts = borders[sequence]
        positions = torch.arange(int(borders[-1])) - starts
        tensors = (borders, positions, starts, sequence)
        return cls(*(tensor.to(device) for tensor in tensors))
