"""Dense [B, T] tensors from what engines and trainers hold: tensors, or rows of unequal length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from consistent_kernels.errors import invalid

_OP = "compare_logprobs"


class Rows(NamedTuple):
    """Values with the positions that were given.

    Attributes:
        values: [B, T]; NaN (floats) or -1 (integers) where absent.
        present: bool [B, T].
    """

    values: torch.Tensor
    present: torch.Tensor

    def to(self, device: torch.device) -> Rows:
        """Return the same on `device`."""
        return Rows(self.values.to(device), self.present.to(device))


def width_of(data: torch.Tensor | Sequence[Any]) -> int:
    """Return the longest row's length."""
    if isinstance(data, torch.Tensor):
        return data.shape[-1] if data.dim() else 0
    return max((len(row) for row in data), default=0)


def as_rows(data: Any) -> torch.Tensor | Sequence[Any] | None:
    """Return a tensor, a list of rows, or None: arrays become tensors, a flat list is one row.

    A row that is None (an engine that returned no log-probs) is an empty row.
    """
    if isinstance(data, torch.Tensor) and data.is_nested:
        return list(data.unbind())
    if data is None or isinstance(data, torch.Tensor):
        return data
    if isinstance(data, str | Mapping) or not isinstance(data, Iterable):
        raise invalid(_OP, "log-probs", "a tensor or lists of numbers", type(data).__name__)
    if hasattr(data, "__array__"):
        return torch.as_tensor(data)
    rows = [torch.as_tensor(row) if hasattr(row, "__array__") else row for row in data]
    nested = any(isinstance(row, torch.Tensor | Sequence) for row in rows)
    return [[] if row is None else row for row in rows] if nested or not rows else [rows]


def _check_dtype(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return fp32 (or int64) without changing a value."""
    if name == "token_ids":
        if tensor.is_floating_point():
            raise invalid(_OP, name, "integers", tensor.dtype)
        return tensor.long()
    if tensor.dtype == torch.float32:
        return tensor
    if tensor.dtype == torch.float64:
        narrowed = tensor.float()
        if bool(((narrowed.double() == tensor) | tensor.isnan()).all()):
            return narrowed
        raise invalid(
            _OP, name, "fp32 values", "float64 values that fp32 does not hold", "Compare fp32"
        )
    raise invalid(
        _OP,
        name,
        "float32",
        tensor.dtype,
        "Equality of rounded log-probs is a weak check; keep them in fp32 end to end",
    )


def _row(name: str, row: Any) -> torch.Tensor:
    if isinstance(row, torch.Tensor):
        if row.dim() != 1:
            raise invalid(_OP, f"a row of {name}", "1-D", tuple(row.shape))
        return _check_dtype(name, row.detach())
    if name == "token_ids":
        return torch.tensor(list(row), dtype=torch.int64)
    values = [float("nan") if value is None else value for value in row]
    try:
        tensor = torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise invalid(_OP, f"a row of {name}", "numbers or None", f"{row!r:.80}") from error
    return _check_dtype(name, tensor)


def dense_values(name: str, data: torch.Tensor | Sequence[Any], width: int) -> Rows:
    """Return [B, width] values (fp32; int64 for `token_ids`) and which of them were given.

    Raises:
        InvalidInputError: another dtype, more than two dimensions.
    """
    if isinstance(data, torch.Tensor):
        if data.dim() not in (1, 2):
            raise invalid(_OP, name, "of shape (B, T) or (T,)", tuple(data.shape))
        values = _check_dtype(name, torch.atleast_2d(data.detach()).contiguous())
        if values.shape[1] == width:
            return Rows(values, torch.ones_like(values, dtype=torch.bool))
        rows: Sequence[Any] = values.unbind(0)
    else:
        rows = data
    tensors = [_row(name, row) for row in rows]
    integral = name == "token_ids"
    device = tensors[0].device if tensors else torch.device("cpu")
    values = torch.full(
        (len(tensors), width),
        -1 if integral else float("nan"),
        dtype=torch.int64 if integral else torch.float32,
        device=device,
    )
    present = torch.zeros_like(values, dtype=torch.bool)
    for index, (source, row) in enumerate(zip(rows, tensors, strict=True)):
        values[index, : len(row)] = row
        present[index, : len(row)] = True
        if not isinstance(source, torch.Tensor):
            gaps = [position for position, value in enumerate(source) if value is None]
            present[index, gaps] = False
    return Rows(values, present)


def dense_mask(
    mask: torch.Tensor | Sequence[Any] | None, width: int, default: torch.Tensor
) -> torch.Tensor:
    """Return bool [B, width]; positions beyond a row of the mask are outside.

    Raises:
        InvalidInputError: a value other than 0 and 1.
    """
    if mask is None:
        return default
    if isinstance(mask, torch.Tensor):
        dense = torch.atleast_2d(mask.detach())
    else:
        rows = [torch.as_tensor(row) for row in mask]
        dense = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            _check_binary(row)
            dense[index, : len(row)] = row.to("cpu", torch.int64)
    _check_binary(dense)
    return torch.nn.functional.pad(dense.bool(), (0, width - dense.shape[1]))


def _check_binary(mask: torch.Tensor) -> None:
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise invalid(_OP, "mask", "bool or 0/1", f"{mask.dtype} with other values")
