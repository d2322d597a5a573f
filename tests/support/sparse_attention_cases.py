"""Inputs of the sparse attention tests, and the formula in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from consistent_kernels.testing import hazard_activations


@dataclasses.dataclass
class SparseCase:
    """One call: q [T, H, D], kv [S, D], indices [T, K] int32, sinks [H] or None."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    d_v: int

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The positional arguments of the op."""
        return self.q, self.kv, self.indices

    @property
    def keywords(self) -> dict[str, object]:
        """The keyword arguments of the op but impl."""
        return {"scale": self.scale, "d_v": self.d_v, "sinks": self.sinks}


def make_case(
    *,
    tokens: int,
    heads: int,
    d_v: int,
    rope: int,
    entries: int,
    columns: int,
    sinks: bool,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> SparseCase:
    """Rows with ties, duplicates, -1 in the middle and at the end, one empty row, one full row."""
    generator = torch.Generator().manual_seed(seed)
    width = d_v + rope
    q = hazard_activations((tokens, heads, width), seed=seed + 1, dtype=dtype)
    kv = hazard_activations((entries, width), seed=seed + 2, dtype=dtype)
    kv[entries // 2] = kv[entries // 3]  # two entries of equal score everywhere
    # Outlier channels in q and kv together would make every softmax one-hot.
    q[..., ::17] /= 30.0
    indices = torch.randint(entries, (tokens, columns), generator=generator, dtype=torch.int32)
    indices[torch.rand(indices.shape, generator=generator) < 0.1] = -1
    lengths = torch.randint(1, columns + 1, (tokens,), generator=generator)
    indices[torch.arange(columns) >= lengths[:, None]] = -1
    if tokens > 2:
        indices[1] = -1
        indices[2] = torch.arange(columns, dtype=torch.int32) % entries
        indices[2, :2] = 0  # named twice
    sink = torch.randn(heads, generator=generator) if sinks else None
    if sink is not None:
        sink[0] = float("-inf")
    return SparseCase(
        q.to(device),
        kv.to(device),
        indices.to(device),
        None if sink is None else sink.to(device),
        width**-0.5,
        d_v,
    )


def attention_fp64(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense softmax over named columns in fp64; differentiable in q, kv and sinks."""
    valid = (indices >= 0).unsqueeze(1)
    entries = kv[indices.clamp_min(0).long()]
    scores = torch.einsum("thd,tkd->thk", q, entries) * scale
    scores = scores.masked_fill(~valid, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    empty = lse == float("-inf")
    # A sink of -inf as a finite one: autograd makes NaN of -inf - -inf.
    total = lse if sinks is None else torch.logaddexp(lse, sinks.clamp_min(-1e30).expand_as(lse))
    p = torch.exp(scores - torch.where(empty, 0.0, total).unsqueeze(-1)).masked_fill(~valid, 0.0)
    return torch.einsum("thk,tkd->thd", p, entries[..., :d_v]), lse


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this program needs a CUDA device"
)
PROGRAMS = [
    pytest.param(("reference", "cpu"), id="reference-cpu"),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=[pytest.mark.gpu, needs_cuda]),
    pytest.param(("flash_mla", "cuda"), id="flash_mla-cuda", marks=[pytest.mark.gpu, needs_cuda]),
]


def shapes_of(device: str) -> tuple[dict[str, object], ...]:
    """(V3.2 form, V4 form): real widths on CUDA, small ones on a CPU."""
    if device == "cuda":
        return (
            {
                "heads": 128,
                "d_v": 512,
                "rope": 64,
                "entries": 4096,
                "columns": 2048,
                "sinks": False,
            },
            {"heads": 64, "d_v": 512, "rope": 0, "entries": 1024, "columns": 640, "sinks": True},
        )
    return (
        {"heads": 6, "d_v": 32, "rope": 16, "entries": 150, "columns": 200, "sinks": False},
        {"heads": 4, "d_v": 64, "rope": 0, "entries": 90, "columns": 130, "sinks": True},
    )
