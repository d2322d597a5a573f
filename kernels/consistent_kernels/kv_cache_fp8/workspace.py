"""The BF16 workspace between an FP8 cache and the sparse forward: its size and its indices.

The sparse forward reads rows of one [rows, width] buffer by index, and its bits follow the values
of those rows and their order alone. So which rows lie where is scheduling: decode gathers the
selected entries of every query; prefill and training dequantize the whole context of a request
once, for all of its queries. Both read the cache through `gather_kv_fp8`.
"""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.kv_cache_fp8.layout import KVLayout


@dataclasses.dataclass(frozen=True)
class WorkspaceBounds:
    """Static bounds from which the workspace is sized once, at start-up.

    Attributes:
        layout: of the cache.
        selected_queries: most queries whose entries are gathered one by one (max_num_seqs).
        k: entries a query.
        context_positions: longest context that is dequantized whole (max_model_len, or its
            compressed length); 0 where entries are always gathered query by query.
        contexts: how many such contexts at a time.
    """

    layout: KVLayout
    selected_queries: int
    k: int
    context_positions: int = 0
    contexts: int = 1

    def __post_init__(self) -> None:
        for field in ("selected_queries", "k", "context_positions", "contexts"):
            if getattr(self, field) < 0:
                raise invalid("WorkspaceBounds", field, "at least 0", getattr(self, field))

    @property
    def rows(self) -> int:
        """Rows of the workspace: what the larger of the two uses needs."""
        return max(self.selected_queries * self.k, self.contexts * self.context_positions)

    @property
    def nbytes(self) -> int:
        """Its bytes in bf16."""
        return self.rows * self.layout.width * 2

    def allocate(self, device: torch.device | str) -> torch.Tensor:
        """Return the workspace, [rows, width] bf16, uninitialized: it is written before read."""
        return torch.empty((self.rows, self.layout.width), dtype=torch.bfloat16, device=device)

    def view(self, workspace: torch.Tensor, queries: int, k: int) -> torch.Tensor:
        """Return the first queries * k rows as [queries, k, width], to gather into.

        Raises:
            InvalidInputError: more rows than the bounds allow.
        """
        if queries * k > self.rows:
            raise invalid(
                "WorkspaceBounds.view", "queries * k", f"at most {self.rows}", queries * k
            )
        width, rows = self.layout.width, queries * k
        if workspace.dim() != 2 or workspace.shape[1] != width or len(workspace) < rows:
            expected = f"[at least {rows}, {width}]"
            raise invalid("WorkspaceBounds.view", "workspace", expected, tuple(workspace.shape))
        return workspace[: queries * k].view(queries, k, self.layout.width)


def workspace_indices(
    positions: torch.Tensor, requests: torch.Tensor | None = None, context_rows: int = 0
) -> torch.Tensor:
    """Rows of the workspace that hold the given positions; -1 stays -1.

    Args:
        positions: [T, K] int32 positions inside the request, -1 padding.
        requests: None where the workspace holds the selected entries [T, K, width]; else [T], each
            query's request among the whole contexts [requests, context_rows, width].
        context_rows: rows from one context to the next.

    Returns:
        [T, K], dtype of positions.

    Raises:
        InvalidInputError: shape or dtype.
    """
    op = "workspace_indices"
    if positions.dim() != 2 or positions.is_floating_point():
        given = f"{positions.dtype} {tuple(positions.shape)}"
        raise invalid(op, "positions", "2-D integers", given)
    if requests is not None and (
        requests.shape != positions.shape[:1] or requests.is_floating_point()
    ):
        given = f"{requests.dtype} {tuple(requests.shape)}"
        raise invalid(op, "requests", f"integers of shape {tuple(positions.shape[:1])}", given)
    if requests is None:
        rows = torch.arange(positions.numel(), dtype=positions.dtype, device=positions.device).view(
            positions.shape
        )
    else:
        rows = positions + requests.to(positions.dtype)[:, None] * context_rows
    return torch.where(positions >= 0, rows, positions)
