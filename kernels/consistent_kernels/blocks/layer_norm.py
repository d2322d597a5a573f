"""The layer norm of V3.2's index keys: an opaque op, for a compiler would fuse it otherwise."""

from __future__ import annotations

import torch

from consistent_kernels.devices import require_device
from consistent_kernels.errors import invalid
from consistent_kernels.tree import halving_sum

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("index_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor")


def _index_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    x32, size = x.float(), x.shape[-1]
    centered = x32 - halving_sum(x32).unsqueeze(-1) / size
    variance = halving_sum(centered * centered).unsqueeze(-1) / size
    normed = centered / (variance + eps).sqrt()
    # A compiled graph asserts the strides that the fake has.
    return (normed * weight + bias).to(x.dtype).contiguous()


_LIBRARY.impl("index_layer_norm", _index_layer_norm, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::index_layer_norm", lib=_LIBRARY)
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def index_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * w + b in fp32 with halving trees, rounded once.

    Source: vLLM's `LayerNorm`, whose w and b are fp32. Elementwise PyTorch and a written-down tree:
    a row's bits depend on that row alone on any device.

    Args:
        x: [T, D] of the model dtype; weight, bias: [D] fp32.

    Returns:
        [T, D], dtype of x. Not differentiable: no gradient flows into the indexer.

    Raises:
        InvalidInputError: shape or dtype.
    """
    if not x.is_floating_point():
        raise invalid("index_layer_norm", "x", "floats", x.dtype)
    require_device("index_layer_norm", x.device, weight=weight, bias=bias)
    for name, value in (("weight", weight), ("bias", bias)):
        if value.shape != x.shape[-1:] or value.dtype != torch.float32:
            given = f"{value.dtype} of shape {tuple(value.shape)}"
            raise invalid(
                "index_layer_norm", name, f"float32 of shape {tuple(x.shape[-1:])}", given
            )
    return torch.ops.consistent_kernels.index_layer_norm(x, weight, bias, eps)
