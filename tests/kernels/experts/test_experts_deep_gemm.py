"""BF16 experts over DeepGEMM: places, calls, the start-up probe, and what is refused.

On a CPU the Triton kernels around the library run interpreted, with a stand-in for its GEMM; the
relations themselves run on a GPU, in `test_experts.py`, where "deep_gemm" is one implementation of
several.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import SHAPES, prepared, routing, tokens
from implementations import HAS_DEEP_GEMM
from interpreted import output_interpreted

from consistent_kernels import deep_gemm_start as start
from consistent_kernels.errors import NumericsError, UnsupportedError
from consistent_kernels.experts import (
    deep_gemm,
    deep_gemm_grouped,
    deep_gemm_start,
    expert_outputs,
)
from consistent_kernels.experts.deep_gemm_places import PLACE_ALIGNMENT, contiguous_places
from consistent_kernels.experts.deep_gemm_start import GroupedGemmShape, layer_shapes
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

_INTERPRETED = """
import torch
from expert_cases import SHAPES, prepared, routing, tokens
from consistent_kernels import deep_gemm_start as start
from consistent_kernels.experts import deep_gemm, deep_gemm_grouped, deep_gemm_start
from consistent_kernels.linear.reference import linear_ref
from consistent_kernels.silu_and_mul.triton import silu_and_mul_fwd
from consistent_kernels.testing import assert_bitwise_equal

BF16 = torch.bfloat16

def stand_in(x, weight, places):
    y = torch.full((x.shape[0], weight.shape[1]), float("nan"), dtype=x.dtype)
    for expert in range(weight.shape[0]):
        mine = places.expert == expert
        y[mine] = linear_ref(x[mine].nan_to_num(), weight[expert].float(), None, BF16)
    return y

deep_gemm.grouped_gemm = stand_in
started = []
deep_gemm.start = lambda *shape: started.append(shape[:3])
shape = SHAPES["tiny"]
w13, w2 = prepared(shape, "triton", "cpu")
for rows, layout in ((1, "contiguous"), (40, "contiguous"), (40, "masked"), (7, "fastest")):
    x = tokens(shape, rows, "cpu", seed=1)
    ids, _ = routing(shape, rows, "cpu", seed=2)
    for limit in (None, 0.5):
        y = deep_gemm.expert_outputs_deep_gemm(x, w13, w2, ids, limit, layout)
        for token, slot in (ids >= 0).nonzero().tolist():
            expert = ids[token, slot]
            row = x[token : token + 1]
            gate, up = linear_ref(row, w13[expert].float(), None, BF16).chunk(2, 1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = silu_and_mul_fwd(gate.contiguous(), up.contiguous())
            expected = linear_ref(hidden, w2[expert].float(), None, BF16)[0]
            assert_bitwise_equal(y[token, slot], expected, f"{rows} {layout} {token} {slot}")
        assert not y[ids < 0].any(), "rows that went nowhere are zero"

assert set(started) == {(8, 128, 64), (8, 64, 64)}, "both weights are probed"

# An expert named twice by every token: no place is left, and that shows.
ids = torch.full((129, 2), 3, dtype=torch.int32)
x = tokens(shape, 129, "cpu", seed=1)
y = deep_gemm.expert_outputs_deep_gemm(x, w13, w2, ids, None, "masked")
finite = y.isfinite().all(-1).flatten()
assert int(finite.sum()) == 256, "the capacity of an expert"
assert bool(y.isnan().all(-1).flatten()[~finite].all())

# The start-up probe passes what does not follow the rows, and names what does.
deep_gemm_grouped.MASKED_TOKENS, start.ROWS = 16, (1, 5, 16, 17)
deep_gemm_start.grouped_gemm = stand_in
layer, cpu = deep_gemm_start.GroupedGemmShape(8, 64, 64, 20), torch.device("cpu")
assert not start.has_passed(layer, cpu)
start.check_rows(layer, cpu)
assert start.has_passed(deep_gemm_start.GroupedGemmShape(8, 64, 64, 9), cpu)
assert not start.has_passed(deep_gemm_start.GroupedGemmShape(8, 128, 64, 20), cpu)

def fault(x, weight, places):
    y = stand_in(x, weight, places)
    if places.capacity is not None and places.place.numel() == 5:
        y.view(torch.int16)[places.place[2], 3] ^= 1  # one bit of one row of one layout
    return y

deep_gemm_start.grouped_gemm = fault
try:
    start.check_rows(layer, cpu)
    raise SystemExit("the probe missed a fault")
except start.NumericsError as error:
    assert "M=5 and M=20" in str(error), error
print("done")
"""


def test_experts_between_aligned_places_equal_rows_alone() -> None:
    assert output_interpreted(_INTERPRETED) == "done\n"


@pytest.mark.parametrize("experts", [1, 8, 128])
def test_places_hold_every_routing_and_calls_are_few_sizes(experts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for rows in (1, 2, 17, 128, 129, 513, 4096, 65536):
        places = contiguous_places(rows, experts)
        filled = min(rows, experts)
        # The most blocks: one row in each expert, the others in whole blocks of one of them.
        most = 1 + (rows - filled) // PLACE_ALIGNMENT * PLACE_ALIGNMENT
        for counts in (
            torch.bincount(torch.randint(experts, (rows,), generator=generator)),
            torch.tensor([most, *[1] * (filled - 1)]),
        ):
            needed = -(-counts // PLACE_ALIGNMENT) * PLACE_ALIGNMENT
            assert int(needed.sum()) <= places, (rows, counts)
        sizes = start.pieces(places)
        assert sum(sizes) == places
        seen.update(sizes)
    assert seen <= set(start.PIECES)


@pytest.mark.parametrize(
    ("hidden", "width", "served"),
    [(2048, 768, True), (64, 64, True), (192, 96, False), (72, 128, False)],
)
def test_experts_deep_gemm_is_chosen_by_layer(hidden: int, width: int, served: bool) -> None:
    assert deep_gemm_grouped.is_served(hidden, width) is served
    shapes = layer_shapes(8, hidden, width, 100)
    assert [(s.columns, s.inner) for s in shapes] == (
        [(2 * width, hidden), (hidden, width)] if served else []
    )
    assert all(s.max_rows == 100 for s in shapes)


def test_experts_deep_gemm_probes_both_layouts_and_every_call_size() -> None:
    # Qwen3-30B-A3B, 8,192 tokens a step.
    shape = next(iter(layer_shapes(128, 2048, 768, 8192 * 8)))
    probed = start.probed_rows(shape.max_rows)
    masked = [rows for rows in probed if deep_gemm_grouped.is_masked("fastest", rows, 128)]
    # 256 experts have as many places in fewer rows.
    assert deep_gemm_grouped.is_masked("fastest", 128, 256)
    assert not deep_gemm_grouped.is_masked("fastest", 129, 256)
    assert {1, 16, 17, 64, 65, 129, 256} <= set(masked)
    sizes = {
        size
        for rows in probed
        if rows not in masked
        for size in start.pieces(contiguous_places(rows, 128))
    }
    # Places of 128 experts come in steps of 2,048, so the smaller calls do not occur.
    assert sizes == {size for size in start.PIECES if size >= 2048}


def test_experts_deep_gemm_rejects_other_dtypes() -> None:
    shape = SHAPES["tiny"]
    x = tokens(shape, 3, "cpu", seed=1, dtype=torch.float16)
    w13, w2 = prepared(shape, "deep_gemm", "cpu", dtype=torch.float16)
    ids, _ = routing(shape, 3, "cpu", seed=2)
    with pytest.raises(UnsupportedError, match=r"float16 .* supported: torch\.bfloat16"):
        deep_gemm.expert_outputs_deep_gemm(x, w13, w2, ids, None, "contiguous")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_around_deep_gemm_cross_compile(arch: int) -> None:
    from consistent_kernels.experts import deep_gemm_places, deep_gemm_rows

    cubins = [
        cross_compile(
            deep_gemm_places._expert_places_kernel,
            arch=arch,
            signature={
                **dict.fromkeys(("ids_ptr", "place_ptr", "expert_ptr", "count_ptr"), "*i32"),
                **dict.fromkeys(("rows", "places", "capacity"), "i32"),
            },
            constexprs={
                "E": 128,
                "BINS": 256,
                "MASKED": True,
                "PACKED": False,
                "ALIGNMENT": 128,
                "OVERFLOW": -2,
                "BLOCK": 1024,
            },
        ),
        cross_compile(
            deep_gemm_rows._to_places_kernel,
            arch=arch,
            signature={"x_ptr": "*bf16", "place_ptr": "*i32", "out_ptr": "*bf16"}
            | {"x_stride": "i32"},
            constexprs={"SLOTS": 8, "K": 2048, "BLOCK": 1024},
        ),
        cross_compile(
            deep_gemm_rows._activate_kernel,
            arch=arch,
            signature={"x_ptr": "*bf16", "place_ptr": "*i32", "out_ptr": "*bf16", "limit": "fp32"},
            constexprs={"WIDTH": 768, "HAS_LIMIT": True, "BLOCK": 1024},
            enable_fp_fusion=False,
        ),
        cross_compile(
            deep_gemm_rows._from_places_kernel,
            arch=arch,
            signature={"x_ptr": "*bf16", "place_ptr": "*i32", "y_ptr": "*bf16"},
            constexprs={"H": 2048, "OVERFLOW": -2, "BLOCK": 1024},
        ),
    ]
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_DEEP_GEMM, reason="needs Hopper or Blackwell and vLLM's CUDA wheel")
class TestOnHopper:
    def test_experts_deep_gemm_fastest_layout_equals_contiguous(self) -> None:
        shape = SHAPES["qwen3-like"]
        w13, w2 = prepared(shape, "deep_gemm", "cuda")
        for rows in (1, deep_gemm_grouped.MASKED_TOKENS, deep_gemm_grouped.MASKED_TOKENS + 1):
            x = tokens(shape, rows, "cuda", seed=3)
            ids, _ = routing(shape, rows, "cuda", seed=4)
            given = (x, w13, w2, ids)
            fastest = expert_outputs(*given, layout="fastest", impl="deep_gemm")
            contiguous = expert_outputs(*given, layout="contiguous", impl="deep_gemm")
            assert_bitwise_equal(fastest, contiguous, f"{rows} rows")

    def test_experts_deep_gemm_takes_an_expert_twice(self) -> None:
        shape = SHAPES["tiny"]
        w13, w2 = prepared(shape, "deep_gemm", "cuda")
        x = tokens(shape, 300, "cuda", seed=5)
        once = torch.full((300, 1), 3, dtype=torch.int32, device="cuda")
        twice = once.expand(300, 2).contiguous()
        y = expert_outputs(x, w13, w2, twice, impl="deep_gemm")
        for slot in range(2):
            alone = expert_outputs(x, w13, w2, once, impl="deep_gemm")
            assert_bitwise_equal(y[:, slot], alone[:, 0])

    def test_experts_deep_gemm_ignores_what_unused_places_hold(self) -> None:
        shape = SHAPES["tiny"]
        w13, w2 = prepared(shape, "deep_gemm", "cuda")
        x = tokens(shape, 65, "cuda", seed=6)
        ids, _ = routing(shape, 65, "cuda", seed=7)
        for layout in ("contiguous", "masked"):
            expected = expert_outputs(x, w13, w2, ids, layout=layout, impl="deep_gemm")
            # Freed NaN is what the uninitialized places are made of.
            torch.full((1 << 26,), float("nan"), device="cuda")
            again = expert_outputs(x, w13, w2, ids, layout=layout, impl="deep_gemm")
            assert_bitwise_equal(again, expected, layout)

    def test_control_start_refuses_rows_that_follow_the_batch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fault(x: torch.Tensor, weight: torch.Tensor, places: object) -> torch.Tensor:
            y = deep_gemm_grouped.grouped_gemm(x, weight, places)
            if places.place.numel() == 17:
                y.view(torch.int16)[places.place[3], 5] ^= 1
            return y

        monkeypatch.setattr(deep_gemm_start, "grouped_gemm", fault)
        with pytest.raises(NumericsError, match="M=17"):
            start.check_rows(GroupedGemmShape(8, 128, 64, 100), torch.device("cuda"))
