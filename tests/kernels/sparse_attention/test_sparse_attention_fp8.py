"""Relations of sparse attention from FP8 caches: batch, place, and the path through a workspace."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sparse_attention_cases import make_case, needs_cuda

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.kv_cache_fp8 import V4, V32, KVLayout, gather_kv_fp8, write_kv_fp8
from consistent_kernels.sparse_attention import (
    read_slots_fp8,
    sparse_attention,
    sparse_attention_fp8,
)
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations
from train_bridge.functions.kv_cache_fp8 import KVCacheFP8Function
from train_bridge.functions.sparse_attention import (
    SparseAttentionFP8Function,
    SparseAttentionFunction,
)

PROGRAMS = [
    pytest.param(("reference", "cpu"), id="reference-cpu"),
    pytest.param(("flash_mla", "cuda"), id="flash_mla-cuda", marks=[pytest.mark.gpu, needs_cuda]),
]
TOKENS, BLOCK = 65, 64


@dataclasses.dataclass
class Caches:
    """Queries with entries in one cache (V3.2) or in two (V4)."""

    q: torch.Tensor
    layout: KVLayout
    cache: torch.Tensor
    slots: torch.Tensor
    extra: tuple[torch.Tensor, torch.Tensor] | None
    sinks: torch.Tensor | None
    scale: float

    def run(self, impl: str, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """The op on some queries."""
        extra = None if self.extra is None else (self.extra[0], self.extra[1][rows])
        return sparse_attention_fp8(
            self.q[rows], self.cache, self.slots[rows], scale=self.scale, extra=extra,
            sinks=self.sinks, impl=impl,
        )  # fmt: skip

    def workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, indices) of the same entries for `sparse_attention`, sections on whole tiles."""
        parts, places, first = [], [], 0
        for cache, slots in [(self.cache, self.slots)] + ([self.extra] if self.extra else []):
            padded = torch.nn.functional.pad(slots, (0, -slots.shape[1] % 64), value=-1)
            count = cache.shape[0] * cache.shape[1]
            every = torch.arange(count, dtype=torch.int32, device=cache.device)
            used = torch.isin(every, padded)
            every = torch.where(used, every, -1)  # the rest is poison
            parts.append(read_slots_fp8(cache, every, self.layout))
            places.append(torch.where(padded >= 0, padded + first, -1))
            first += count
        return torch.cat(parts), torch.cat(places, dim=1).to(torch.int32)


def make_cache(kv: torch.Tensor, layout: KVLayout, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages that hold kv in shuffled slots among poison, slot of each row)."""
    blocks = 3 * len(kv) // BLOCK + 1
    shape = (blocks, BLOCK, layout.token_bytes)
    cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=kv.device)
    order = torch.randperm(blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    slots = order[: len(kv)].to(kv.device)
    impl = "reference" if kv.device.type == "cpu" else "triton"
    write_kv_fp8(kv, cache, slots, layout=layout, impl=impl)
    return cache, slots.to(torch.int32)


def make_caches(form: str, device: str) -> Caches:
    big = device == "cuda"
    heads = (128 if form == "v32" else 64) if big else 2
    columns = (2048 if form == "v32" else 512) if big else 100
    layout = V32 if form == "v32" else V4
    case = make_case(
        tokens=TOKENS, heads=heads, d_v=512, rope=layout.width - 512, entries=4 * columns,
        columns=columns, sinks=form == "v4", device=device,
    )  # fmt: skip
    cache, places = make_cache(case.kv, layout, 1)

    def slots_of(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.where(indices >= 0, table[indices.clamp_min(0).long()], -1)

    extra = None
    if form == "v4":
        other = make_case(
            tokens=TOKENS, heads=heads, d_v=512, rope=0, entries=300, columns=70, sinks=False,
            seed=5, device=device,
        )  # fmt: skip
        more, more_places = make_cache(other.kv, layout, 2)
        extra = (more, slots_of(other.indices, more_places))
    return Caches(
        case.q, layout, cache, slots_of(case.indices, places), extra, case.sinks, case.scale
    )


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=["v32", "v4"])
def caches(request: pytest.FixtureRequest, program: tuple[str, str]) -> Caches:
    return make_caches(request.param, program[1])


def test_sparse_attention_fp8_matches_the_workspace_path(
    program: tuple[str, str], caches: Caches
) -> None:
    rows, indices = caches.workspace()
    keywords = {"scale": caches.scale, "d_v": 512, "sinks": caches.sinks, "impl": program[0]}
    expected, expected_lse = sparse_attention(caches.q, rows, indices, **keywords)
    out, lse = caches.run(program[0])
    if program[0] == "reference":
        assert_bitwise_equal(out, expected)
        assert_bitwise_equal(lse, expected_lse)
        return
    # Two kernels of one formula over one set of rows. bf16 rounds by 2^-8 at most: each kernel its
    # P and its result, the prefill kernel half of P once more. Scores are fp32 sums of 576 products
    # whose magnitudes add up to 70 here; 2^-20 of that moves P by less than 2^-13.
    reach = rows[indices.clamp_min(0).long()][..., :512].abs().amax(1).float()
    error = (out.float() - expected.float()).abs()
    assert bool((error <= reach.unsqueeze(1) * (5 * 2**-8 + 2**-12)).all())
    seen = expected_lse < float("inf")
    assert torch.equal(lse < float("inf"), seen)
    assert float((lse - expected_lse)[seen].abs().max()) < 1e-3


@pytest.mark.parametrize("layout", [V32, V4])
def test_sparse_attention_fp8_rounds_scales_to_bf16(layout: KVLayout) -> None:
    """Rows read directly: V3.2's differ from gathered ones by two roundings, V4's in no bit."""
    kv = hazard_activations((200, layout.width), seed=4)
    cache, slots = make_cache(kv, layout, 3)
    zero = torch.zeros(1, dtype=torch.int32)
    gathered = gather_kv_fp8(
        cache, slots[None], zero, layout=layout, impl="reference", starts=zero
    )[0]
    direct = read_slots_fp8(cache, slots, layout)
    absent = read_slots_fp8(cache, torch.tensor([-1]), layout)[0]
    assert_bitwise_equal(absent, torch.zeros_like(absent))
    if layout is V4:
        assert_bitwise_equal(direct, gathered)
        return
    assert not bitwise_equal(direct, gathered)
    # The scale's rounding and one of each product: 3 * 2^-8 and their products.
    error = (direct.float() - gathered.float()).abs()
    assert bool((error <= gathered.float().abs() * (3 * 2**-8 + 2**-14)).all())


def test_sparse_attention_fp8_is_batch_invariant(program: tuple[str, str], caches: Caches) -> None:
    whole, whole_lse = caches.run(program[0])
    for rows in (1, 2, 7, 8, 16, 17, 33, 64):
        for start in {0, (TOKENS - rows) // 2, TOKENS - rows}:
            part = slice(start, start + rows)
            out, lse = caches.run(program[0], part)
            assert_bitwise_equal(out, whole[part])
            assert_bitwise_equal(lse, whole_lse[part])


def test_sparse_attention_fp8_entries_may_lie_anywhere(
    program: tuple[str, str], caches: Caches
) -> None:
    whole, _ = caches.run(program[0])
    order = torch.randperm(caches.cache.shape[0], generator=torch.Generator().manual_seed(3))
    order = order.to(caches.cache.device)
    turned = torch.argsort(order)
    slots = caches.slots.long()
    moved = turned[slots.clamp_min(0) // BLOCK] * BLOCK + slots % BLOCK
    moved = torch.where(slots >= 0, moved, -1).to(torch.int32)
    other = dataclasses.replace(caches, cache=caches.cache[order].contiguous(), slots=moved)
    assert_bitwise_equal(other.run(program[0])[0], whole)


def test_sparse_attention_fp8_is_run_to_run_stable(
    program: tuple[str, str], caches: Caches
) -> None:
    first = caches.run(program[0])
    for _ in range(3):
        for actual, expected in zip(caches.run(program[0]), first, strict=True):
            assert_bitwise_equal(actual, expected)


def test_sparse_attention_fp8_gradients_equal_those_of_the_workspace_path() -> None:
    """Straight through FP8: the same rows in the same tiles have the same gradients."""
    case = make_case(tokens=9, heads=2, d_v=512, rope=0, entries=90, columns=128, sinks=True)
    other = make_case(tokens=9, heads=2, d_v=512, rope=0, entries=40, columns=64, sinks=False)
    grad = hazard_activations((9, 2, 512), seed=3)
    results = []
    for direct in (True, False):
        leaves = [x.clone().requires_grad_() for x in (case.q, case.kv, other.kv, case.sinks)]
        q, kv, more, sinks = leaves
        if direct:
            out = SparseAttentionFP8Function.apply(
                q, kv, case.indices, more, other.indices, sinks, case.scale, V4, "reference",
                "reference",
            )  # fmt: skip
        else:
            rows = [KVCacheFP8Function.apply(part, V4, "reference") for part in (kv, more)]
            behind = torch.where(other.indices >= 0, other.indices + len(kv), -1)
            indices = torch.cat((case.indices, behind), dim=1)
            out = SparseAttentionFunction.apply(
                q, torch.cat(rows), indices, sinks, case.scale, 512, "reference"
            )
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*results, strict=True):
        assert_bitwise_equal(actual, expected)
        assert bool(actual.any())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", ["v32", "v4"])
def test_sparse_attention_fp8_graph_replay_equals_eager(form: str) -> None:
    caches = make_caches(form, "cuda")
    eager = caches.run("flash_mla")
    static = dataclasses.replace(caches, slots=torch.full_like(caches.slots, -1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = static.run("flash_mla")
    static.slots.copy_(caches.slots)
    graph.replay()
    for actual, expected in zip(captured, eager, strict=True):
        assert_bitwise_equal(actual, expected)


@pytest.mark.gpu
@needs_cuda
def test_sparse_attention_fp8_does_not_follow_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from consistent_kernels.sparse_attention import fp8_flash_mla

    caches = make_caches("v4", "cuda")
    whole = caches.run("flash_mla")
    monkeypatch.setattr(fp8_flash_mla, "QUERIES_PER_CALL", 9)
    for actual, expected in zip(caches.run("flash_mla"), whole, strict=True):
        assert_bitwise_equal(actual, expected)


@pytest.mark.gpu
@needs_cuda
def test_control_stock_splits_follow_the_batch() -> None:
    """vLLM's own call of this kernel cuts a lone query in splits, one among others not."""
    flashmla = pytest.importorskip("vllm.v1.attention.ops.flashmla")
    caches = make_caches("v32", "cuda")
    # Rows of -1 say nothing; row 2 names an entry in every column.
    full = caches.slots[2:3].expand(TOKENS, -1).contiguous()

    def stock(rows: int) -> torch.Tensor:
        metadata, _ = flashmla.get_mla_metadata()
        return flashmla.flash_mla_with_kvcache(
            q=caches.q[:rows].unsqueeze(1), k_cache=caches.cache.unsqueeze(-2), block_table=None,
            head_dim_v=512, cache_seqlens=None, tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True, indices=full[:rows].unsqueeze(1), softmax_scale=caches.scale,
        )[0]  # fmt: skip

    assert not bitwise_equal(stock(1)[0], stock(TOKENS)[0])


def test_sparse_attention_fp8_rejects_bad_inputs() -> None:
    caches = make_caches("v32", "cpu")
    keywords = {"scale": 1.0, "impl": "reference"}
    with pytest.raises(
        InvalidInputError, match=r"cache must be uint8 of shape \[blocks, block_size, 656\]"
    ):
        sparse_attention_fp8(caches.q, caches.cache[..., :584], caches.slots, **keywords)
    with pytest.raises(InvalidInputError, match=r"slots of cache must be int32 \[65, K\]"):
        sparse_attention_fp8(caches.q, caches.cache, caches.slots[1:], **keywords)
    extra = (caches.cache, caches.slots)
    with pytest.raises(InvalidInputError, match=r"extra must be None for the V3\.2 layout"):
        sparse_attention_fp8(caches.q, caches.cache, caches.slots, extra=extra, **keywords)
    with pytest.raises(InvalidInputError, match=r"q must be bfloat16 \[T, H, 576 or 512\]"):
        sparse_attention_fp8(caches.q[..., :500], caches.cache, caches.slots, **keywords)
    with pytest.raises(UnsupportedError, match="impl 'triton' is not supported"):
        sparse_attention_fp8(
            caches.q, caches.cache, caches.slots, **(keywords | {"impl": "triton"})
        )
