"""SiLU(gate) * up at the width of Qwen3-8B, against vLLM's CUDA kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.silu_and_mul.spec import IMPLEMENTATIONS

OP = "silu_and_mul"


def cases(setting: Setting) -> Iterator[Case]:
    """Both halves of one fused tensor, as the engine has them."""
    width = 192 if setting.small else 12288
    rows = max(setting.rows())
    fused = setting.hazards(rows, 2 * width, seed=1)
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(_ours, fused, impl)
        relations = functools.partial(check_rows, run, rows)
        for m in setting.rows():
            yield Case(
                op=OP,
                shape=f"M={m} I={width}",
                impl=impl,
                ours=functools.partial(run, slice(0, m)),
                stock=functools.partial(_stock, setting.device, fused[:m]),
                relations=relations,
            )


def _ours(fused: torch.Tensor, impl: str, part: slice) -> torch.Tensor:
    gate, up = fused[part].chunk(2, dim=-1)
    return silu_and_mul(gate, up, impl=impl)


def _stock(device: str, fused: torch.Tensor) -> torch.Tensor:
    width = fused.shape[1] // 2
    if device == "cpu":
        return torch.nn.functional.silu(fused[:, :width]) * fused[:, width:]
    import vllm._custom_ops  # noqa: F401 (loads the library)

    out = fused.new_empty(fused.shape[0], width)
    torch.ops._C.silu_and_mul(out, fused)
    return out
