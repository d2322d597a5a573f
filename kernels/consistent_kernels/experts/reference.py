"""The experts in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.linear.onednn import linear_onednn
from consistent_kernels.linear.reference import linear_ref

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
LINEAR: dict[str, Linear] = {"reference": linear_ref, "onednn": linear_onednn}


def gated_activation(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """round(silu(gate) * up) with the inputs clamped first, in fp32 up to the one rounding.

    Args:
        gate, up: [R, I], the model dtype.
        limit: DeepSeek-V4's swiglu_limit, or None.
    """
    g32, u32 = gate.float(), up.float()
    if limit is not None:
        g32 = g32.clamp(max=limit)
        u32 = u32.clamp(min=-limit, max=limit)
    # torch.exp has one form wherever an element stands; F.silu has not.
    return (g32 / torch.neg(g32).exp_().add_(1.0)).mul_(u32).to(gate.dtype)


def sorted_rows(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """Sort (token, slot) rows by expert.

    Args:
        ids: [T, K], -1 in slots that go nowhere.

    Returns:
        (flat row indices [R] int64 of the rows that go somewhere, by expert and then by index;
        the number of rows of each expert).
    """
    flat = ids.reshape(-1).long()
    keys = torch.where(flat < 0, num_experts, flat)
    order = torch.sort(keys, stable=True).indices
    counts = torch.bincount(keys, minlength=num_experts + 1).tolist()
    return order[: flat.numel() - counts[num_experts]], counts[:num_experts]


def expert_slices(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of the sorted rows) for each expert that has rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def laid_out(
    rows: torch.Tensor, counts: list[int], tokens: int, layout: str, op: str
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Yield (expert, slice of the sorted rows, its rows as they stand in the layout).

    Args:
        rows: [R, H], sorted by expert.
        counts: rows of each expert.
        tokens: places of an expert in the masked layout.
        layout: "masked": [E, tokens] places, NaN where no row stands; else `rows` themselves.
        op: for errors.
    """
    if layout != "masked":
        for expert, part in expert_slices(counts):
            yield expert, part, rows[part]
        return
    if max(counts) > tokens:
        raise invalid(
            op,
            "topk_ids",
            f"at most {tokens} rows of one expert in the masked layout",
            max(counts),
            "Ids of a token must be distinct",
        )
    buffer = rows.new_full((len(counts), tokens, rows.shape[1]), float("nan"))
    for expert, part in expert_slices(counts):
        buffer[expert, : counts[expert]] = rows[part]
    for expert, part in expert_slices(counts):
        yield expert, part, buffer[expert, : counts[expert]]


def _mlp(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float | None, linear: Linear
) -> torch.Tensor:
    gate, up = linear(x, w13, None, x.dtype).chunk(2, dim=1)
    return linear(gated_activation(gate, up, limit), w2, None, x.dtype)


def expert_outputs_ref(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    layout: str,
    linear: Linear,
) -> torch.Tensor:
    """See `consistent_kernels.experts.api.expert_outputs`.

    Every row goes through `linear`, whose rows do not know each other, so neither the layout nor
    the number of an expert's rows can reach a bit.
    """
    tokens, slots = ids.shape
    order, counts = sorted_rows(ids, w13.shape[0])
    rows = x[order // slots]
    y = x.new_zeros((tokens * slots, w2.shape[1]))
    for expert, part, mine in laid_out(rows, counts, tokens, layout, "experts"):
        y[order[part]] = _mlp(mine, w13[expert], w2[expert], limit, linear)
    return y.view(tokens, slots, w2.shape[1])


def combine_ref(
    y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """See `consistent_kernels.experts.api.combine`."""
    total = torch.zeros(y.shape[0], y.shape[2], device=y.device, dtype=torch.float32)
    for slot in range(y.shape[1]):
        product = weights[:, slot, None] * y[:, slot].float()
        total += torch.where(ids[:, slot, None] >= 0, product, 0.0)
    if shared is not None:
        total += shared.float()
    return total.to(y.dtype)
