"""Relations of the index scores: pages, phases, batches, poison; the top-k behind them."""

from __future__ import annotations

import pytest
import torch
from indexer_cases import exact_scores, make_batch
from torch._subclasses.fake_tensor import FakeTensorMode

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.indexer import (
    indexer_schedule,
    indexer_scores,
    indexer_scores_paged,
    quantize_indexer_q,
)
from consistent_kernels.indexer.layout import row_stride
from consistent_kernels.indexer.reference import row_scores_ref
from consistent_kernels.kv_cache_fp8 import INDEXER, new_cache
from consistent_kernels.sparse_topk import sparse_topk
from consistent_kernels.testing import BATCH_SIZES, assert_bitwise_equal, bitwise_equal

HEADS = 16


@pytest.mark.parametrize("heads", [16, 64])
def test_indexer_scores_match_reference(impl_device: tuple[str, str], heads: int) -> None:
    impl, device = impl_device
    batch = make_batch((150,), heads, impl, device=device)
    scores = batch.packed()
    # The reference rounds an exact dot to fp32. Hopper's FP8 product aligns its 32 terms to the
    # largest and keeps at least 13 bits below it, four times over 128 dimensions. The head sum
    # rounds a product and at most log2(64) sums and the scale: 8 * 2^-24.
    unit = 2**-24 if impl == "reference" else 2**-11
    for row in (0, 1, 77, 149):
        expected, magnitude = exact_scores(batch, row)
        error = (batch.seen(scores[row], row, packed=True).double() - expected).abs()
        assert bool((error <= magnitude * (unit + 8 * 2**-24)).all())


def test_indexer_scores_paged_equals_packed(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    for block_size in (16, 64):
        batch = make_batch((70, 1, 133), HEADS, impl, device=device, block_size=block_size)
        packed, paged = batch.packed(), batch.paged()
        for row in range(204):
            assert_bitwise_equal(
                batch.seen(paged[row], row, packed=False),
                batch.seen(packed[row], row, packed=True),
                f"row {row}, pages of {block_size}",
            )


def test_indexer_scores_paged_without_requests(impl_device: tuple[str, str]) -> None:
    # Decode: row t of the table is that of query t.
    impl, device = impl_device
    batch = make_batch((70, 1, 133), HEADS, impl, device=device)
    rows = [69, 70, 203]
    expected = batch.paged(rows)
    lens = (batch.ends - batch.starts)[rows]
    got = indexer_scores_paged(
        batch.q[rows],
        batch.weights[rows],
        batch.cache,
        batch.block_table,
        None,
        lens,
        columns=batch.longest,
        impl=impl,
        schedule=indexer_schedule(lens, impl=impl),
    )
    for at, row in enumerate(rows):
        assert_bitwise_equal(
            batch.seen(got[at], row, packed=False), batch.seen(expected[at], row, packed=False)
        )


def test_indexer_prefill_equals_decode(impl_device: tuple[str, str]) -> None:
    # One prefill, chunks of it, and one query at a time.
    impl, device = impl_device
    batch = make_batch((130, 40), HEADS, impl, device=device)
    whole = batch.packed()
    chunks = torch.cat([batch.packed(slice(a, b)) for a, b in ((0, 1), (1, 100), (100, 170))])
    for row in range(170):
        expected = batch.seen(whole[row], row, packed=True)
        assert_bitwise_equal(batch.seen(chunks[row], row, packed=True), expected)
    for row in (0, 63, 64, 129, 130, 169):
        alone = batch.paged([row])[0]
        expected = batch.seen(whole[row], row, packed=True)
        assert_bitwise_equal(batch.seen(alone, row, packed=False), expected)


def test_indexer_scores_are_batch_invariant(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch((257,), HEADS, impl, device=device)
    whole = batch.paged()
    # The reference scores row by row in Python: fewer batches tell as much there.
    for rows in BATCH_SIZES if device == "cuda" else (1, 2, 9, 33, 129):
        for first in {0, 257 - rows}:
            part = batch.paged(slice(first, first + rows))
            for row in {0, rows // 2, rows - 1}:
                at = first + row
                assert_bitwise_equal(
                    batch.seen(part[row], at, packed=False),
                    batch.seen(whole[at], at, packed=False),
                )


def test_indexer_and_topk_select_alike_in_every_phase(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch((90, 200), HEADS, impl, device=device)
    packed = sparse_topk(batch.packed(), batch.starts, batch.ends, 64, impl=impl)
    lengths = batch.ends - batch.starts
    paged = sparse_topk(batch.paged(), torch.zeros_like(lengths), lengths, 64, impl=impl)
    assert_bitwise_equal(paged, packed)


def test_indexer_scores_ignore_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch((70, 60), HEADS, impl, device=device)
    expected = batch.paged()
    # Keys after a query's own, and unused page table entries, turn to poison.
    row = 40
    page, offset = divmod(41, 64)
    base = int(batch.block_table[0, page])
    flat = batch.cache[base].view(-1)
    flat[offset * 128 : 64 * 128] = 0xFF
    batch.block_table[1, 1:] = batch.cache.shape[0] - 1
    got = batch.paged()
    for at in (0, row, 70, 129):
        assert_bitwise_equal(
            batch.seen(got[at], at, packed=False), batch.seen(expected[at], at, packed=False)
        )


def test_indexer_scores_are_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch((200,), HEADS, impl, device=device)
    first = batch.paged()
    for _ in range(3):
        again = batch.paged()
        for row in range(0, 200, 7):
            assert_bitwise_equal(
                batch.seen(again[row], row, packed=False),
                batch.seen(first[row], row, packed=False),
            )


def test_indexer_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch((60, 40), HEADS, impl, device=device)
    lens = batch.ends - batch.starts
    backend = "inductor" if device == "cuda" else "aot_eager"

    def select() -> tuple[torch.Tensor, torch.Tensor]:
        packed = sparse_topk(batch.packed(), batch.starts, batch.ends, 16, impl=impl)
        paged = sparse_topk(batch.paged(), torch.zeros_like(lens), lens, 16, impl=impl)
        return packed, paged

    compiled = torch.compile(select, backend=backend, fullgraph=True)
    for got, expected in zip(compiled(), select(), strict=True):
        assert_bitwise_equal(got, expected)


def test_indexer_scores_lie_as_a_compiler_is_told(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch((60, 40), HEADS, impl, device=device)
    for run, paged in ((batch.packed, False), (batch.paged, True)):
        scores = run()
        assert scores.stride() == (row_stride(scores.shape[1], paged), 1)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert run().stride() == scores.stride()


def test_quantize_indexer_q_folds_scales_in_order() -> None:
    q = torch.randn(5, 4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    values, folded = quantize_indexer_q(
        q, weights, softmax_scale=0.1, head_scale=0.3, impl="reference"
    )
    amax = q.float().abs().amax(-1)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    assert_bitwise_equal(folded, ((weights * scale) * 0.1) * 0.3)
    expected = (q.float() / scale[..., None]).to(torch.float8_e4m3fn)
    assert_bitwise_equal(values.view(torch.uint8), expected.view(torch.uint8))


def test_control_another_order_of_heads_differs() -> None:
    batch = make_batch((150,), HEADS, "reference")
    args = (batch.k, batch.k_scale)
    scores = row_scores_ref(batch.q[0], batch.weights[0], *args)
    order = torch.arange(HEADS).view(2, -1).t().flatten()  # neighbours become halves
    other = row_scores_ref(batch.q[0, order], batch.weights[0, order], *args)
    assert not bitwise_equal(scores, other)


def test_control_key_scale_before_the_sum_differs() -> None:
    batch = make_batch((150,), HEADS, "reference")
    k_scale = batch.k_scale * 1.1  # no longer a power of two
    scores = row_scores_ref(batch.q[0], batch.weights[0], batch.k, k_scale)
    dots = (batch.k.float().double() @ batch.q[0].float().double().t()).float()
    early = (dots * k_scale[:, None]).relu() * batch.weights[0]
    ones = torch.ones_like(k_scale)
    assert not bitwise_equal(scores, early.sum(1) * ones)


def test_indexer_scores_reject_bad_inputs() -> None:
    batch = make_batch((20,), HEADS, "reference")
    args = (batch.k, batch.k_scale, batch.starts, batch.ends)
    with pytest.raises(InvalidInputError, match="q must be float8_e4m3fn"):
        indexer_scores(batch.q.float(), batch.weights, *args, impl="reference")
    with pytest.raises(InvalidInputError, match="weights must be float32"):
        indexer_scores(batch.q, batch.weights.half(), *args, impl="reference")
    with pytest.raises(InvalidInputError, match=r"k_scale must be float32 of shape \(20,\)"):
        indexer_scores(
            batch.q, batch.weights, batch.k, batch.k_scale[:3], *args[2:], impl="reference"
        )
    with pytest.raises(
        InvalidInputError, match="starts, ends must be 0 <= start <= end <= 20, got 0, 21"
    ):
        indexer_scores(batch.q, batch.weights, *args[:3], batch.ends + 1, impl="reference")
    with pytest.raises(InvalidInputError, match="heads must be a power of two from 16"):
        indexer_scores(batch.q[:, :12], batch.weights[:, :12], *args, impl="triton")
    with pytest.raises(UnsupportedError, match="supported: reference, triton, deep_gemm"):
        indexer_scores(batch.q, batch.weights, *args, impl="cuda")
    with pytest.raises(InvalidInputError, match="blocks a multiple of 16 bytes apart"):
        indexer_scores_paged(
            batch.q,
            batch.weights,
            new_cache(2, 5, INDEXER, "cpu"),
            batch.block_table,
            batch.requests,
            batch.ends,
            columns=20,
            impl="reference",
        )
