"""Engine = trainer on the CPU for Qwen3-MoE: routing is computed on both sides, never replayed."""

import pytest
from moe_parity import MoeParityRelations

pytestmark = pytest.mark.engine


class TestQwen3MoeOnCpu(MoeParityRelations):
    """16 experts, 4 a token, renormalized; one dense layer among them."""

    family = "qwen3_moe"
