"""Rows of indices for sparse attention: integers only, the same in prefill, decode and training."""

from __future__ import annotations

import torch

from consistent_kernels.devices import require_device
from consistent_kernels.errors import invalid


def _check(op: str, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if value.is_floating_point() or tuple(value.shape) != shape:
        raise invalid(op, name, f"integers of shape {shape}", f"{value.dtype} {tuple(value.shape)}")


def window_and_selected(
    positions: torch.Tensor,
    *,
    window: int,
    window_base: torch.Tensor,
    selected: torch.Tensor | None = None,
    selected_base: torch.Tensor | None = None,
    multiple: int = 64,
) -> torch.Tensor:
    """Name the sliding window of each query, then its selected entries, as rows of a workspace.

    Columns are [window ascending, -1 up to `window`][selected in the given order][-1 up to a
    multiple of `multiple`]. Position p of a request lies in row `window_base + p`, its compressed
    entry e in row `selected_base + e`. (vLLM's V4 decode reads the window first too; its prefill
    reads it last.)

    Args:
        positions: [T] of the queries inside their requests.
        window: entries of the sliding window, the query's own among them.
        window_base: [T] row of position 0 of the query's request (it may lie before the workspace,
            where only the window's end was gathered).
        selected: [T, K] entries inside the request, -1 for none; or None.
        selected_base: [T] row of entry 0 of the query's request.
        multiple: of the width.

    Returns:
        [T, width] int32.

    Raises:
        InvalidInputError: shapes, floating-point positions, or only one of the `selected` two.
    """
    op = "window_and_selected"
    if positions.dim() != 1:
        raise invalid(op, "positions", "[T]", tuple(positions.shape))
    tokens = positions.shape[0]
    require_device(
        op, positions.device, window_base=window_base, selected=selected,
        selected_base=selected_base,
    )  # fmt: skip
    _check(op, "positions", positions, (tokens,))
    _check(op, "window_base", window_base, (tokens,))
    if window < 1:
        raise invalid(op, "window", "at least 1: the query's own position", window)
    if multiple < 1:
        raise invalid(op, "multiple", "at least 1", multiple)
    if (selected is None) != (selected_base is None):
        raise invalid(op, "selected_base", "given together with selected", "only one of them")
    column = torch.arange(window, device=positions.device)
    first = (positions - window + 1).clamp_min(0).unsqueeze(1)
    place = first + column
    parts = [torch.where(place <= positions.unsqueeze(1), place + window_base.unsqueeze(1), -1)]
    if selected is not None:
        if selected.dim() != 2:
            raise invalid(op, "selected", f"integers [{tokens}, K]", tuple(selected.shape))
        _check(op, "selected", selected, (tokens, selected.shape[-1]))
        _check(op, "selected_base", selected_base, (tokens,))
        parts.append(torch.where(selected >= 0, selected + selected_base.unsqueeze(1), -1))
    width = sum(part.shape[1] for part in parts)
    parts.append(torch.full((tokens, -width % multiple), -1, device=positions.device))
    return torch.cat([part.to(torch.int32) for part in parts], dim=1)
