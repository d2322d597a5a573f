"""Embedding in plain PyTorch: the readable form of the spec, and the program on every device."""

from __future__ import annotations

import torch


def embedding_ref(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[t] = weight[ids[t]].

    Args:
        ids: [T] int32 or int64; weight: [V, H].

    Returns:
        [T, H] in the dtype of weight.
    """
    return torch.nn.functional.embedding(ids, weight)


def embedding_bwd_ref(grad_y: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """grad_weight[v] = sum of grad_y[t] over the tokens t with ids[t] = v, in fp32.

    Args:
        grad_y: [T, H]; ids: [T]; rows: V.

    Returns:
        [V, H] fp32. Tokens of one id are added in ascending t.
    """
    order = torch.argsort(ids, stable=True)
    grad = torch.zeros((rows, grad_y.shape[1]), dtype=torch.float32, device=grad_y.device)
    if grad_y.device.type == "cpu":
        return grad.index_add_(0, ids[order].long(), grad_y[order].float())
    # index_put with accumulate sorts by index on CUDA, index_add uses atomics.
    return grad.index_put_((ids[order].long(),), grad_y[order].float(), accumulate=True)
