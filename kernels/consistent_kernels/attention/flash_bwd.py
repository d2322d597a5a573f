"""Backward of attention on CUDA: ATen's FlashAttention 2 backward, given our output and logsumexp.

The gradients are those of softmax attention at our own forward: P is recomputed from our logsumexp,
and the row term from our output. P and dS are rounded to the dtype of q before their products.
Atomic additions to grad_q make it vary from run to run, unless
`torch.use_deterministic_algorithms(True)` is set.

Source: aten::_flash_attention_backward; Dao, arXiv 2307.08691.
"""

from __future__ import annotations

import torch

from consistent_kernels.attention.parameters import AttentionParameters


def attention_varlen_bwd_flash(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    params: AttentionParameters,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (grad_q, grad_k, grad_v); shapes as in `api.attention_varlen_bwd`.

    Args:
        max_seq_len: an upper bound of the keys of a sequence.
    """
    window = None if params.sliding_window is None else params.sliding_window - 1
    # The forward draws no dropout mask; the operator still takes the generator's state.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        q,
        k,
        v,
        out,
        lse.t().contiguous(),
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        min(max_seq_len, q.shape[0]),
        max_seq_len,
        0.0,
        True,
        state,
        torch.empty(0, device=q.device, dtype=torch.float32),
        scale=params.scale,
        window_size_left=window,
        window_size_right=None if window is None else 0,
    )
