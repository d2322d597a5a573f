"""The router in Triton: one program a token; sums in a written-down tree, choices on integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.router.parameters import RouterParameters
from consistent_kernels.router.spec import DENOMINATOR_FLOOR, NUM_WARPS
from consistent_kernels.triton_tree import halving_tree_sum_by_pairs

_NEVER = tl.constexpr(-(1 << 31))
_SIGN = tl.constexpr(-(1 << 31))
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _ordered(choice):
    """int32 that order `choice`; -0.0 as +0.0, NaN as -inf."""
    plain = tl.where(choice != choice, float("-inf"), choice)
    plain = tl.where(plain == 0.0, 0.0, plain)
    bits = plain.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def _from_ordered(order):
    """The float that `_ordered` gave `order` for."""
    return tl.where(order >= 0, order, (-order) | _SIGN).to(tl.float32, bitcast=True)


@triton.jit
def _group_scores(order, member, index, HAS_SECOND: tl.constexpr):
    """[GROUPS] scores of [GROUPS, N] choices: the largest, or the two largest added.

    Args:
        order: ordered choices.
        member: whether a choice is its group's.
        index: places, to leave out one of equal largest.
    """
    order = tl.where(member, order, _NEVER)
    first = tl.max(order, 1)
    scores = _from_ordered(first)
    if HAS_SECOND:
        largest = member & (order == first[:, None])
        place = tl.min(tl.where(largest, index, _LAST), 1)
        second = tl.max(tl.where(index == place[:, None], _NEVER, order), 1)
        scores += _from_ordered(second)
    return scores


@triton.jit
def _best_groups(scores, GROUPS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr):
    """[BLOCK] whether each of GROUPS is among the TOP largest, lower groups first."""
    group = tl.arange(0, BLOCK)
    order = tl.where(group < GROUPS, _ordered(scores), _NEVER)
    key = order.to(tl.int64) * BLOCK + (BLOCK - 1 - group)
    above = tl.reshape(key, (1, BLOCK)) > tl.reshape(key, (BLOCK, 1))
    return (tl.sum(above.to(tl.int32), 1) < TOP) & (group < GROUPS)


@triton.jit
def _scores(logits, largest, sum_of, SCORING: tl.constexpr):
    """Scores of some logits of a row, each by itself."""
    ones = tl.full(logits.shape, 1.0, tl.float32)
    if SCORING == "softmax":
        return tl.div_rn(tl.exp(logits - largest), ones * sum_of)
    elif SCORING == "sigmoid":
        return tl.div_rn(ones, 1.0 + tl.exp(-logits))
    else:
        positive = tl.where(logits > 0.0, logits, tl.where(logits != logits, logits, 0.0))
        return tl.sqrt_rn(positive + libdevice.log1p(tl.exp(-tl.abs(logits))))


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(do_not_specialize=["scale", "floor"])
def _router_fwd_kernel(
    logits_ptr,  # [T, E], row stride logits_stride
    bias_ptr,  # [E] or unused
    forced_ptr,  # [T, K] int32 or unused
    valid_ptr,  # [T] int8 or unused
    ids_ptr,  # [T, K] int32 contiguous
    weights_ptr,  # [T, K] fp32 contiguous
    logits_stride,
    scale,
    floor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORCED: tl.constexpr,
    HAS_VALID: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    SPLIT_GROUPS: tl.constexpr,  # E and GROUPS are powers of two
    TOP_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=float("-inf"))
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
    if SCORING == "softmax":
        largest = tl.max(logits, 0)
        exponent = tl.where(inside, tl.exp(logits - largest), 0.0)
        # tl.max passes over NaN: one NaN makes the whole row NaN, as in the reference.
        exponent = tl.where(tl.max((logits != logits).to(tl.int32), 0) > 0, float("nan"), exponent)
        sum_of = halving_tree_sum_by_pairs(tl.where(inside, exponent, 0.0), BLOCK, LEVELS)
        scores = tl.div_rn(exponent, tl.full((BLOCK,), sum_of, tl.float32))
    else:
        largest = 0.0
        sum_of = 1.0
        scores = _scores(logits, largest, sum_of, SCORING)
    slot = tl.arange(0, BLOCK_K)
    slot_inside = slot < K
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    total = 0.0  # no score is -0.0, so the first sum is the first score
    if FORCED:
        chosen = tl.load(forced_ptr + row * K + slot, mask=slot_inside, other=-1)
    else:
        choice = scores
        if HAS_BIAS:
            choice += bias
        order = tl.where(inside, _ordered(choice), _NEVER)
        if GROUPS > 1:
            SECOND: tl.constexpr = HAS_BIAS and E > GROUPS
            if SPLIT_GROUPS:
                # Groups are rows: a row's reduction is a few steps between few threads.
                index = tl.reshape(expert, (GROUPS, E // GROUPS))
                rows = tl.reshape(order, (GROUPS, E // GROUPS))
                scores_of = _group_scores(rows, index >= 0, index, SECOND)
                best = _best_groups(scores_of, GROUPS, BLOCK_GROUPS, TOP_GROUPS)
                order = tl.reshape(tl.where(best[:, None], rows, _NEVER), (BLOCK,))
            else:
                group = tl.arange(0, BLOCK_GROUPS)
                member = ((expert // (E // GROUPS))[None, :] == group[:, None]) & inside[None, :]
                index = tl.broadcast_to(expert[None, :], (BLOCK_GROUPS, BLOCK))
                rows = tl.broadcast_to(order[None, :], (BLOCK_GROUPS, BLOCK))
                scores_of = _group_scores(rows, member, index, SECOND)
                best = _best_groups(scores_of, GROUPS, BLOCK_GROUPS, TOP_GROUPS)
                permitted = tl.max((member & best[:, None]).to(tl.int32), 0)
                order = tl.where(permitted > 0, order, _NEVER)
        for k in tl.static_range(K):
            best_order = tl.max(order, 0)
            best_id = tl.min(tl.where(order == best_order, expert, _LAST), 0)
            chosen = tl.where(slot == k, best_id, chosen)
            order = tl.where(expert == best_id, _NEVER, order)
    # One more load of what was chosen costs less than a reduction a slot; the bits are the same.
    exists = slot_inside & (chosen >= 0) & (chosen < E)
    again = tl.load(logits_ptr + row * logits_stride + chosen, mask=exists, other=0.0)
    weights = tl.where(exists, _scores(again, largest, sum_of, SCORING), 0.0)
    bits = weights.to(tl.int32, bitcast=True)
    for k in tl.static_range(K):
        total += tl.sum(tl.where(slot == k, bits, 0), 0).to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.zeros((BLOCK_K,), tl.float32) + (total + floor))
    weights = weights * scale
    if HAS_VALID:
        valid = tl.load(valid_ptr + row) != 0
        chosen = tl.where(valid, chosen, -1)
        weights = tl.where(valid, weights, 0.0)
    tl.store(ids_ptr + row * K + slot, chosen, mask=slot_inside)
    tl.store(weights_ptr + row * K + slot, weights, mask=slot_inside)


def constexprs(parameters: RouterParameters) -> dict[str, object]:
    """Return the constexprs of the kernel that follow from the parameters."""
    block = triton.next_power_of_2(parameters.num_experts)
    groups = triton.next_power_of_2(parameters.num_groups)
    return {
        "E": parameters.num_experts,
        "BLOCK": block,
        "LEVELS": block.bit_length() - 1,
        "K": parameters.top_k,
        "BLOCK_K": triton.next_power_of_2(parameters.top_k),
        "SCORING": parameters.scoring,
        "RENORMALIZE": parameters.renormalize,
        "GROUPS": parameters.num_groups,
        "BLOCK_GROUPS": groups,
        "SPLIT_GROUPS": (block, groups) == (parameters.num_experts, parameters.num_groups),
        "TOP_GROUPS": parameters.top_groups,
    }


def router_fwd(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    forced: torch.Tensor | None,
    valid: torch.Tensor | None,
    parameters: RouterParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments and result as in `consistent_kernels.router.api.router`."""
    rows = logits.shape[0]
    ids = torch.empty((rows, parameters.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, parameters.top_k), dtype=torch.float32, device=logits.device)
    if not rows:
        return ids, weights
    logits = aligned_rows(logits)
    if forced is not None:
        forced = aligned(forced.int().contiguous())
    _router_fwd_kernel[(rows,)](
        logits,
        aligned(bias.contiguous()) if bias is not None else logits,
        forced if forced is not None else ids,
        aligned(valid.to(torch.int8).contiguous()) if valid is not None else ids,
        ids,
        weights,
        logits.stride(0),
        parameters.scale,
        DENOMINATOR_FLOOR,
        HAS_BIAS=bias is not None,
        FORCED=forced is not None,
        HAS_VALID=valid is not None,
        num_warps=NUM_WARPS,
        # A product folded into a sum would round differently with and without a bias.
        enable_fp_fusion=False,
        **constexprs(parameters),
    )
    return ids, weights
