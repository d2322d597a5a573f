"""Interleaved rotary of V3.2's queries and V4's outputs (inverse), against vLLM's kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.interleaved_rotary import interleaved_rotary, interleaved_rotary_
from consistent_kernels.interleaved_rotary.spec import IMPLEMENTATIONS
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.testing import assert_bitwise_equal

OP = "interleaved_rotary"
_FORMS = {"v32": (128, 64, False), "v4 inverse": (64, 512, True)}
"""Heads, columns of a head (the last 64 turn), and the direction."""
_REASON = (
    "stock turns 64 columns of each head in place; ours returns a new tensor, as autograd needs, "
    "and copies the others"
)


def cases(setting: Setting) -> Iterator[Case]:
    """All heads of a step's tokens."""
    for name, (heads, head_dim, inverse) in _FORMS.items():
        heads = 2 if setting.small else heads
        rope = RopeParameters(head_dim, 64, theta=1e4, max_position=8192)
        rows = max(setting.rows())
        x = setting.hazards(rows, heads, head_dim, seed=1)
        positions = (torch.arange(rows, device=setting.device) * 7) % rope.max_position
        for impl in setting.implementations(IMPLEMENTATIONS):
            run = functools.partial(_ours, positions, x, rope, inverse, impl)
            relations = functools.partial(check_rows, run, rows)
            for m in setting.rows():
                yield Case(
                    op=OP,
                    shape=f"{name} M={m} heads={heads} D={head_dim}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=_stock(positions[:m], x[:m].clone(), rope, inverse),
                    relations=relations,
                    reason=_REASON,
                )
                yield Case(
                    op="interleaved_rotary_",
                    shape=f"{name} M={m} heads={heads} D={head_dim}",
                    impl=impl,
                    ours=functools.partial(
                        interleaved_rotary_, positions[:m], x[:m].clone(), rope=rope,
                        inverse=inverse, impl=impl,
                    ),
                    stock=_stock(positions[:m], x[:m].clone(), rope, inverse),
                    relations=functools.partial(
                        _in_place, run, positions, x, rope, inverse, impl
                    ),
                )  # fmt: skip


def _ours(
    positions: torch.Tensor,
    x: torch.Tensor,
    rope: RopeParameters,
    inverse: bool,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return interleaved_rotary(positions[rows], x[rows], rope=rope, inverse=inverse, impl=impl)


def _in_place(
    run: Callable[[slice], torch.Tensor],
    positions: torch.Tensor,
    x: torch.Tensor,
    rope: RopeParameters,
    inverse: bool,
    impl: str,
) -> None:
    turned = interleaved_rotary_(positions, x.clone(), rope=rope, inverse=inverse, impl=impl)
    assert_bitwise_equal(turned, run(slice(None)), "in place against a copy")


def _stock(
    positions: torch.Tensor, x: torch.Tensor, rope: RopeParameters, inverse: bool
) -> Callable[[], object]:
    """vLLM's `DeepseekV4ScalingRotaryEmbedding`: its kernel on CUDA, its PyTorch form on a CPU."""
    cos, sin = rope_tables(rope, x.device)
    if x.device.type == "cpu":
        return functools.partial(_turn, positions, x, cos, -sin if inverse else sin)
    from vllm import _custom_ops

    # As there: fp32 tables, no key, V3.2's and V4's rotation of the last columns.
    return functools.partial(
        _custom_ops.rotary_embedding, positions, x, None, x.shape[-1], torch.cat((cos, sin), -1),
        False, rope_dim_offset=x.shape[-1] - rope.rotary_dim, inverse=inverse,
    )  # fmt: skip


def _turn(
    positions: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    c, s = (table[positions].repeat_interleave(2, -1).unsqueeze(1) for table in (cos, sin))
    part = x[..., -c.shape[-1] :]
    partner = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    return torch.cat((x[..., : -c.shape[-1]], (part * c + partner * s).to(x.dtype)), -1)
