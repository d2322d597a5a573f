"""Gradients of sparse attention by cuDNN frontend's DSA backward, where it is installed.

Package nvidia-cudnn-frontend 1.27 or 1.28 with its extra `cutedsl` (1.32 wants a newer CuTe DSL
than vLLM 0.25.1 does); SM90 and SM100. On SM90 it adds the gradients of an entry with atomics, in
no fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from consistent_kernels.errors import MissingBinaryError, UnsupportedError
from consistent_kernels.sparse_attention.backward import delta_of, grad_of_sinks, lse_with_sink

_WIDTHS = {512: 512, 576: 512}


@functools.cache
def _wrapper() -> Callable[..., Any]:
    try:
        from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper
    except (ImportError, AttributeError) as error:
        raise MissingBinaryError(
            "nvidia-cudnn-frontend",
            f"its DSA backward does not load ({error})",
            "cudnn.deepseek_sparse_attention",
            "pip install 'nvidia-cudnn-frontend[cutedsl]==1.28.0', or take backward='own'",
        ) from error
    return sparse_attention_backward_wrapper


def require_cudnn() -> None:
    """Raise `MissingBinaryError` where cuDNN's DSA backward does not load."""
    _wrapper()


def sparse_attention_bwd_cudnn(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Call cuDNN; arguments and result as `sparse_attention_bwd_ref`."""
    width, d_v = q.shape[2], out.shape[2]
    if _WIDTHS.get(width) != d_v:
        raise UnsupportedError(
            "sparse_attention_bwd",
            f"width {width} with d_v {d_v} by backward 'cudnn'",
            [f"width {key} with d_v {value}" for key, value in _WIDTHS.items()],
        )
    if not q.is_cuda:
        raise UnsupportedError(
            "sparse_attention_bwd", f"{q.device} by backward 'cudnn'", ["a CUDA device", "'own'"]
        )
    wrapper = _wrapper()
    heads = q.shape[1]
    no_sink = torch.full((heads,), float("-inf"), device=q.device, dtype=torch.float32)
    grads = wrapper(
        q.contiguous(),
        kv.contiguous(),
        out.contiguous(),
        grad_out.contiguous(),
        lse.contiguous(),
        no_sink if sinks is None else sinks.contiguous(),
        indices.contiguous(),
        softmax_scale=scale,
    )
    delta = delta_of(grad_out, out, lse)
    # Ours: a sum in a fixed order over all queries.
    grad_sinks = grad_of_sinks(delta, lse_with_sink(lse, sinks), sinks)
    return grads["dq"], grads["dkv"], grad_sinks
