"""FlashAttention 3's program: phases, chunks, pages, key splits, graphs, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import LENGTHS, attention_fp64, borders, fill_pages, make_batch, replay

from consistent_kernels.attention import (
    AttentionParameters,
    attention_paged,
    attention_varlen,
    flash_attn,
)
from consistent_kernels.attention.flash_attn import Told
from consistent_kernels.attention.spec import FLASH_HEAD_DIMS, FLASH_PAGE_SIZES, choose
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal

IMPL = ("flash_attn", "cuda")
HEADS = {64: (9, 3), 80: (8, 8), 96: (8, 2), 128: (32, 8), 256: (16, 2)}
CASES = {
    f"{'x'.join(map(str, HEADS[width]))}x{width}-{split}": AttentionParameters(
        *HEADS[width], width, width**-0.5, key_split=split
    )
    for width in FLASH_HEAD_DIMS
    for split in (64, 128, 4096)
}
# Head dim 64 has two tiles: the window's, and that of one warp group.
TILED = {name: (params, False) for name, params in CASES.items()}
TILED |= {f"{name}-one-group": (params, True) for name, params in CASES.items() if "x64-" in name}
cases = pytest.mark.parametrize("params", TILED.values(), ids=TILED.keys(), indirect=True)
tiles = pytest.mark.parametrize("tile", [False, True], ids=["window", "one-group"], indirect=True)


@pytest.fixture
def params(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionParameters:
    """One case, with its tile."""
    case, one_group = request.param
    _take(one_group, monkeypatch)
    return case


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cases that a tile serves."""
    _take(request.param, monkeypatch)
    return [case for case, one_group in TILED.values() if one_group == request.param]


def _take(one_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "FLASH_ONE_GROUP_HEAD_DIMS", (64,) if one_group else ())


class _Facts:
    head_dim, sliding_window = 128, None


def test_flash_attn_is_chosen_on_hopper_by_the_model() -> None:
    assert choose("cuda", "sm_90", _Facts()) == "flash_attn"
    assert choose("cuda", "sm_100", _Facts()) == "triton"
    assert choose("cuda", "sm_90", None) == "triton"
    assert choose("cpu") in ("reference", "llvm")
    windowed = _Facts()
    windowed.sliding_window = 128
    assert choose("cuda", "sm_90", windowed) == "triton"
    narrow = _Facts()
    narrow.head_dim = 72
    assert choose("cuda", "sm_90", narrow) == "triton"


WIDE = AttentionParameters(32, 8, 128, 1.0)
NARROW = AttentionParameters(9, 3, 64, 1.0)
FAR = 1 << 20


@pytest.mark.parametrize(
    ("case", "one_group", "max_q", "sees_all", "expected"),
    [
        (WIDE, False, 1, False, Told(True, -1, 0, 2)),
        (WIDE, False, 300, False, Told(True, -1, 0, 300)),
        (WIDE, False, 300, True, Told(False, FAR, 301, 303)),
        (WIDE, True, 300, False, Told(True, -1, 0, 300)),
        (NARROW, False, 1, False, Told(False, FAR, 0, 2)),
        (NARROW, False, 300, True, Told(False, FAR, 301, 303)),
        (NARROW, True, 1, False, Told(True, -1, 0, 2)),
        (NARROW, True, 300, False, Told(True, -1, 0, 2)),
        (NARROW, True, 300, True, Told(False, -1, -1, 2)),
    ],
)
def test_flash_attn_is_told_what_fixes_its_tile(
    case: AttentionParameters,
    one_group: bool,
    max_q: int,
    sees_all: bool,
    expected: Told,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _take(one_group, monkeypatch)
    assert flash_attn.told(case, max_q, sees_all=sees_all) == expected


@pytest.mark.parametrize("sees_all", [False, True])
@pytest.mark.parametrize("one_group", [False, True])
@pytest.mark.parametrize("group", [1, 3, 32, 64])
def test_flash_attn_tile_follows_neither_phase_nor_pages(
    group: int, one_group: bool, sees_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA3's own choice for head dim 64: `use_one_mma_wg`, `tile_size_fwd_sm90`."""
    _take(one_group, monkeypatch)
    case = AttentionParameters(group, 1, 64, 1.0)
    found = set()
    for max_q in (1, 2, 7, 21, 22, 300, 4096):
        say = flash_attn.told(case, max_q, sees_all=sees_all)
        right = -1 if say.right >= say.max_q - 1 else say.right
        local = not say.causal and (say.left >= 0 or right >= 0)
        one_wg = not local and say.max_q * group <= 64
        for paged in (False, True):
            wide = 128 if say.causal else 160 if local or paged else 192
            found.add(192 if one_wg else wide)
    assert found == {192 if one_group and group <= 32 else 160}


def test_control_a_causal_mask_alone_has_two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "FLASH_CAUSAL_HEAD_DIMS", (64, 128))
    _take(False, monkeypatch)
    told = [flash_attn.told(NARROW, max_q, sees_all=False) for max_q in (1, 300)]
    assert [say.max_q * NARROW.group <= 64 for say in told] == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention 3 needs a CUDA device")
class TestOnHopper:
    @cases
    def test_flash_attn_matches_fp64(self, params: AttentionParameters) -> None:
        batch = make_batch(params, *IMPL)
        out, lse = batch.attend()
        exact = attention_fp64(batch)
        # As test_attention_matches_reference, with one more rounding for the output of a split.
        score = exact.score * (params.head_dim + 4) * 2**-21
        sums = (2 * exact.keys + 64).unsqueeze(-1) * 2**-21
        spread = exact.spread * (2**-7 + 2 * (score + sums)).unsqueeze(-1)
        assert bool(((out.double() - exact.out).abs() <= spread + exact.out.abs() * 2**-8).all())
        near = score + sums + exact.lse.abs() * 2**-21
        assert bool(((lse.double() - exact.lse).abs() <= near).all())

    @cases
    def test_flash_attn_is_batch_invariant(self, params: AttentionParameters) -> None:
        batch = make_batch(params, *IMPL)
        whole = batch.attend()
        order = [8, 0, 3, 9, 1, 7, 2, 6, 5, 4]
        for size in (1, 2, 5):
            for first in range(0, len(order), size):
                chosen = order[first : first + size]
                rows = batch.rows(chosen)
                for actual, expected in zip(batch.attend(chosen), whole, strict=True):
                    assert_bitwise_equal(actual, expected[rows], f"sequences {chosen}")

    @cases
    @pytest.mark.parametrize("chunk", [1, 7, 64, 150])
    def test_flash_attn_prefill_equals_decode(
        self, params: AttentionParameters, chunk: int
    ) -> None:
        batch = make_batch(params, *IMPL)
        replay(fill_pages(batch), chunk, batch.attend())

    @pytest.mark.parametrize("block_size", FLASH_PAGE_SIZES)
    @pytest.mark.parametrize("split", [False, True], ids=["apart", "alternating"])
    @tiles
    def test_flash_attn_pages_do_not_matter(
        self, tile: list[AttentionParameters], block_size: int, split: bool
    ) -> None:
        for params in tile:
            batch = make_batch(params, *IMPL, peaked=True)
            pages = fill_pages(batch, block_size=block_size, split=split)
            replay(pages, 100, batch.attend())

    @pytest.mark.parametrize(
        ("width", "one_group"), [(64, True), *((width, False) for width in FLASH_HEAD_DIMS)]
    )
    def test_flash_attn_long_contexts(
        self, width: int, one_group: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _take(one_group, monkeypatch)
        params = AttentionParameters(*HEADS[width], width, width**-0.5, key_split=2048)
        batch = make_batch(params, *IMPL, lengths=(5000, 2048, 4097, 300))
        pages, whole = fill_pages(batch), batch.attend()
        for parts in (
            [(0, 4999, 5000), (1, 2047, 2048), (2, 4096, 4097), (3, 299, 300)],
            [(0, 2000, 4500), (2, 4090, 4097), (3, 0, 300)],
            [(2, 2048, 4096), (1, 7, 2048)],
            [(0, 4095, 4096)],
            [(0, 2048, 2049)],
        ):
            out, lse, rows = pages.attend(parts)
            assert_bitwise_equal(out, whole[0][rows], str(parts))
            assert_bitwise_equal(lse, whole[1][rows], str(parts))

    @tiles
    def test_flash_attn_ignores_poison(self, tile: list[AttentionParameters]) -> None:
        for params in tile:
            batch = make_batch(params, *IMPL)
            pages, whole = fill_pages(batch), batch.attend()
            parts = [(i, n - 1, n) for i, n in enumerate(LENGTHS)]
            out, lse, rows = pages.attend(parts, padded_rows=6)
            assert_bitwise_equal(out[:-6], whole[0][rows])
            assert_bitwise_equal(lse[:-6], whole[1][rows])
            assert_bitwise_equal(out[-6:], torch.zeros_like(out[-6:]))
            assert_bitwise_equal(lse[-6:], torch.full_like(lse[-6:], float("-inf")))

    def test_flash_attn_is_run_to_run_stable(self) -> None:
        batch = make_batch(next(iter(CASES.values())), *IMPL)
        first = batch.attend()
        for _ in range(5):
            for actual, expected in zip(batch.attend(), first, strict=True):
                assert_bitwise_equal(actual, expected)

    @cases
    @pytest.mark.parametrize("queries", [1, 7], ids=["decode", "chunks"])
    def test_flash_attn_graph_replay_equals_eager(
        self, params: AttentionParameters, queries: int
    ) -> None:
        """A full graph of a decode step or of chunks, over splits where they are."""
        batch = make_batch(params, *IMPL)
        pages, whole = fill_pages(batch), batch.attend()
        chosen = [i for i, n in enumerate(LENGTHS) if n >= queries]
        first = borders(LENGTHS).tolist()
        q = batch.q[: queries * len(chosen)].clone()
        table, out = pages.block_table[chosen].clone(), torch.empty_like(q)
        lens = torch.full((len(chosen),), queries, dtype=torch.int32, device="cuda")
        cu = borders([queries] * len(chosen), "cuda").int()

        def step() -> None:
            attention_paged(
                q, pages.k_cache, pages.v_cache, table, lens, cu, params=params,
                impl="flash_attn", max_query_len=queries, max_seq_len=max(LENGTHS), out=out,
            )  # fmt: skip

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for back in (0, 2, 8, 19):
            ends = [max(queries, LENGTHS[i] - back) for i in chosen]
            last = [first[i] + end for i, end in zip(chosen, ends, strict=True)]
            rows = torch.cat([torch.arange(end - queries, end) for end in last]).cuda()
            q.copy_(batch.q[rows])
            lens.copy_(torch.tensor(ends, dtype=torch.int32))
            out.fill_(float("nan"))
            graph.replay()
            assert_bitwise_equal(out, whole[0][rows])

    def test_flash_attn_rejects_what_it_does_not_serve(self) -> None:
        window = AttentionParameters(8, 8, 128, 1.0, sliding_window=16)
        batch = make_batch(window, *IMPL, lengths=(40,))
        with pytest.raises(UnsupportedError, match="sliding window"):
            batch.attend()
        wide = make_batch(AttentionParameters(8, 8, 128, 1.0), *IMPL, lengths=(40,))
        with pytest.raises(UnsupportedError, match="pages of 128"):
            fill_pages(wide, block_size=128).attend([(0, 0, 40)])

    @pytest.mark.parametrize("width", [64, 80, 96])
    def test_control_causal_mask_depends_on_the_phase(
        self, width: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flash_attn, "FLASH_CAUSAL_HEAD_DIMS", FLASH_HEAD_DIMS)
        _take(False, monkeypatch)
        params = AttentionParameters(*HEADS[width], width, width**-0.5)
        batch = make_batch(params, *IMPL)
        with pytest.raises(AssertionError, match="chunk 1 at"):
            replay(fill_pages(batch), 1, batch.attend())

    def test_control_stock_heuristic_depends_on_the_phase(self) -> None:
        from consistent_kernels import vendored

        params = AttentionParameters(16, 2, 256, 256**-0.5)
        batch = make_batch(params, *IMPL, lengths=(777,))
        pages = fill_pages(batch)
        cu = borders([777], "cuda").int()
        whole, _ = attention_varlen(
            batch.q, batch.k, batch.v, cu, cu, params=params, impl="flash_attn"
        )
        same = []
        for t in range(50, 777, 50):
            lens = torch.tensor([t + 1], dtype=torch.int32, device="cuda")
            one = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
            out = vendored.flash_attn_3().fwd(
                batch.q[t : t + 1], pages.k_cache, pages.v_cache, None, None, None, None,
                one, None, None, None, lens, 1, t + 1, pages.block_table.int(), None, None,
                None, None, None, None, None, None, params.scale, True, -1, 0, 0.0, True,
                None, 0, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip
            same.append(bitwise_equal(out, whole[t : t + 1]))
        assert not all(same)
