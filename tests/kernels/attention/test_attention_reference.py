"""The CPU program of attention: tiles, plan, threads, and what the API refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import CASES, borders, fill_pages, make_batch
from fresh_process import output_of_process

from consistent_kernels.attention import (
    AttentionParameters,
    attention_paged,
    attention_varlen,
    plan_attention,
    write_kv,
)
from consistent_kernels.attention import plan as plan_module
from consistent_kernels.attention.tile_shape import narrow_shape, rows_keep_bits, wide_shape
from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.model_facts import HEAD_DIMS
from consistent_kernels.testing import assert_bitwise_equal

REFERENCE = ("reference", "cpu")


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 32])
def test_attention_tiles_hold_every_slot_and_head(group: int) -> None:
    for shape in (narrow_shape(group), wide_shape(group, 64)):
        if shape is None:
            continue
        assert shape.rows % 8 == 0
        assert 64 % shape.slots == 0
        slot, head = shape.slot_and_head()
        place = shape.row_of()
        for s in range(shape.slots):
            assert slot[place[s]].tolist() == [s] * group
            assert head[place[s]].tolist() == list(range(group))


def test_attention_takes_wide_tiles_where_they_keep_the_bits() -> None:
    """A library may choose its kernel by the rows: MKL does for 256 on CPUs without bf16 products.

    There the narrow tile serves; most head dims have wide ones on every CPU seen.
    """
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for group in (1, 3, 7):
                shapes = {head_dim: wide_shape(group, head_dim) for head_dim in HEAD_DIMS}
                taken = {head_dim: shape for head_dim, shape in shapes.items() if shape}
                assert 2 * len(taken) > len(HEAD_DIMS)
                for head_dim, shape in taken.items():
                    assert rows_keep_bits.__wrapped__(shape, head_dim, threads)
    finally:
        torch.set_num_threads(before)


def test_attention_wide_equals_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("smollm2", "mqa96-window70-split64", "qwen2-split128", "gqa256-window100-split128")
    for name in names:
        batch = make_batch(CASES[name], *REFERENCE)
        wide = batch.attend()
        with monkeypatch.context() as patch:
            patch.setattr(plan_module, "wide_shape", lambda *_: None)
            narrow = batch.attend()
        assert_bitwise_equal(narrow[0], wide[0])
        assert_bitwise_equal(narrow[1], wide[1])


def test_control_probe_sees_a_tile_that_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # A GEMM that sums in another order for tall matrices, as a library may on another machine.
    exact = torch.bmm

    def by_shape(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape[1] < 64:
            return exact(a, b)
        half = a.shape[2] // 2
        return exact(a[:, :, :half], b[:, :half]) + exact(a[:, :, half:], b[:, half:])

    monkeypatch.setattr(torch, "bmm", by_shape)
    wide = dataclasses.replace(narrow_shape(3), stack=8)
    assert not rows_keep_bits.__wrapped__(wide, 64, 1)


def test_attention_portions_keep_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASES["gqa128-split128"], *REFERENCE)
    expected = batch.attend()
    for size in (1, 1 << 18, 1 << 30):
        monkeypatch.setattr(plan_module, "GROUP_BYTES", size)
        for actual, whole in zip(batch.attend(), expected, strict=True):
            assert_bitwise_equal(actual, whole)


def test_attention_does_not_depend_on_threads() -> None:
    source = """
from attention_cases import CASES, fill_pages, make_batch
for name in ("smollm2", "one-head", "gqa256-window100-split128"):
    batch = make_batch(CASES[name], "reference", "cpu", lengths=(1, 17, 65, 200))
    whole = batch.attend()
    pages = fill_pages(batch)
    alone, pair = pages.attend([(3, 199, 200)]), pages.attend([(2, 64, 65), (0, 0, 1)])
    print_bits(*whole, *alone[:2], *pair[:2])
    assert torch.equal(alone[0], whole[0][-1:])
"""
    expected = output_of_process(source, threads=1)
    for threads in (2, 7):
        assert output_of_process(source, threads=threads) == expected


def test_attention_plan_changes_no_bit() -> None:
    batch = make_batch(CASES["smollm2"], *REFERENCE)
    expected = batch.attend()
    cu = borders(batch.lengths)
    plan = plan_attention(
        cu, params=batch.params, num_tokens=batch.q.shape[0], impl="reference", cu_seqlens_k=cu
    )
    for _ in range(2):  # a layer, and the next with the first one's scratch
        out, lse = attention_varlen(
            batch.q, batch.k, batch.v, cu, cu, params=batch.params, impl="reference", plan=plan
        )
        assert_bitwise_equal(out, expected[0])
        assert_bitwise_equal(lse, expected[1])


def test_attention_paged_plan_and_fp32_pages_change_no_bit() -> None:
    batch = make_batch(CASES["smollm2"], *REFERENCE)
    pages = fill_pages(batch)
    parts = [(i, max(0, n - 3), n) for i, n in enumerate(batch.lengths)]
    expected_out, expected_lse, rows = pages.attend(parts)
    wide = dataclasses.replace(pages, k_cache=pages.k_cache.float(), v_cache=pages.v_cache.float())
    out, lse, _ = wide.attend(parts)
    assert_bitwise_equal(out, expected_out)
    assert_bitwise_equal(lse, expected_lse)
    cu = borders([b - a for _, a, b in parts])
    seq_lens = torch.tensor(batch.lengths)
    plan = plan_attention(
        cu,
        params=batch.params,
        num_tokens=rows.numel(),
        impl="reference",
        seq_lens=seq_lens,
        block_table=pages.block_table,
        k_cache=pages.k_cache,
    )
    for cache in (pages, wide):
        out, lse = attention_paged(
            batch.q[rows],
            cache.k_cache,
            cache.v_cache,
            pages.block_table,
            seq_lens,
            cu,
            params=batch.params,
            impl="reference",
            max_query_len=3,
            max_seq_len=300,
            plan=plan,
        )
        assert_bitwise_equal(out, expected_out)
        assert_bitwise_equal(lse, expected_lse)


def test_attention_takes_views_of_a_fused_projection() -> None:
    params = CASES["smollm2"]
    fused = torch.randn(40, (9 + 3 + 3) * 64).bfloat16()
    q, k, v = (x.unflatten(1, (-1, 64)) for x in fused.split([576, 192, 192], 1))
    cu = borders([40])
    expected = attention_varlen(
        q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, params=params, impl="reference"
    )
    out, lse = attention_varlen(q, k, v, cu, cu, params=params, impl="reference")
    assert_bitwise_equal(out, expected[0])
    assert_bitwise_equal(lse, expected[1])


def test_attention_compiled_equals_eager() -> None:
    batch = make_batch(CASES["smollm2"], *REFERENCE, lengths=(17, 33))
    pages, cu = fill_pages(batch), borders(batch.lengths)
    table, seq_lens = pages.block_table, torch.tensor(batch.lengths)
    k_cache, v_cache = pages.k_cache.clone(), pages.v_cache.clone()
    slots = torch.arange(16, 32)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = attention_varlen(q, k, v, cu, cu, params=batch.params, impl="reference")
        write_kv(k[:16], v[:16], k_cache, v_cache, slots, impl="reference")
        paged, _ = attention_paged(
            q,
            k_cache,
            v_cache,
            table,
            seq_lens,
            cu,
            params=batch.params,
            impl="reference",
            max_query_len=33,
            max_seq_len=33,
        )
        return out, lse, paged

    # aot_eager traces through the fake ops without a C++ compiler.
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected = step(batch.q, batch.k, batch.v)
    for actual, eager in zip(compiled(batch.q, batch.k, batch.v), expected, strict=True):
        assert_bitwise_equal(actual, eager)


def test_attention_of_an_empty_batch() -> None:
    params, cu = CASES["smollm2"], borders([0, 0])
    out, lse = attention_varlen(
        torch.zeros(0, 9, 64).bfloat16(),
        torch.zeros(0, 3, 64).bfloat16(),
        torch.zeros(0, 3, 64).bfloat16(),
        cu,
        cu,
        params=params,
        impl="reference",
    )
    assert out.shape == (0, 9, 64)
    assert lse.shape == (0, 9)


def test_attention_rejects_bad_parameters() -> None:
    with pytest.raises(
        InvalidInputError, match=r"num_heads must be a positive multiple of .*\(4\)"
    ):
        AttentionParameters(9, 4, 64, 0.125)
    with pytest.raises(UnsupportedError, match="head_dim 72 is not supported; supported: 64, 80"):
        AttentionParameters(9, 3, 72, 0.125)
    with pytest.raises(InvalidInputError, match="key_split must be a multiple of 64, got 100"):
        AttentionParameters(9, 3, 64, 0.125, key_split=100)
    with pytest.raises(InvalidInputError, match="sliding_window must be None or at least 1, got 0"):
        AttentionParameters(9, 3, 64, 0.125, sliding_window=0)
    with pytest.raises(InvalidInputError, match="scale must be a positive finite number"):
        AttentionParameters(9, 3, 64, float("nan"))


def test_attention_rejects_bad_inputs() -> None:
    params, cu = CASES["smollm2"], borders([8])
    q = torch.zeros(8, 9, 64, dtype=torch.bfloat16)
    k = torch.zeros(8, 3, 64, dtype=torch.bfloat16)
    kwargs = {"params": params, "impl": "reference"}
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported; supported: refer"):
        attention_varlen(q, k, k, cu, cu, params=params, impl="cuda")
    with pytest.raises(InvalidInputError, match=r"q must be of shape \[T, 9, 64\]"):
        attention_varlen(q[:, :8], k, k, cu, cu, **kwargs)
    with pytest.raises(InvalidInputError, match=r"k must be of shape \[Tk, 3, 64\]"):
        attention_varlen(q, q, k, cu, cu, **kwargs)
    with pytest.raises(InvalidInputError, match=r"q must be one of .*bfloat16.* got torch\.int64"):
        attention_varlen(q.long(), k, k, cu, cu, **kwargs)
    with pytest.raises(InvalidInputError, match=r"v must be torch\.bfloat16, got torch\.float16"):
        attention_varlen(q, k, k.half(), cu, cu, **kwargs)
    with pytest.raises(InvalidInputError, match="cu_seqlens_q must be int32 or int64"):
        attention_varlen(q, k, k, cu.float(), cu, **kwargs)
    with pytest.raises(InvalidInputError, match="cu_seqlens_k must be of length 2, got 3"):
        attention_varlen(q, k, k, cu, borders([4, 4]), **kwargs)
    with pytest.raises(InvalidInputError, match="sequence 0 must be at most its 4 keys, got 8"):
        attention_varlen(q, k, k, cu, borders([4]), **kwargs)
    with pytest.raises(InvalidInputError, match="cu_seqlens_q must be at most 8, got 9"):
        attention_varlen(q, k, k, borders([9]), borders([9]), **kwargs)
    plan = plan_attention(cu, params=params, num_tokens=8, impl="reference", cu_seqlens_k=cu)
    other = dataclasses.replace(params, key_split=64)
    with pytest.raises(InvalidInputError, match="plan must be made for"):
        attention_varlen(q, k, k, cu, cu, params=other, impl="reference", plan=plan)
    with pytest.raises(InvalidInputError, match="plan must be made for 4 tokens, got 8"):
        attention_varlen(q[:4], k, k, cu, cu, plan=plan, **kwargs)
    with pytest.raises(InvalidInputError, match="keys must be cu_seqlens_k, or seq_lens"):
        plan_attention(cu, params=params, num_tokens=8, impl="reference", seq_lens=cu[1:])


def test_attention_paged_rejects_bad_pages() -> None:
    params, cu = CASES["smollm2"], borders([1])
    q = torch.zeros(1, 9, 64, dtype=torch.bfloat16)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    kwargs = {"params": params, "impl": "reference", "max_query_len": 1, "max_seq_len": 1}
    for impl, multiple, size in (("reference", 8, 20), ("llvm", 8, 4), ("triton", 16, 24)):
        odd = torch.zeros(2, size, 3, 64, dtype=torch.bfloat16)
        with pytest.raises(InvalidInputError, match=f"multiple of {multiple}, got {size}"):
            attention_paged(q, odd, odd, table, lens, cu, **kwargs | {"impl": impl})
    heads_first = torch.zeros(2, 3, 16, 64, dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(InvalidInputError, match="k_cache must be laid out as rows of 192"):
        attention_paged(q, heads_first, heads_first, table, lens, cu, **kwargs)
    pages = torch.zeros(2, 16, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="seq_lens must be of length 1, got 2"):
        attention_paged(q, pages, pages, table, lens.repeat(2), cu, **kwargs)
    with pytest.raises(InvalidInputError, match="block_table must be int32 or int64 with 2"):
        attention_paged(q, pages, pages, table[0], lens, cu, **kwargs)
    with pytest.raises(InvalidInputError, match=r"k must be torch\.bfloat16, got torch\.float16"):
        write_kv(q[:, :3].half(), q[:, :3], pages, pages, lens, impl="reference")
    with pytest.raises(InvalidInputError, match="slot_mapping must be of length 1, got 2"):
        write_kv(q[:, :3], q[:, :3], pages, pages, lens.repeat(2), impl="reference")


def test_attention_scratch_outlives_inference_mode() -> None:
    # An engine under inference_mode and a trainer in one process share the scratch.
    batch = make_batch(CASES["one-head"], *REFERENCE, lengths=(80,), seed=21)
    with torch.inference_mode():
        expected = batch.attend()
    out, lse = batch.attend()
    assert_bitwise_equal(out, expected[0].clone())
    assert_bitwise_equal(lse, expected[1].clone())
