"""Sizes of the grouped linear's tests, shared with the fixture that compiles for them."""

from consistent_kernels.testing import BATCH_SIZES

GROUPS, INNER, COLUMNS = 3, 208, 80
TOKENS = max(BATCH_SIZES)
