"""Token embedding of Qwen3-8B, against PyTorch's gather."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.embedding import embedding
from consistent_kernels.embedding.spec import IMPLEMENTATIONS

OP = "embedding"


def cases(setting: Setting) -> Iterator[Case]:
    """A gather of rows: no arithmetic, so ours is PyTorch's behind an opaque op."""
    vocab, hidden = (320, 64) if setting.small else (151936, 4096)
    rows = max(setting.rows())
    weight = setting.normal(vocab, hidden, seed=1)
    ids = (torch.arange(rows, device=setting.device) * 7919) % vocab
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(_ours, ids, weight, impl)
        relations = functools.partial(check_rows, run, rows)
        for m in setting.rows():
            yield Case(
                op=OP,
                shape=f"M={m} V={vocab} H={hidden}",
                impl=impl,
                ours=functools.partial(run, slice(0, m)),
                stock=functools.partial(torch.nn.functional.embedding, ids[:m], weight),
                relations=relations,
            )


def _ours(ids: torch.Tensor, weight: torch.Tensor, impl: str, part: slice) -> torch.Tensor:
    return embedding(ids[part], weight, impl=impl)
