"""Validation shared by the functions of this op; returns arguments in the form kernels read."""

from __future__ import annotations

import torch

from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.token_logprobs.spec import IMPLEMENTATIONS


def check_impl(op: str, impl: str) -> None:
    """Raise UnsupportedError for an unknown implementation."""
    require_implementation(op, impl, IMPLEMENTATIONS)


def check_logits(op: str, logits: torch.Tensor) -> None:
    """Logits are 2-D fp32: rounding them first is another log-prob."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise invalid(
            op,
            "logits",
            "float32 of shape (T, V)",
            f"{logits.dtype} of shape {tuple(logits.shape)}",
            "Take them from linear(..., out_dtype=torch.float32)",
        )


def check_ids(op: str, ids: torch.Tensor, rows: int) -> None:
    """Ids are integers, one or k for each row. Their values are checked where they are used."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise invalid(op, "ids", "int32 or int64", ids.dtype)
    if ids.dim() not in (1, 2) or ids.shape[0] != rows or ids.numel() == 0 < rows:
        raise invalid(op, "ids", f"of shape ({rows},) or ({rows}, k)", tuple(ids.shape))


def as_columns(ids: torch.Tensor) -> torch.Tensor:
    """Return ids as int64 [T, k], k = 1 for one id a row."""
    return (ids[:, None] if ids.dim() == 1 else ids).long()


def temperature_rows(
    op: str, temperature: float | torch.Tensor, rows: int, device: torch.device
) -> torch.Tensor:
    """Return [rows] fp32 from one number or a per-row tensor."""
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != (rows,) or not temperature.is_floating_point():
            raise invalid(
                op,
                "temperature",
                f"a number or a float tensor of shape ({rows},)",
                f"{temperature.dtype} of shape {tuple(temperature.shape)}",
            )
        return temperature.to(device=device, dtype=torch.float32)
    if not 0 <= temperature < float("inf"):
        raise invalid(op, "temperature", "finite and not negative", temperature)
    return torch.full((rows,), temperature, dtype=torch.float32, device=device)


def valid_width(op: str, valid_vocab: int | None, vocab: int) -> int:
    """Return the number of ids that exist."""
    if valid_vocab is None:
        return vocab
    if isinstance(valid_vocab, bool | float):
        raise invalid(op, "valid_vocab", "an integer", repr(valid_vocab))
    if not 1 <= valid_vocab <= vocab:
        raise invalid(op, "valid_vocab", f"between 1 and {vocab}", valid_vocab)
    return valid_vocab


def banned_mask(
    op: str, banned: torch.Tensor | None, vocab: int, device: torch.device
) -> torch.Tensor | None:
    """Return bool [vocab] from ids [n] or a mask; None stays None."""
    if banned is None:
        return None
    if not isinstance(banned, torch.Tensor):
        raise invalid(op, "banned", "a tensor of ids or a bool mask", type(banned).__name__)
    if banned.dtype == torch.bool:
        if banned.shape != (vocab,):
            raise invalid(op, "banned", f"a mask of shape ({vocab},)", tuple(banned.shape))
        return banned.to(device)
    if banned.dtype not in (torch.int32, torch.int64) or banned.dim() != 1:
        raise invalid(
            op,
            "banned",
            f"ids of shape (n,) or a bool mask of shape ({vocab},)",
            f"{banned.dtype} of shape {tuple(banned.shape)}",
        )
    if banned.numel():
        low, high = (int(value) for value in banned.aminmax())
        if low < 0 or high >= vocab:
            # -1 would count from the end and ban the last id.
            outside = low if low < 0 else high
            raise invalid(op, "banned", f"ids between 0 and {vocab - 1}", outside)
    mask = torch.zeros(vocab, dtype=torch.bool, device=device)
    mask[banned.to(device=device, dtype=torch.int64)] = True
    return mask


def check_values(op: str, ids: torch.Tensor, temperature: torch.Tensor, vocab: int) -> None:
    """Check values where that needs no wait for a device: CPU tensors.

    On CUDA an id outside the vocabulary, or a negative temperature, gives a NaN log-prob.
    """
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= vocab:
        outside = low if low < 0 else high
        raise invalid(
            op, "ids", f"between 0 and {vocab - 1}", outside, "Replace padding ids before scoring"
        )
    if not bool((temperature >= 0).all()):
        raise invalid(op, "temperature", "not negative", float(temperature.min()))
