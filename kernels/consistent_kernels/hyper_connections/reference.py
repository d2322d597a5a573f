"""Hyper-connection maps in plain PyTorch, fp32: the readable form of the spec, and the CPU program.

S streams of H columns a token; x is [T, S, H]. Source: Xie et al., "mHC" (arXiv 2512.24880);
vLLM 0.25.1 `model_executor/kernels/mhc/torch.py`; transformers `DeepseekV4HyperConnection`.
"""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.linear.reference import linear_ref
from consistent_kernels.tree import halving_sum


@dataclasses.dataclass(frozen=True)
class Mixes:
    """What the maps of a batch of tokens are made of, fp32.

    Attributes:
        raw: [T, n] projections before the norm; rstd: [T, 1].
        logits: [T, n] = raw * rstd * scale + base, split as pre [S], post [S], comb [S * S].
    """

    raw: torch.Tensor
    rstd: torch.Tensor
    logits: torch.Tensor


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    # Not torch.sigmoid: its bits follow an element's place in memory, torch.exp's do not.
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def _scale_columns(scale: torch.Tensor, streams: int) -> torch.Tensor:
    """Expand the scalars of [pre] or [pre, post, comb] to their columns."""
    counts = torch.tensor([streams, streams, streams * streams][: scale.shape[0]])
    return scale.repeat_interleave(counts.to(scale.device), output_size=int(counts.sum()))


def mixes_ref(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float
) -> Mixes:
    """Project the streams of each token.

    Args:
        x: [T, S, H]; fn: [n, S * H] fp32; scale: [1] or [3] fp32; base: [n] fp32.
    """
    flat = x.flatten(1).float()
    raw = linear_ref(flat, fn.contiguous(), None, torch.float32)
    square_sum = halving_sum(flat * flat).unsqueeze(-1)
    rstd = square_sum.div_(flat.shape[1]).add_(norm_eps).sqrt_().reciprocal_()
    logits = raw * rstd * _scale_columns(scale, x.shape[1]) + base
    return Mixes(raw, rstd, logits)


def sinkhorn_ref(
    logits: torch.Tensor, eps: float, iterations: int
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, int]]]:
    """Return (comb [T, S, S], the steps taken: (result, divisor, summed dim)).

    Args:
        logits: [T, S, S]; the first step is a softmax over the last index, then + eps.
    """
    exponent = (logits - logits.amax(-1, keepdim=True)).exp_()
    total = halving_sum(exponent).unsqueeze(-1)
    comb = exponent / total
    steps = [(comb, total, -1)]
    comb = comb + eps
    for step in range(2 * iterations - 1):
        dim = -2 if step % 2 == 0 else -1
        divisor = halving_sum(comb, dim).unsqueeze(dim) + eps
        comb = comb / divisor
        steps.append((comb, divisor, dim))
    return comb, steps


def _weighted_streams(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sum over streams of weights [T, S] times x [T, S, H]; fp32 [T, H]."""
    return halving_sum(weights.unsqueeze(-1) * x.float(), 1)


def hc_pre_ref(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (layer_input [T, H], post [T, S] fp32, comb [T, S, S] fp32)."""
    streams = x.shape[1]
    logits = mixes_ref(x, fn, scale, base, norm_eps).logits
    pre = _sigmoid(logits[:, :streams]) + eps
    post = _sigmoid(logits[:, streams : 2 * streams]) * post_multiplier
    comb, _ = sinkhorn_ref(logits[:, 2 * streams :].unflatten(1, (streams, -1)), eps, iterations)
    return _weighted_streams(pre, x).to(x.dtype), post, comb


def hc_head_ref(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
) -> torch.Tensor:
    """Return the streams of each token collapsed to one, [T, H]."""
    pre = _sigmoid(mixes_ref(x, fn, scale, base, norm_eps).logits) + eps
    return _weighted_streams(pre, x).to(x.dtype)


def hc_post_ref(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Return out_j = post_j y + sum_i comb_ij x_i, [T, S, H] in the dtype of x."""
    total = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for stream in range(x.shape[1]):
        total = total + comb[:, stream].unsqueeze(-1) * x[:, stream].float().unsqueeze(1)
    return total.to(x.dtype).contiguous()
