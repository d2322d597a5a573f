"""The FP8 cache in training: the engine's rows forward, straight through backward."""

from __future__ import annotations

import pytest
import torch
from kv_cases import hazard_rows

from consistent_kernels.kv_cache_fp8 import (
    LAYOUTS,
    KVLayout,
    gather_kv_fp8,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal
from train_bridge.functions.kv_cache_fp8 import KVCacheFP8Function


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_kv_cache_fp8_train_equals_infer(layout: KVLayout) -> None:
    kv = hazard_rows(40, layout, seed=1)
    # The engine's side: pages in reverse order.
    cache = new_cache(3, 16, layout, "cpu")
    table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    place = torch.arange(40)
    slots = table[0, place // 16] * 16 + place % 16
    write_kv_fp8(kv, cache, slots, layout=layout, impl="reference")
    expected = gather_kv_fp8(
        cache,
        place[None].int(),
        torch.zeros(1, dtype=torch.int32),
        layout=layout,
        impl="reference",
        block_table=table,
    )[0]
    leaf = kv.clone().requires_grad_()
    rows = KVCacheFP8Function.apply(leaf, layout, "reference")
    assert_bitwise_equal(rows, expected)
    assert not bitwise_equal(rows, kv)  # control: the cache does round
    grad = hazard_rows(40, layout, seed=2)
    rows.backward(grad)
    assert_bitwise_equal(leaf.grad, grad)
