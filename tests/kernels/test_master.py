"""Masters are rounded to the model dtype under a compiler too."""

from __future__ import annotations

import torch

from consistent_kernels.experts import prepare_expert_weight
from consistent_kernels.linear import prepare_weight
from consistent_kernels.master import round_master
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal

REF = {"impl": "reference"}
MASTER = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))


def prepare(master: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        prepare_weight(master, dtype=torch.bfloat16, **REF),
        prepare_expert_weight(master[None], dtype=torch.bfloat16, **REF),
        *quantize_weight(master, scale_format="fp32", **REF),
    )


def test_prepared_weights_compiled_equal_eager() -> None:
    """Inductor leaves out a cast to bf16 and back that it can see."""
    compiled = torch.compile(prepare, fullgraph=True)
    for actual, expected in zip(compiled(MASTER), prepare(MASTER), strict=True):
        assert_bitwise_equal(actual, expected)


def test_control_a_visible_cast_and_back_is_left_out() -> None:
    def rounded(master: torch.Tensor) -> torch.Tensor:
        return master.bfloat16().float()

    assert not bitwise_equal(torch.compile(rounded)(MASTER), rounded(MASTER))


def test_round_master_keeps_what_needs_no_rounding() -> None:
    bf16 = MASTER.bfloat16()
    assert round_master(bf16, torch.bfloat16, torch.bfloat16).data_ptr() == bf16.data_ptr()
    assert_bitwise_equal(round_master(bf16, torch.bfloat16, torch.float32), bf16.float())
    assert_bitwise_equal(round_master(MASTER, torch.bfloat16, torch.float32), bf16.float())
    turned = round_master(MASTER.t(), torch.bfloat16, torch.float32)
    assert turned.is_contiguous()
    assert not round_master(MASTER.clone().requires_grad_(), *[torch.float32] * 2).requires_grad
