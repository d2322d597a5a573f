"""The compressor in plain PyTorch, fp32: the readable form of the spec, and the CPU program.

Source: DeepSeek-V4, 2.3.1 (CSA) and 2.3.2 (HCA); vLLM 0.25.1
`models/deepseek_v4/common/ops/fused_compress_quant_cache.py`, which works in fp32 up to the same
rounding; transformers `DeepseekV4CSACompressor` rounds in between.
"""

from __future__ import annotations

import torch

from consistent_kernels.compressor.spec import GROUP
from consistent_kernels.compressor.windows import CompressorParameters
from consistent_kernels.tree import halving_sum


def compressor_state_ref(
    kv_score: torch.Tensor, position_bias: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return [T, 2 W] fp32: kv | score + position_bias[position % ratio].

    Args:
        kv_score: [T, 2 W] fp32; position_bias: [ratio, W] fp32; positions: [T].
    """
    ratio, width = position_bias.shape
    bias = position_bias.index_select(0, positions.long() % ratio)
    return torch.cat((kv_score[:, :width], kv_score[:, width:] + bias), dim=1)


def gather_windows(
    state: torch.Tensor, rows: torch.Tensor, params: CompressorParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (kv [E, tokens, D] with zeros, score [E, tokens, D] with -inf where rows is -1)."""
    width, size = params.state_width, params.head_dim
    absent = (rows < 0).unsqueeze(-1)
    if len(state) == 0:  # then every row is absent
        state = state.new_zeros((1, 2 * width))
    gathered = state.index_select(0, rows.clamp_min(0).reshape(-1).long())
    gathered = gathered.view(*rows.shape, 2 * width)
    kv, score = gathered[..., :width], gathered[..., width:]
    if params.overlap:
        first, second = slice(None, params.ratio), slice(params.ratio, None)
        kv, score = (
            torch.cat((x[:, first, :size], x[:, second, size:]), dim=1) for x in (kv, score)
        )
    return kv.masked_fill(absent, 0.0), score.masked_fill(absent, float("-inf"))


def ordered_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum [E, tokens, D] over tokens: trees of GROUP, added ascending; returns [E, D]."""
    if values.shape[1] <= GROUP:
        return halving_sum(values, 1)
    trees = halving_sum(values.unflatten(1, (-1, GROUP)), 2)
    total = trees[:, 0]
    for group in range(1, trees.shape[1]):
        total = total + trees[:, group]
    return total


def pooled_ref(
    state: torch.Tensor, rows: torch.Tensor, params: CompressorParameters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (c [E, D], weights [E, tokens, D] that sum to 1, kv [E, tokens, D]), fp32."""
    kv, score = gather_windows(state, rows, params)
    peak = score.amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
    weight = (score - peak).exp_()
    total = ordered_sum(weight)
    total = torch.where(total > 0, total, 1.0)
    return ordered_sum(kv * weight) / total, weight / total.unsqueeze(1), kv


def rstd_ref(c: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(mean(c^2) + eps), [E, 1]."""
    square_sum = halving_sum(c * c).unsqueeze(-1)
    return square_sum.div_(c.shape[1]).add_(eps).sqrt_().reciprocal_()


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of the last columns of x [E, D] fp32; cos, sin: [E, rotary_dim / 2]."""
    first = x.shape[1] - 2 * cos.shape[1]
    pairs = x[:, first:].unflatten(1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((x[:, :first], turned.flatten(1)), dim=1)


def compress_ref(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    params: CompressorParameters,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Form entries [E, D] in `dtype`; see `compress`."""
    c, _, _ = pooled_ref(state, rows, params)
    normed = c * rstd_ref(c, params.norm_eps) * weight.float()
    places = positions.long()
    turned = rotate_pairs(
        normed, cos_table.index_select(0, places), sin_table.index_select(0, places)
    )
    # + 0.0: an absent entry is +0, whatever the sign of the weight.
    return (turned + 0.0).to(dtype)


def compress_bwd_ref(
    grad_entries: torch.Tensor,
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    params: CompressorParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `compress_ref`, fp32, on any device.

    With w the softmax weights and n = c rstd: grad_n is the inverse rotation of grad times the norm
    weight; grad_c = rstd (grad_n - n mean(grad_n n)); grad_kv_j = w_j grad_c;
    grad_score_j = w_j (kv_j - c) grad_c. Every token is in one window of each series, so gradients
    are placed, not added.

    Returns:
        (grad_state [N, 2 W] fp32, grad_weight [D] fp32).
    """
    c, weights, kv = pooled_ref(state, rows, params)
    rstd = rstd_ref(c, params.norm_eps)
    places = positions.long()
    cos, sin = cos_table.index_select(0, places), sin_table.index_select(0, places)
    # An entry of no tokens is zeros; its gradient may be padding's, which holds anything.
    absent = (rows < 0).all(1, keepdim=True)
    grad = rotate_pairs(grad_entries.float().masked_fill(absent, 0.0), cos, -sin)
    normalized = c * rstd
    grad_weight = (grad * normalized).sum(0)
    grad_n = grad * weight.float()
    grad_c = rstd * (grad_n - normalized * (grad_n * normalized).mean(1, keepdim=True))
    grad_kv = weights * grad_c.unsqueeze(1)
    grad_score = grad_kv * (kv - c.unsqueeze(1))
    width, size, ratio = params.state_width, params.head_dim, params.ratio
    grad_state = torch.zeros(state.shape, dtype=torch.float32, device=state.device)
    series = [(slice(None), 0)]
    if params.overlap:
        series = [(slice(None, ratio), 0), (slice(ratio, None), size)]
    for tokens, column in series:
        named = rows[:, tokens].reshape(-1)
        kept = (named >= 0).nonzero().view(-1)
        target = named.index_select(0, kept).long()
        for values, base in ((grad_kv, 0), (grad_score, width)):
            part = values[:, tokens].reshape(-1, size).index_select(0, kept)
            grad_state[:, base + column : base + column + size].index_copy_(0, target, part)
    return grad_state, grad_weight
