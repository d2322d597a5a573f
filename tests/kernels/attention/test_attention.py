"""Relations of attention: batch, phase, chunks, pages, splits, window, poison."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from attention_cases import (
    CASES,
    LENGTHS,
    attention_fp64,
    borders,
    fill_pages,
    make_batch,
    replay,
)

from consistent_kernels.attention import (
    AttentionParameters,
    attention_paged,
    attention_varlen,
    plan_attention,
    write_kv,
)
from consistent_kernels.attention.spec import PAGE_MULTIPLES
from consistent_kernels.errors import InvalidInputError
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, round_early

cases = pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())


@cases
@pytest.mark.parametrize("peaked", [False, True], ids=["flat", "peaked"])
def test_attention_matches_reference(
    impl_device: tuple[str, str], params: AttentionParameters, peaked: bool
) -> None:
    batch = make_batch(params, *impl_device, peaked=peaked)
    out, lse = batch.attend()
    exact = attention_fp64(batch)
    # With u = 2^-24 (2^-21 on tensor cores, which cut the addends of a dot product off): a score
    # is wrong by at most (D + 4) u times its sum of |q| |k|, which is also the relative error of
    # exp; twice, in numerator and denominator. Each key and each of the rescales of a tile adds a
    # few u to both sums. P is rounded to bf16, 2^-8, in the numerator, and the result once more.
    unit = 2**-24 if impl_device[0] == "reference" else 2**-21
    score = exact.score * (params.head_dim + 4) * unit
    sums = (2 * exact.keys + 64).unsqueeze(-1) * unit
    spread = exact.spread * (2**-8 + 2 * (score + sums)).unsqueeze(-1)
    bound = spread + exact.out.abs() * 2**-8 + 1e-30
    assert bool(((out.double() - exact.out).abs() <= bound).all())
    assert bool(((lse.double() - exact.lse).abs() <= score + sums + exact.lse.abs() * unit).all())


@cases
def test_attention_is_batch_invariant(
    impl_device: tuple[str, str], params: AttentionParameters
) -> None:
    batch = make_batch(params, *impl_device)
    whole = batch.attend()
    order = [8, 0, 3, 9, 1, 7, 2, 6, 5, 4]
    for size in (1, 2, 5, 16):
        for first in range(0, len(order), size):
            chosen = [order[(first + j) % len(order)] for j in range(size)]
            rows = batch.rows(chosen)
            for actual, expected in zip(batch.attend(chosen), whole, strict=True):
                assert_bitwise_equal(actual, expected[rows], f"sequences {chosen}")


@cases
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_attention_prefill_equals_decode(
    impl_device: tuple[str, str], params: AttentionParameters, chunk: int
) -> None:
    batch = make_batch(params, *impl_device)
    replay(fill_pages(batch), chunk, batch.attend())


def test_attention_prefill_equals_decode_with_peaked_scores(impl_device: tuple[str, str]) -> None:
    for name in ("smollm2", "mqa96-window70-split64"):
        batch = make_batch(CASES[name], *impl_device, peaked=True)
        replay(fill_pages(batch), 7, batch.attend())


def test_attention_mixed_phases_equal_prefill(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["qwen2-split128"], *impl_device)
    pages, whole = fill_pages(batch, block_size=32), batch.attend()
    mixed = [(9, 299, 300), (8, 100, 129), (7, 0, 65), (6, 63, 64), (0, 0, 1), (9, 3, 5)]
    for size in range(1, len(mixed) + 1):
        for parts in itertools.islice(itertools.permutations(mixed, size), 12):
            out, lse, rows = pages.attend(list(parts), padded_rows=size % 3)
            assert_bitwise_equal(out[: rows.numel()], whole[0][rows], str(parts))
            assert_bitwise_equal(lse[: rows.numel()], whole[1][rows], str(parts))


@pytest.mark.parametrize(
    ("block_size", "split"), [(8, False), (16, True), (24, True), (48, False), (128, False)]
)
def test_attention_pages_do_not_matter(
    impl_device: tuple[str, str], block_size: int, split: bool
) -> None:
    if block_size % PAGE_MULTIPLES[impl_device[0]]:
        pytest.skip(f"{impl_device[0]} serves pages of 16 keys and their multiples")
    batch = make_batch(CASES["qwen2-split128"], *impl_device)
    pages = fill_pages(batch, block_size=block_size, split=split)
    replay(pages, 64, batch.attend())


def test_attention_is_split_invariant(impl_device: tuple[str, str]) -> None:
    # Contexts up to key_split are not split: any key_split from there on gives the same bits.
    params = dataclasses.replace(CASES["smollm2"], key_split=128)
    batch = make_batch(params, *impl_device)
    out, lse = batch.attend()
    larger, larger_lse = batch.attend(params=CASES["smollm2"])
    position = torch.cat([torch.arange(n) for n in LENGTHS]).to(out.device)
    short = position < 128
    assert_bitwise_equal(out[short], larger[short])
    assert_bitwise_equal(lse[short], larger_lse[short])
    assert not bitwise_equal(lse[~short], larger_lse[~short])


def test_attention_ignores_poison(impl_device: tuple[str, str]) -> None:
    params = CASES["smollm2"]
    batch = make_batch(params, *impl_device)
    pages, whole = fill_pages(batch), batch.attend()
    assert bool(pages.k_cache.isnan().any())
    parts = [(i, n - 1, n) for i, n in enumerate(LENGTHS)]
    out, lse, rows = pages.attend(parts, padded_rows=6)
    assert_bitwise_equal(out[:-6], whole[0][rows])
    assert_bitwise_equal(lse[:-6], whole[1][rows])
    assert_bitwise_equal(out[-6:], torch.zeros_like(out[-6:]))
    assert_bitwise_equal(lse[-6:], torch.full_like(lse[-6:], float("-inf")))


def test_attention_writes_into_out(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    batch = make_batch(CASES["smollm2"], impl, device)
    pages, (expected, _) = fill_pages(batch), batch.attend()
    lens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    cu = borders(LENGTHS, device)
    keys = {"seq_lens": lens, "block_table": pages.block_table, "k_cache": pages.k_cache}
    options = {"params": batch.params, "impl": impl}
    plans = [None]
    if device == "cpu":
        plans.append(plan_attention(cu, num_tokens=len(batch.q), **keys, **options))
    given = (batch.q, pages.k_cache, pages.v_cache, pages.block_table, lens, cu)
    options |= {"max_query_len": max(LENGTHS), "max_seq_len": max(LENGTHS)}
    for plan in plans:
        out = torch.full_like(batch.q, float("nan"))
        attention_paged(*given, plan=plan, out=out, **options)
        assert_bitwise_equal(out, expected)
        with pytest.raises(InvalidInputError, match="out must be contiguous"):
            attention_paged(*given, plan=plan, out=out.transpose(0, 1), **options)


def test_attention_rows_beyond_the_sequences_are_zero(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["smollm2"], *impl_device, lengths=(17, 3))
    expected = batch.attend()
    padded = torch.cat([batch.q, torch.full_like(batch.q[:9], float("nan"))])
    cu = borders(batch.lengths, impl_device[1])
    out, lse = attention_varlen(
        padded, batch.k, batch.v, cu, cu, params=batch.params, impl=batch.impl
    )
    assert_bitwise_equal(out[:20], expected[0])
    assert_bitwise_equal(lse[:20], expected[1])
    assert_bitwise_equal(out[20:], torch.zeros_like(out[20:]))


def test_attention_ignores_freed_pages_outside_the_window(impl_device: tuple[str, str]) -> None:
    params = CASES["mqa96-window70-split64"]
    batch = make_batch(params, *impl_device)
    pages, whole = fill_pages(batch), batch.attend()
    for chunk_begin, chunk_end in ((299, 300), (298, 299), (201, 202), (190, 230)):
        first_seen = chunk_begin - params.sliding_window + 1
        freed = pages.block_table.clone()
        freed[9, : first_seen // 16] = int(
            (pages.k_cache.isnan().all(1)).all(-1).all(-1).nonzero()[0]
        )
        used = dataclasses.replace(pages, block_table=freed)
        out, lse, rows = used.attend([(9, chunk_begin, chunk_end)])
        assert_bitwise_equal(out, whole[0][rows])
        assert_bitwise_equal(lse, whole[1][rows])


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100])
def test_attention_window_counts_the_query(impl_device: tuple[str, str], window: int) -> None:
    # Equal scores and a one-hot V: the output at dim j is 1 / (keys seen) if key j is seen, else 0.
    impl, device = impl_device
    params = AttentionParameters(4, 2, 256, 0.0625, window, 64)
    length = 200
    q = torch.zeros(length, 4, 256, dtype=torch.bfloat16, device=device)
    k = torch.zeros(length, 2, 256, dtype=torch.bfloat16, device=device)
    v = torch.eye(256, dtype=torch.bfloat16, device=device)[:length, None, :].expand(-1, 2, -1)
    cu = borders([length], device)
    out, lse = attention_varlen(q, k, v, cu, cu, params=params, impl=impl)
    for t in sorted({0, window - 1, window, window + 1, 150, length - 1} & set(range(length))):
        count = min(t + 1, window)
        seen = (out[t, 0] != 0).nonzero().view(-1).tolist()
        assert seen == list(range(t + 1 - count, t + 1))
        assert abs(float(lse[t, 0]) - torch.tensor(float(count)).log().item()) < 4e-6


def test_attention_zero_output_is_positive(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["qwen2-split128"], *impl_device, lengths=(130,))
    batch.v.fill_(-0.0)
    out, _ = batch.attend()
    assert_bitwise_equal(out, torch.zeros_like(out))


def test_attention_large_score_gaps_leave_one_key(impl_device: tuple[str, str]) -> None:
    # Key 5 beats all others by more than exp can show: rows from 5 on return its value.
    batch = make_batch(CASES["qwen2-split128"], *impl_device, lengths=(300,))
    batch.q.fill_(4.0)
    batch.k.fill_(-4.0)
    batch.k[5] = 4.0
    out, _ = batch.attend()
    assert_bitwise_equal(out[5:, 0], (batch.v[5, 0] + 0.0).expand(295, -1).contiguous())
    replay(fill_pages(batch), 16, batch.attend())


def test_attention_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["gqa128-split128"], *impl_device)
    first = batch.attend()
    for _ in range(5):
        for actual, expected in zip(batch.attend(), first, strict=True):
            assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_write_kv_copies_bits_and_skips(impl_device: tuple[str, str], dtype: torch.dtype) -> None:
    impl, device = impl_device
    k = torch.randn(5, 3, 80).to(device, dtype)
    v = torch.randn(5, 3, 80).to(device, dtype)
    cache = torch.full((4, 2, 16, 3, 80), float("nan"), dtype=dtype, device=device)
    k_cache, v_cache = cache.unbind(1)
    slots = torch.tensor([63, -1, 0, 17, -1], device=device)
    write_kv(k, v, k_cache, v_cache, slots, impl=impl)
    assert_bitwise_equal(k_cache[3, 15], k[0])
    assert_bitwise_equal(k_cache[0, 0], k[2])
    assert_bitwise_equal(v_cache[1, 1], v[3])
    assert int((~cache.isnan()).sum()) == 2 * 3 * 3 * 80


def test_control_poison_in_a_used_slot_shows(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["smollm2"], *impl_device, lengths=(33,))
    pages = fill_pages(batch)
    pages.v_cache[int(pages.block_table[0, 0]), 4] = float("nan")
    assert bool(pages.attend([(0, 32, 33)])[0].isnan().any())


def test_control_diverges_with_splits_by_batch(impl_device: tuple[str, str]) -> None:
    # What a split-KV heuristic does: the number of splits follows the number of requests.
    batch = make_batch(CASES["smollm2"], *impl_device)
    whole, _ = batch.attend()
    alone, _ = batch.attend([9], dataclasses.replace(batch.params, key_split=64))
    assert not bitwise_equal(alone, whole[batch.rows([9])])


def test_control_diverges_with_an_early_rounded_merge(impl_device: tuple[str, str]) -> None:
    # Two partial outputs rounded to bf16 before they are merged, instead of fp32 ones.
    params = dataclasses.replace(CASES["smollm2"], key_split=128)
    batch = make_batch(params, *impl_device, lengths=(256,))
    device = impl_device[1]
    q, one, half = batch.q[-1:], borders([1], device), borders([128], device)
    kwargs = {"params": params, "impl": batch.impl}
    low, low_lse = attention_varlen(q, batch.k[:128], batch.v[:128], one, half, **kwargs)
    high, high_lse = attention_varlen(q, batch.k[128:], batch.v[128:], one, half, **kwargs)
    total = torch.logaddexp(low_lse, high_lse)
    parts = [
        round_early(out.float()) * (lse - total).exp().unsqueeze(-1)
        for out, lse in ((low, low_lse), (high, high_lse))
    ]
    merged = (parts[0] + parts[1]).to(q.dtype)
    assert not bitwise_equal(merged, batch.attend()[0][-1:])
    assert float((merged - batch.attend()[0][-1:]).abs().max()) < 0.25 * float(batch.v.abs().max())


def test_control_stock_attention_depends_on_the_phase(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["smollm2"], *impl_device, lengths=(300,))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (batch.q, batch.k, batch.v))
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    prefill = attend(q, k, v, is_causal=True)
    decode = torch.cat(
        [attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(300)], 2
    )
    assert not bitwise_equal(decode, prefill)


def test_control_diverges_with_another_window(impl_device: tuple[str, str]) -> None:
    batch = make_batch(CASES["mqa96-window70-split64"], *impl_device)
    other, _ = batch.attend(params=dataclasses.replace(batch.params, sliding_window=71))
    assert not bitwise_equal(other, batch.attend()[0])
