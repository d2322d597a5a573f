"""Public embedding: validate and gather."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.embedding.reference import embedding_bwd_ref, embedding_ref
from consistent_kernels.embedding.spec import IMPLEMENTATIONS
from consistent_kernels.errors import invalid, require_implementation

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("embedding(Tensor ids, Tensor weight, str impl) -> Tensor")


def _embedding(ids: torch.Tensor, weight: torch.Tensor, impl: str) -> torch.Tensor:
    count("embedding", impl)
    return embedding_ref(ids, weight)


_LIBRARY.impl("embedding", _embedding, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::embedding", lib=_LIBRARY)
def _(ids: torch.Tensor, weight: torch.Tensor, impl: str) -> torch.Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def embedding(ids: torch.Tensor, weight: torch.Tensor, *, impl: str) -> torch.Tensor:
    """y[t] = weight[ids[t]].

    Args:
        ids: [T] int32 or int64; an id outside the table is PyTorch's IndexError on CPU.
        weight: [V, H], model dtype (cast a master first).
        impl: "reference" or "triton"; a gather has no arithmetic, so both run PyTorch's.

    Returns:
        [T, H], dtype of weight.

    Raises:
        InvalidInputError: shape or dtype.
        UnsupportedError: unknown impl.
    """
    require_implementation("embedding", impl, IMPLEMENTATIONS)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise invalid("embedding", "ids", "1-D int32 or int64", f"{ids.dim()}-D {ids.dtype}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise invalid(
            "embedding", "weight", "a 2-D float tensor", f"{weight.dim()}-D {weight.dtype}"
        )
    return torch.ops.consistent_kernels.embedding(ids, weight, impl)


def embedding_bwd(grad_y: torch.Tensor, ids: torch.Tensor, rows: int, *, impl: str) -> torch.Tensor:
    """Gradient of `embedding` to the table: [rows, H] fp32, tokens of one id added in order.

    Args:
        grad_y: [T, H]; ids: [T]; rows: V.
    """
    require_implementation("embedding_bwd", impl, IMPLEMENTATIONS)
    if grad_y.dim() != 2 or grad_y.shape[0] != ids.shape[0]:
        raise invalid(
            "embedding_bwd", "grad_y", f"of shape ({ids.shape[0]}, H)", tuple(grad_y.shape)
        )
    return embedding_bwd_ref(grad_y, ids, rows)
