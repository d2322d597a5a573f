"""What the modules of one bridged GPTModel share, and where a batch's sequences lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from consistent_kernels.attention import plan_attention
from consistent_kernels.attention.plan import AttentionPlan
from consistent_kernels.errors import invalid
from train_bridge.functions.ambient import plain_settings
from train_bridge.megatron.conversion import qkv_rows, qkv_sizes
from train_bridge.state import BridgeState
from train_bridge.weight_version import MODEL_DTYPE

COLUMN_CUT = 64
"""Fused columns equal separate ones where the cuts are multiples of this (see `linear`)."""


class BatchLayout:
    """Sequences of one forward; the same for all layers.

    Attributes:
        positions: [s * b] int64 in megatron-core's token order (sequence position first).
        cu_seqlens: [n + 1] int32 borders in attention's token order (one sequence after another).
        columns: b, of the [s, b, h] input; 1 where packed (thd).
        plan: attention's, for all layers.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        columns: int,
        plan: AttentionPlan,
    ) -> None:
        self.positions = positions
        self.cu_seqlens = cu_seqlens
        self.columns = columns
        self.plan = plan


@dataclasses.dataclass
class MegatronState(BridgeState):
    """As BridgeState; with the layout of the latest batch and the rows of fused weights.

    Attributes:
        rows: module name to the order in which the engine reads the rows of its weight.
        parts: module name to the sizes of the parts that are multiplied apart: a cut between them
            is no multiple of 64 columns.
        head: name of the module that owns the output head's weight.
    """

    rows: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    parts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    head: str = "output_layer"
    _layout: tuple[Any, BatchLayout] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_layout": None}

    def engine_rows(self, name: str, master: torch.Tensor) -> torch.Tensor:
        """Return the rows of a master in the engine's order, padded vocabulary rows left out."""
        if name == self.head:
            return master[: self.facts.vocab_size]
        rows = self.rows.get(name)
        return master if rows is None else master.index_select(0, rows.to(master.device))

    def prepared_stack(self, name: str, masters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weights of all experts [E, N, K], rounded once per weight version.

        Args:
            name: of the module that owns them.
            masters: one an expert, each [N, K].
        """

        def stack() -> torch.Tensor:
            # Rounded one by one: no copy of all fp32 masters.
            rounded = [master.detach().to(MODEL_DTYPE) for master in masters]
            return self._prepare_experts(torch.stack(rounded))

        return self._kept(name, tuple(masters), stack)

    def note_fused(self, name: str) -> None:
        """Note the order and the cuts of a fused weight: linear_qkv or linear_fc1, by its name."""
        if name.endswith(".linear_qkv"):
            self.rows[name] = qkv_rows(self.facts)
            sizes = list(qkv_sizes(self.facts))
        elif name.endswith(".linear_fc1"):
            sizes = [self.facts.intermediate_size] * 2
        else:
            return
        if any(size % COLUMN_CUT for size in sizes[:-1]):
            self.parts[name] = sizes

    def layout(
        self, length: int, columns: int, device: torch.device, packed: PackedSeqParams | None
    ) -> BatchLayout:
        """Return the layout of a [length, columns, ...] input, made once for all layers.

        Args:
            length, columns: s and b.
            packed: thd borders; None means that each column is one sequence from position 0
                (padding at its end changes nothing: attention is causal).

        Raises:
            InvalidInputError: borders that describe no packing, or a sequence that is too long.
        """
        borders = None if packed is None else packed.cu_seqlens_q
        key = (packed, length, columns, device, None if borders is None else borders._version)
        if self._layout is not None and _same(self._layout[0], key):
            return self._layout[1]
        made = self._make_layout(length, columns, device, packed)
        self._layout = (key, made)
        return made

    def _make_layout(
        self, length: int, columns: int, device: torch.device, packed: PackedSeqParams | None
    ) -> BatchLayout:
        if packed is None:
            positions = torch.arange(length, device=device).repeat_interleave(columns)
            cu = torch.arange(columns + 1, device=device, dtype=torch.int32) * length
            longest = length
        else:
            cu = _borders(packed, length, columns)
            starts = torch.zeros(length, dtype=torch.int64, device=device)
            inner = cu[:-1].long()
            sizes = cu.diff()
            starts[: int(cu[-1])] = inner.repeat_interleave(sizes)
            positions = torch.arange(length, device=device) - starts
            positions[int(cu[-1]) :] = 0
            longest = int(sizes.max())
        if longest > self.rope.max_position:
            raise invalid(
                "forward",
                "a sequence",
                f"at most {self.rope.max_position} tokens",
                longest,
                "max_position_embeddings bounds the length of a sequence",
            )
        with plain_settings(device.type):
            plan = plan_attention(
                cu,
                params=self.attention,
                num_tokens=length * columns,
                impl=self.impl("attention"),
                cu_seqlens_k=cu,
            )
        return BatchLayout(positions, cu, columns, plan)


def _same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return ours[0] is theirs[0] and ours[1:] == theirs[1:]


def _borders(packed: PackedSeqParams, length: int, columns: int) -> torch.Tensor:
    if packed.qkv_format != "thd":
        raise invalid("forward", "packed_seq_params.qkv_format", "'thd'", packed.qkv_format)
    if columns != 1:
        raise invalid("forward", "a packed batch", "of shape [T, 1, H]", f"{columns} columns")
    cu = packed.cu_seqlens_q
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        other = getattr(packed, name, None)
        if other is not None and other is not cu and not torch.equal(other, cu):
            raise invalid(
                "forward",
                f"packed_seq_params.{name}",
                "equal to cu_seqlens_q",
                "other borders",
                "Pack without alignment padding (TP 1, CP 1 need none)",
            )
    ends = cu.to("cpu", torch.int64)
    if ends.numel() < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        raise invalid("forward", "cu_seqlens_q", "ascending from 0", ends.tolist()[:8])
    if int(ends[-1]) > length:
        raise invalid("forward", "cu_seqlens_q", f"at most {length} at its end", int(ends[-1]))
    return cu.int()
