"""DeepGEMM's index scores: are its paged and packed kernels one program, and how near to ours?"""

from __future__ import annotations

import pytest
import torch
from indexer_cases import exact_scores, make_batch

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.indexer import deep_gemm as program
from consistent_kernels.indexer import indexer_schedule, indexer_scores_paged
from consistent_kernels.testing import BATCH_SIZES, assert_bitwise_equal

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="DeepGEMM needs a CUDA device"
)


def test_deep_gemm_indexer_rejects_heads() -> None:
    with pytest.raises(UnsupportedError, match="12 heads is not supported; supported: 32, 64, 128"):
        program.start(12, torch.device("cpu"))


@pytest.mark.gpu
@needs_cuda
def test_deep_gemm_paged_equals_packed() -> None:
    # The question of the op: if this fails, the implementation refuses to start (its probe).
    batch = make_batch((300, 1, 70, 129), 64, "deep_gemm", device="cuda")
    packed, paged = batch.packed(), batch.paged()
    for row in range(500):
        assert_bitwise_equal(
            batch.seen(paged[row], row, packed=False),
            batch.seen(packed[row], row, packed=True),
            f"row {row}",
        )
    # As a decode step calls it: one schedule for all layers, a table row for every query.
    rows = [299, 300, 370, 499]
    lens = (batch.ends - batch.starts)[rows]
    step = indexer_scores_paged(
        batch.q[rows],
        batch.weights[rows],
        batch.cache,
        batch.block_table,
        None,
        lens,
        columns=batch.longest,
        impl="deep_gemm",
        schedule=indexer_schedule(lens, impl="deep_gemm"),
    )
    for at, row in enumerate(rows):
        assert_bitwise_equal(
            batch.seen(step[at], row, packed=False), batch.seen(paged[row], row, packed=False)
        )


@pytest.mark.gpu
@needs_cuda
def test_deep_gemm_indexer_is_batch_invariant() -> None:
    batch = make_batch((257,), 64, "deep_gemm", device="cuda")
    whole = batch.packed()
    for rows in BATCH_SIZES:
        for first in {0, (257 - rows) // 2, 257 - rows}:
            chosen = slice(first, first + rows)
            for scores, packed in ((batch.packed(chosen), True), (batch.paged(chosen), False)):
                for row in {0, rows // 2, rows - 1}:
                    assert_bitwise_equal(
                        batch.seen(scores[row], first + row, packed=packed),
                        batch.seen(whole[first + row], first + row, packed=True),
                    )


@pytest.mark.gpu
@needs_cuda
def test_deep_gemm_indexer_is_near_ours() -> None:
    theirs = make_batch((400,), 64, "deep_gemm", device="cuda")
    ours = make_batch((400,), 64, "triton", device="cuda")
    left, right = theirs.packed(), ours.packed()
    for row in (0, 63, 200, 399):
        expected, magnitude = exact_scores(theirs, row)
        for scores in (left, right):
            error = (theirs.seen(scores[row], row, packed=True).double() - expected).abs()
            # FP8 products keep 13 bits below the largest of their 32 terms; see test_indexer.py.
            assert bool((error <= magnitude * 2**-11).all())
