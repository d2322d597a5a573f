"""The compressor and the FP8 cache together beside vLLM's own Triton kernels (CUDA)."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ops.case import Setting
from benchmarks.ops.cases.compressor import make_step
from consistent_kernels.kv_cache_fp8 import gather_kv_fp8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's kernels need a CUDA device")
@pytest.mark.parametrize(("ratio", "size"), [(4, 512), (128, 512), (4, 128)])
def test_compressor_agrees_with_stock_vllm(ratio: int, size: int) -> None:
    """Same inputs, same rounding points: entries differ by fp32 noise, so rarely, by one step."""
    pytest.importorskip("vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache")
    step = make_step(Setting("cuda"), ratio, size, 64)
    results = []
    for run in (lambda: step.ours("triton"), step.stock):
        step.cache.zero_()
        run()
        entry = step.positions // step.params.ratio
        results.append(
            gather_kv_fp8(
                step.cache, entry[:, None].int(), step.requests, layout=step.layout, impl="triton",
                block_table=step.table,
            ).float()
        )  # fmt: skip
    ours, theirs = results
    # A step of e4m3 is at most 2^-3 of the value (2^-9 of the group's largest below that); bf16's
    # is less. Noise of 1e-6 crosses a rounding border in few places.
    largest = ours.abs().amax(-1, keepdim=True)
    assert bool(((ours - theirs).abs() <= ours.abs() * 2**-3 + largest * 2**-8).all())
    assert float((ours != theirs).float().mean()) < 1e-3
    assert bool(ours.any(-1).all())
