"""The router in Triton: one program a token; sums in a written-down tree, choices on integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.router.parameters import RouterParameters
from consistent_kernels.router.spec import DENOMINATOR_FLOOR, NUM_WARPS
from consistent_kernels.triton_tree import halving_tree_sum

_NEVER = tl.constexpr(-(1 << 62))


@triton.jit
def _choice_keys(choice, index, COUNT: tl.constexpr):
    """int64 keys that order `choice`, then the lower index; -0.0 as +0.0, NaN as -inf."""
    plain = tl.where(choice != choice, float("-inf"), choice)
    plain = tl.where(plain == 0.0, 0.0, plain)
    bits = plain.to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return ordered * COUNT + (COUNT - 1 - index)


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
    TOP_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=float("-inf"))
    if SCORING == "softmax":
        exponent = tl.where(inside, tl.exp(logits - tl.max(logits, 0)), 0.0)
        # tl.max passes over NaN: one NaN makes the whole row NaN, as in the reference.
        exponent = tl.where(tl.max((logits != logits).to(tl.int32), 0) > 0, float("nan"), exponent)
        total = halving_tree_sum(tl.where(inside, exponent, 0.0), BLOCK, LEVELS)
        scores = tl.div_rn(exponent, tl.broadcast_to(total, (BLOCK,)))
    elif SCORING == "sigmoid":
        one = tl.full((BLOCK,), 1.0, tl.float32)
        scores = tl.div_rn(one, 1.0 + tl.exp(-logits))
    else:
        positive = tl.where(logits > 0.0, logits, tl.where(logits != logits, logits, 0.0))
        scores = tl.sqrt_rn(positive + libdevice.log1p(tl.exp(-tl.abs(logits))))
    slot = tl.arange(0, BLOCK_K)
    slot_inside = slot < K
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    score_bits = scores.to(tl.int32, bitcast=True)
    if FORCED:
        for k in tl.static_range(K):
            given = tl.load(forced_ptr + row * K + k)
            bits = tl.sum(tl.where(expert == given, score_bits, 0), 0)
            chosen = tl.where(slot == k, given, chosen)
            weights = tl.where(slot == k, bits.to(tl.float32, bitcast=True), weights)
    else:
        choice = scores
        if HAS_BIAS:
            choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)
        keys = tl.where(inside, _choice_keys(choice, expert, E), _NEVER)
        if GROUPS > 1:
            plain = tl.where(choice != choice, float("-inf"), choice)
            group_of = expert // (E // GROUPS)
            group = tl.arange(0, BLOCK_GROUPS)
            member = (group_of[None, :] == group[:, None]) & inside[None, :]
            first_key = tl.max(tl.where(member, keys[None, :], _NEVER), 1)
            first = tl.max(tl.where(member, plain[None, :], float("-inf")), 1)
            group_scores = first
            if HAS_BIAS and E > GROUPS:
                rest = member & (keys[None, :] != first_key[:, None])
                group_scores = first + tl.max(tl.where(rest, plain[None, :], float("-inf")), 1)
            group_keys = tl.where(group < GROUPS, _choice_keys(group_scores, group, GROUPS), _NEVER)
            allowed = tl.zeros((BLOCK_GROUPS,), tl.int32)
            for _ in tl.static_range(TOP_GROUPS):
                best = tl.max(group_keys, 0)
                hit = group_keys == best
                allowed = tl.where(hit, 1, allowed)
                group_keys = tl.where(hit, _NEVER, group_keys)
            permitted = tl.max(tl.where(member, allowed[:, None], 0), 0)
            keys = tl.where(permitted > 0, keys, _NEVER)
        for k in tl.static_range(K):
            best = tl.max(keys, 0)
            hit = keys == best
            best_id = tl.max(tl.where(hit, expert, 0), 0)
            # One lane holds the winner: a sum over one bit pattern and zeros moves no bit.
            bits = tl.sum(tl.where(hit, score_bits, 0), 0)
            chosen = tl.where(slot == k, best_id, chosen)
            weights = tl.where(slot == k, bits.to(tl.float32, bitcast=True), weights)
            keys = tl.where(hit, _NEVER, keys)
    if RENORMALIZE:
        total = _slot(weights, slot, 0)
        for k in tl.static_range(1, K):
            total += _slot(weights, slot, k)
        weights = tl.div_rn(weights, tl.zeros((BLOCK_K,), tl.float32) + (total + floor))
    weights = weights * scale
    if HAS_VALID:
        valid = tl.load(valid_ptr + row) != 0
        chosen = tl.where(valid, chosen, -1)
        weights = tl.where(valid, weights, 0.0)
    tl.store(ids_ptr + row * K + slot, chosen, mask=slot_inside)
    tl.store(weights_ptr + row * K + slot, weights, mask=slot_inside)


@triton.jit
def _slot(weights, slot, k: tl.constexpr):
    """The value of one slot; integers, so that no order of additions counts."""
    bits = tl.sum(tl.where(slot == k, weights.to(tl.int32, bitcast=True), 0), 0)
    return bits.to(tl.float32, bitcast=True)


def constexprs(parameters: RouterParameters) -> dict[str, object]:
    """Return the constexprs of the kernel that follow from the parameters."""
    block = triton.next_power_of_2(parameters.num_experts)
    return {
        "E": parameters.num_experts,
        "BLOCK": block,
        "LEVELS": block.bit_length() - 1,
        "K": parameters.top_k,
        "BLOCK_K": triton.next_power_of_2(parameters.top_k),
        "SCORING": parameters.scoring,
        "RENORMALIZE": parameters.renormalize,
        "GROUPS": parameters.num_groups,
        "BLOCK_GROUPS": triton.next_power_of_2(parameters.num_groups),
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
        aligned(bias) if bias is not None else logits,
        forced if forced is not None else ids,
        aligned(valid.to(torch.int8)) if valid is not None else ids,
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
