"""Autograd for lm_head and log-prob in one: [T, vocabulary] exists in neither direction."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.token_logprobs import TokenLogprobs, token_logprobs, token_logprobs_bwd
from train_bridge.functions.ambient import OpFunction


class TokenLogprobsFunction(OpFunction):
    """(logprob, logsumexp, entropy) = token_logprobs(hidden, prepared, ids).

    Gradients: hidden in its dtype, the lm_head weight in the master's. With tied embeddings the
    master is the embedding table, and autograd adds this gradient to the embedding's.
    `prepared` is `prepare_weight(master)` of the same weight version; it carries no gradient.
    entropy is None where `with_entropy` is False.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        master: torch.Tensor,
        prepared: torch.Tensor,
        ids: torch.Tensor,
        temperature: float | torch.Tensor,
        valid_vocab: int | None,
        banned: torch.Tensor | None,
        with_entropy: bool,
        impl: str,
        linear_impl: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        options = {
            "temperature": temperature,
            "valid_vocab": valid_vocab,
            "banned": banned,
            "impl": impl,
            "linear_impl": linear_impl,
        }
        result = token_logprobs(hidden, prepared, ids, entropy=with_entropy, **options)
        ctx.save_for_backward(hidden, prepared, ids, *result)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.master_dtype = options, master.dtype
        return tuple(result)

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprob: torch.Tensor | None,
        grad_logsumexp: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        hidden, prepared, ids, *result = ctx.saved_tensors
        grad_hidden, grad_weight = token_logprobs_bwd(
            TokenLogprobs(grad_logprob, grad_logsumexp, grad_entropy),
            hidden,
            prepared,
            ids,
            TokenLogprobs(*result),
            needs=(ctx.needs_input_grad[0], ctx.needs_input_grad[1]),
            **ctx.options,
        )
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.master_dtype)
        return grad_hidden, grad_weight, *(None,) * 8
