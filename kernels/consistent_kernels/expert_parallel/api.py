"""Experts over several ranks: rows travel, one op computes them, the token's rank sums them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.expert_parallel.placement import ExpertPlacement
from consistent_kernels.expert_parallel.rows import Exchange, Travelled, dispatch, give_back
from consistent_kernels.experts import combine, expert_outputs


def over_ranks(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    outputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    exchange: Exchange,
    placement: ExpertPlacement,
) -> torch.Tensor:
    """Compute each slot of each token at the rank of its expert; all ranks call it together.

    Args:
        x: [T, H], this rank's tokens; T may differ between ranks and be 0.
        topk_ids: [T, K], global ids.
        outputs: gives [R, 1, H] for rows [R, H] and ids [R, 1] of this rank's experts, from 0.
        exchange: moves the rows.
        placement: who holds which experts.

    Returns:
        [T, K, H]; slots that went nowhere hold zeros.

    Raises:
        InvalidInputError: shapes or ids. ConsistencyError: the exchange lost a row.
    """
    arrived = dispatch(x, topk_ids, exchange, placement)
    first = placement.first(exchange.rank)
    y = outputs(arrived.values, (arrived.experts - first)[:, None].contiguous())
    return give_back(Travelled(y[:, 0], arrived.fields), exchange, topk_ids)


def expert_parallel_outputs(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    exchange: Exchange,
    placement: ExpertPlacement,
    limit: float | None = None,
    layout: str = "contiguous",
    impl: str,
) -> torch.Tensor:
    """`expert_outputs` with the experts spread over ranks; all ranks call it together.

    Args:
        x: [T, H], this rank's tokens; T may differ between ranks and be 0.
        w13: [E_local, 2 I, H]; w2: [E_local, H, I]; the experts of `placement.experts(rank)`.
        topk_ids: [T, K], global ids.
        exchange: moves the rows.
        placement: who holds which experts.
        limit, layout, impl: as in `expert_outputs`.

    Returns:
        [T, K, H], the bits of `expert_outputs` with all experts on one rank.

    Raises:
        InvalidInputError: shapes, ids, or weights of another number of experts.
        ConsistencyError: the exchange lost a row.
    """
    mine = placement.experts(exchange.rank)
    if w13.dim() != 3 or w13.shape[0] != mine.stop - mine.start:
        raise invalid(
            "expert_parallel",
            "w13",
            f"[E, 2 I, H] of {mine.stop - mine.start} experts ({mine.start} to {mine.stop - 1})",
            tuple(w13.shape),
        )

    def outputs(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return expert_outputs(rows, w13, w2, local, limit=limit, layout=layout, impl=impl)

    return over_ranks(x, topk_ids, outputs, exchange=exchange, placement=placement)


def expert_parallel_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    *,
    exchange: Exchange,
    placement: ExpertPlacement,
    limit: float | None = None,
    layout: str = "contiguous",
    impl: str,
) -> torch.Tensor:
    """`experts` with the experts spread over ranks; arguments as there and above.

    Returns:
        [T, H], the bits of `experts` with all experts on one rank.
    """
    y = expert_parallel_outputs(
        x,
        w13,
        w2,
        topk_ids,
        exchange=exchange,
        placement=placement,
        limit=limit,
        layout=layout,
        impl=impl,
    )
    return combine(y, topk_ids, topk_weights, shared, impl=impl)
