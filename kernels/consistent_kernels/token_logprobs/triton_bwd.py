"""Gradient of token log-probs with respect to the logits, one pass, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from consistent_kernels.token_logprobs.spec import SMALLEST_DELTA

_BLOCK = 2048
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["vocab", "valid_vocab"])
def _grad_logits_bwd_kernel(
    logits_ptr,  # [rows, V] fp32, row stride logits_stride
    ids_ptr,  # [rows] int64
    temperature_ptr,  # [rows] fp32
    banned_ptr,  # [V] bytes or unused
    lse_ptr,  # [rows] fp32
    entropy_ptr,  # [rows] fp32 or unused
    grad_logprob_ptr,  # [rows] fp32, 0 where the id is masked
    grad_lse_ptr,  # [rows] fp32
    grad_entropy_ptr,  # [rows] fp32 or unused
    out_ptr,  # [rows, V] contiguous
    logits_stride,
    vocab,
    valid_vocab,
    HAS_BANNED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    allowed = column < valid_vocab
    if HAS_BANNED:
        allowed = allowed & (tl.load(banned_ptr + column, mask=allowed, other=1) == 0)
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.broadcast_to(tl.where(temperature == 0.0, 1.0, temperature), (BLOCK,))
    logits = tl.load(logits_ptr + row * logits_stride + column, mask=allowed, other=0.0)
    delta = tl.div_rn(logits, divisor) - tl.load(lse_ptr + row)
    delta = tl.maximum(delta, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    p = libdevice.exp(delta)
    own = tl.load(grad_logprob_ptr + row)
    coefficient = tl.load(grad_lse_ptr + row) - own
    if HAS_ENTROPY:
        surprise = delta + tl.load(entropy_ptr + row)
        coefficient = coefficient - tl.load(grad_entropy_ptr + row) * surprise
    grad = p * coefficient + tl.where(column == tl.load(ids_ptr + row), own, 0.0)
    grad = tl.where(allowed, tl.div_rn(grad, divisor), 0.0)
    tl.store(out_ptr + row * vocab + column, grad.to(out_ptr.dtype.element_ty), mask=column < vocab)


def grad_logits_bwd(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    saved: tuple[torch.Tensor, torch.Tensor | None],
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel; formula as in `reference.grad_logits_ref`.

    Args:
        logits, temperature, valid_vocab, banned: as in the forward.
        ids: [T] int64, one a row.
        saved: (logsumexp [T], entropy [T] or None) of the forward.
        grads: (grad_logprob [T], grad_logsumexp [T], grad_entropy [T]), each or None.
        dtype: of the result; computed in fp32, rounded once.

    Returns:
        [T, V] in `dtype`.
    """
    rows, vocab = logits.shape
    lse, entropy = saved
    grad_logprob, grad_lse, grad_entropy = (None if g is None else g.contiguous() for g in grads)
    zeros = torch.zeros_like(lse)
    if grad_logprob is None:
        grad_logprob = zeros
    else:
        masked = ids >= valid_vocab
        if banned is not None:
            masked = masked | banned[ids]
        grad_logprob = grad_logprob.float().masked_fill(masked, 0.0)
    out = torch.empty((rows, vocab), dtype=dtype, device=logits.device)
    if rows:
        _grad_logits_bwd_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
            logits,
            ids.contiguous(),
            temperature.contiguous(),
            banned.view(torch.uint8) if banned is not None else ids,
            lse.contiguous(),
            entropy.contiguous() if entropy is not None else lse,
            grad_logprob,
            zeros if grad_lse is None else grad_lse,
            grad_entropy if grad_entropy is not None else zeros,
            out,
            logits.stride(0),
            vocab,
            valid_vocab,
            HAS_BANNED=banned is not None,
            HAS_ENTROPY=grad_entropy is not None,
            SMALLEST=SMALLEST_DELTA,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return out
