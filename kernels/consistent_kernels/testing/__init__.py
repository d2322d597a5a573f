"""Importable test harness: bytewise comparison, hazard inputs, poison and injected faults."""

from consistent_kernels.testing.bitwise import assert_bitwise_equal, bitwise_equal, integer_view
from consistent_kernels.testing.faults import flip_lowest_bit, round_early, split_k_linear
from consistent_kernels.testing.hazards import (
    BATCH_SIZES,
    MANY_BATCH_SIZES,
    hazard_activations,
    norm_weight,
    peaked_logits,
)
from consistent_kernels.testing.poison import poisoned_rows

__all__ = [
    "BATCH_SIZES",
    "MANY_BATCH_SIZES",
    "assert_bitwise_equal",
    "bitwise_equal",
    "flip_lowest_bit",
    "hazard_activations",
    "integer_view",
    "norm_weight",
    "peaked_logits",
    "poisoned_rows",
    "round_early",
    "split_k_linear",
]
