"""Which device an implementation runs on."""

from __future__ import annotations

import importlib.util

import torch

from consistent_kernels.errors import UnsupportedError, invalid


def require_cuda(op: str, impl: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedError` where an implementation for CUDA is given tensors of another device.

    Triton's interpreter (TRITON_INTERPRET=1) takes those of a CPU.
    """
    if tensor.is_cuda or _interpreted():
        return
    raise UnsupportedError(
        op, f"impl {impl!r} on {tensor.device}", ["CUDA tensors", "impl 'reference' on a CPU"]
    )


def require_device(op: str, device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise `InvalidInputError` for the first of the named tensors that lies on another device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise invalid(op, name, f"on {device}", tensor.device)


def _interpreted() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
