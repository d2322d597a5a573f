"""Rows on their way to an expert's rank and back, each with where it came from.

A row carries source rank, token, slot and expert beside its values. The receiver reads the expert
from it and the sender the slot, so the order in which rows arrive cannot reach a bit. Nothing is
added on the way: every slot's result returns alone, and the token's own rank sums them.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from consistent_kernels.errors import ConsistencyError, invalid
from consistent_kernels.expert_parallel.placement import ExpertPlacement

_OP = "expert_parallel"
_INTEGERS = (torch.int32, torch.int64)
_FIELDS = 4
_SOURCE, _TOKEN, _SLOT, _EXPERT = range(_FIELDS)


class Exchange(Protocol):
    """Moves packed rows between ranks; all ranks call it together."""

    rank: int
    world_size: int

    def deliver(self, rows: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """Send each row to a rank.

        Args:
            rows: [S, B] uint8.
            destination: [S] int64, a rank each.

        Returns:
            [R, B] uint8, the rows sent here, in any order.
        """


@dataclasses.dataclass(frozen=True)
class Travelled:
    """Rows that arrived.

    Attributes:
        values: [R, H].
        fields: [R, 4] int32: source rank, token, slot, expert.
    """

    values: torch.Tensor
    fields: torch.Tensor

    @property
    def experts(self) -> torch.Tensor:
        """[R] int32, expert ids as the sender knows them."""
        return self.fields[:, _EXPERT]


def _pack(values: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
    parts = (values.contiguous().view(torch.uint8), fields.contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1)


def _unpack(rows: torch.Tensor, width: int, dtype: torch.dtype) -> Travelled:
    size = width * dtype.itemsize
    values = rows[:, :size].contiguous().view(dtype).view(-1, width)
    fields = rows[:, size:].contiguous().view(torch.int32).view(-1, _FIELDS)
    return Travelled(values, fields)


def dispatch(
    x: torch.Tensor, ids: torch.Tensor, exchange: Exchange, placement: ExpertPlacement
) -> Travelled:
    """Send x[t] once for every slot of token t to the rank of the slot's expert.

    Args:
        x: [T, H]; tokens of this rank, possibly none.
        ids: [T, K] global expert ids, -1 goes nowhere.

    Returns:
        The rows whose experts live here.

    Raises:
        InvalidInputError: shapes, dtype or device, an id out of range (on CPU), or a placement for
            another world.
    """
    _check(x, ids, exchange, placement)
    token, slot = (ids >= 0).nonzero(as_tuple=True)
    return _send(x[token], token, slot, ids, exchange, placement)


def dispatch_slots(
    values: torch.Tensor, ids: torch.Tensor, exchange: Exchange, placement: ExpertPlacement
) -> Travelled:
    """As `dispatch`, with a row of its own for every slot: gradients on their way to the experts.

    Args:
        values: [T, K, H]; ids: [T, K].
    """
    if values.dim() != 3 or values.shape[:2] != ids.shape:
        raise invalid(_OP, "values", f"[T, K, H] of ids {tuple(ids.shape)}", tuple(values.shape))
    _check(values[:, 0], ids, exchange, placement)
    token, slot = (ids >= 0).nonzero(as_tuple=True)
    return _send(values[token, slot], token, slot, ids, exchange, placement)


def in_order_of(travelled: Travelled, fields: torch.Tensor) -> Travelled:
    """Return the same rows in the order of `fields` [R, 4], which names each of them once."""
    index = _ranking(fields).argsort()
    order = _ranking(travelled.fields)[index]
    return Travelled(travelled.values[order], travelled.fields[order])


def _ranking(fields: torch.Tensor) -> torch.Tensor:
    # Rows by source, token and slot: stable sorts, the least significant first.
    order = torch.arange(fields.shape[0], device=fields.device)
    for column in (_SLOT, _TOKEN, _SOURCE):
        order = order[torch.sort(fields[order, column], stable=True).indices]
    return order


def give_back(travelled: Travelled, exchange: Exchange, ids: torch.Tensor) -> torch.Tensor:
    """Send rows home and lay them out by token and slot.

    Args:
        travelled: as `dispatch` gave them, with other values of any width.
        ids: [T, K], those of this rank's `dispatch`.

    Returns:
        [T, K, H]; slots that went nowhere hold zeros.

    Raises:
        ConsistencyError: rows were lost, or arrived twice.
    """
    values, fields = travelled.values, travelled.fields
    home = _travel(values, fields, fields[:, _SOURCE].long(), exchange)
    tokens, slots = ids.shape
    place = home.fields[:, _TOKEN].long() * slots + home.fields[:, _SLOT].long()
    arrivals = torch.bincount(place, minlength=tokens * slots)
    if not torch.equal(arrivals, (ids.reshape(-1) >= 0).to(arrivals.dtype)):
        raise ConsistencyError(
            f"{_OP}: rank {exchange.rank} sent {int((ids >= 0).sum())} rows and got {len(place)} "
            "back, some lost or twice; the exchange is broken"
        )
    y = values.new_zeros((tokens * slots, values.shape[1]))
    y[place] = home.values
    return y.view(tokens, slots, values.shape[1])


def _send(
    values: torch.Tensor,
    token: torch.Tensor,
    slot: torch.Tensor,
    ids: torch.Tensor,
    exchange: Exchange,
    placement: ExpertPlacement,
) -> Travelled:
    expert = ids[token, slot].int()
    source = torch.full_like(expert, exchange.rank)
    fields = torch.stack([source, token.int(), slot.int(), expert], dim=1)
    return _travel(values, fields, placement.owners(expert), exchange)


def _travel(
    values: torch.Tensor, fields: torch.Tensor, destination: torch.Tensor, exchange: Exchange
) -> Travelled:
    rows = exchange.deliver(_pack(values, fields), destination)
    return _unpack(rows, values.shape[1], values.dtype)


def _check(
    x: torch.Tensor, ids: torch.Tensor, exchange: Exchange, placement: ExpertPlacement
) -> None:
    if x.dim() != 2 or not x.shape[1]:
        raise invalid(_OP, "x", "[T, H] of at least one column", tuple(x.shape))
    if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise invalid(_OP, "ids", f"[{x.shape[0]}, K]", tuple(ids.shape))
    if ids.dtype not in _INTEGERS:
        raise invalid(_OP, "ids", "int32 or int64", ids.dtype)
    if ids.device != x.device:
        raise invalid(_OP, "ids", f"on {x.device}", ids.device)
    if placement.world_size != exchange.world_size:
        raise invalid(_OP, "placement", f"for {exchange.world_size} ranks", placement.world_size)
    if ids.numel() and ids.device.type == "cpu":
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= placement.num_experts:
            raise invalid(_OP, "ids", f"in [-1, {placement.num_experts})", f"{low} to {high}")
