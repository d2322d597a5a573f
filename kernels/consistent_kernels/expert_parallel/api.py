"""Experts over several ranks: rows travel, one op computes them, the token's rank sums them."""

from __future__ import annotations

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.expert_parallel.placement import ExpertPlacement
from consistent_kernels.expert_parallel.rows import Exchange, Travelled, dispatch, give_back
from consistent_kernels.experts import combine, expert_outputs


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
    if w13.shape[0] != mine.stop - mine.start:
        raise invalid(
            "expert_parallel",
            "w13",
            f"of {mine.stop - mine.start} experts ({mine.start} to {mine.stop - 1})",
            w13.shape[0],
        )
    arrived = dispatch(x, topk_ids, exchange, placement)
    local = (arrived.experts - mine.start)[:, None].contiguous()
    y = expert_outputs(arrived.values, w13, w2, local, limit=limit, layout=layout, impl=impl)
    return give_back(Travelled(y[:, 0], arrived.fields), exchange, topk_ids)


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
