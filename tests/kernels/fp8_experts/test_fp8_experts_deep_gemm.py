"""FP8 experts over DeepGEMM: places, layouts, rows alone and among others; against the dense GEMM.

On a CPU the Triton kernels around the library run interpreted, with a stand-in for its GEMM.
"""

from __future__ import annotations

import pytest
import torch
from fp8_expert_places import EXPERTS, HIDDEN, SLOTS, WIDTH, operands
from implementations import HAS_DEEP_GEMM
from interpreted import output_interpreted

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.experts.spec import LAYOUTS
from consistent_kernels.fp8_experts.deep_gemm import fp8_expert_outputs_deep_gemm
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

FORMATS = ("fp32", "ue8m0")

_INTERPRETED = """
import interpreted_fp8
import torch
from fp8_expert_places import EXPERTS, SLOTS, expert_of_places, operands, stand_in_gemm
from consistent_kernels import deep_gemm_start as start
from consistent_kernels.fp8_experts import deep_gemm, deep_gemm_packed, deep_gemm_start
from consistent_kernels.experts.deep_gemm_places import PackedPlaces, expert_places
from consistent_kernels.experts.reference import combine_ref
from consistent_kernels.fp8_linear.reference import fp8_gemm_ref
from consistent_kernels.quantization.triton import quantize_rows_fwd
from consistent_kernels.silu_and_mul.triton import silu_and_mul_fwd
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

interpreted_fp8.install()
deep_gemm.grouped_gemm = deep_gemm_start.grouped_gemm = stand_in_gemm
start.ROWS, deep_gemm_start._FEWEST_ROWS = (1, 5), 9
deep_gemm.check_supported = lambda *_: None
deep_gemm.quantize_rows = lambda x, scale_format, impl: quantize_rows_fwd(x, scale_format, False)

# On Hopper "fastest" packs few rows.
deep_gemm.is_packed = lambda layout, *_: layout == "fastest"
deep_gemm_start.is_packed = lambda layout, rows, *_: rows < 9

tokens = 40
for layout, scale_format in (("contiguous", "fp32"), ("masked", "ue8m0"), ("fastest", "fp32")):
    x, w13, w13_scale, w2, w2_scale, ids = operands(tokens, scale_format)
    flat = ids.view(-1)
    expected = torch.zeros(tokens * SLOTS, w2.shape[1], dtype=torch.bfloat16)
    for expert in range(EXPERTS):
        mine = flat == expert
        rows = x.repeat_interleave(SLOTS, 0)[mine]
        values = quantize_rows_fwd(rows, scale_format, False)
        gate_up = fp8_gemm_ref(*values, w13[expert], w13_scale[expert], torch.bfloat16)
        hidden = silu_and_mul_fwd(*(part.contiguous() for part in gate_up.chunk(2, 1)))
        values = quantize_rows_fwd(hidden, scale_format, False)
        expected[mine] = fp8_gemm_ref(*values, w2[expert], w2_scale[expert], torch.bfloat16)
    given = (x, w13, w13_scale, w2, w2_scale, ids)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3))
    for deep_gemm.FUSED_ROWS in (0, 1024):  # quantized once a token and copied, or once a slot
        y = deep_gemm.fp8_expert_outputs_deep_gemm(*given, None, scale_format, layout)
        assert_bitwise_equal(y.view(expected.shape), expected, layout)
    for shared in (None, x.flip(0)):
        out = deep_gemm.fp8_experts_deep_gemm(
            *given, weights, shared, None, scale_format, layout
        )
        assert_bitwise_equal(out, combine_ref(y, ids, weights, shared), f"{layout}, in one launch")

# The start of a whole model passes what does not follow the rows, and names what does.
start.ROWS = (1, 5, 16)
layer = deep_gemm_start.Fp8GroupedGemmShape(EXPERTS, 128, 256, 20, "fp32")
start.check_rows(layer, torch.device("cpu"))

def one_bit(x, weight, places, scale_format):
    y = stand_in_gemm(x, weight, places, scale_format)
    if places.place.numel() == 5:
        y.view(torch.int16)[places.place[2], 3] ^= 1
    return y

deep_gemm_start.grouped_gemm = one_bit
try:
    start.check_rows(layer, torch.device("cpu"))
    raise SystemExit("the start missed a fault")
except start.NumericsError as error:
    assert "M=5 and M=20" in str(error), error

# So does the first use of a layer that no start has prepared, here between the two layouts.
start.ROWS, deep_gemm_start._FEWEST_ROWS = (1, 5), 9
def of_layout(x, weight, places, scale_format):
    y = stand_in_gemm(x, weight, places, scale_format)
    if isinstance(places, PackedPlaces):
        y.view(torch.int16)[places.place[0], 3] ^= 1
    return y

deep_gemm_start.grouped_gemm = of_layout
deep_gemm.start.cache_clear()
start._passed.clear()
try:
    deep_gemm.fp8_expert_outputs_deep_gemm(x, w13, w13_scale, w2, w2_scale, ids, None, "fp32")
    raise SystemExit("the first use missed a fault")
except start.NumericsError as error:
    assert "M=1 and M=9" in str(error), error

for masked in (False, True):
    wide = torch.where(ids < 0, EXPERTS + 3, ids)  # beyond the last expert: nowhere too
    places = expert_places(wide, EXPERTS, masked=masked)
    counts = [int((flat == expert).sum()) for expert in range(EXPERTS)]
    assert places.count.tolist() == counts
    start, seen = 0, set()
    for expert, count in enumerate(counts):
        first = expert * places.capacity if masked else start
        mine = places.place[flat == expert].tolist()
        assert mine == list(range(first, first + count)), "in the order of the rows"
        end = first + (count if masked else -(-count // 128) * 128)
        assert set(places.expert[first:end].tolist()) <= {expert}
        seen |= set(range(first, end))
        start = end
    rest = [p for p in range(places.expert.numel()) if p not in seen]
    assert set(places.expert[rest].tolist()) == {-1}
    assert set(places.place[flat < 0].tolist()) == {-1}

# In one launch: the same places and bytes; an expert named twice by every token overflows alike.
for wide in (wide, torch.full((100, 2), 3, dtype=torch.int32), torch.full((5, 2), -1).int()):
    x = hazard_activations((wide.shape[0], 512), seed=4)
    places = expert_places(wide, EXPERTS, masked=True)
    values, scale = deep_gemm.quantize_to_places(x, places, wide.shape[1], "fp32")
    rows, found = deep_gemm.place_and_quantize(x, wide, EXPERTS, "fp32")
    for name in ("place", "expert", "count"):
        assert_bitwise_equal(getattr(found, name), getattr(places, name), name)
    used = places.place[places.place >= 0].long()
    flat_scale = [part.reshape(len(places.expert), -1)[used] for part in (rows[1], scale)]
    assert_bitwise_equal(rows[0].view(torch.uint8)[used], values.view(torch.uint8)[used])
    assert_bitwise_equal(*flat_scale)
assert (expert_places(torch.full((100, 2), 3).int(), EXPERTS, masked=True).place == -2).sum() == 72

# Packed: experts in order, rows in order; the bytes of a token in each of its places.
for fmt, wide in (
    ("fp32", ids), ("ue8m0", torch.where(ids < 0, EXPERTS + 3, ids)), ("fp32", ids[:1]),
    ("fp32", torch.full((100, 2), 3, dtype=torch.int32)), ("fp32", torch.full((5, 2), -1).int()),
    ("fp32", torch.arange(240).view(80, 3).int() % EXPERTS),
):
    x = hazard_activations((wide.shape[0], 640), seed=4)
    places = deep_gemm_start.pack(wide, EXPERTS)
    values, scale = quantize_rows_fwd(x.repeat_interleave(wide.shape[1], 0), fmt, False)
    kept = places.place >= 0
    # Counted in a launch before, or by every program.
    for deep_gemm_packed.COUNTED_ROWS in (0, 512):
        rows, found = deep_gemm.pack_and_quantize(x, wide, EXPERTS, fmt)
        assert (found.size, found.alignment) == (places.size, places.alignment)
        for name in ("place", "end"):
            assert_bitwise_equal(getattr(found, name), getattr(places, name), name)
        used = places.place[kept].long()
        assert_bitwise_equal(rows[0].view(torch.uint8)[used], values.view(torch.uint8)[kept])
        assert_bitwise_equal(rows[1][used], scale[kept])
    of_place, flat = expert_of_places(places), wide.view(-1)
    assert len(set(used.tolist())) == len(used) == int(((flat >= 0) & (flat < EXPERTS)).sum())
    assert of_place[used].tolist() == flat[places.place >= 0].tolist()
    for expert in range(EXPERTS):
        mine = places.place[flat == expert].tolist()
        assert mine == sorted(mine) and mine[:1] != [-1]
print("done")
"""


def test_experts_between_aligned_places_equal_rows_alone() -> None:
    assert output_interpreted(_INTERPRETED) == "done\n"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_around_deep_gemm_cross_compile(arch: int) -> None:
    from consistent_kernels.experts import deep_gemm_places
    from consistent_kernels.experts.deep_gemm_rows import (
        _combine_places_kernel,
        _from_places_kernel,
    )
    from consistent_kernels.fp8_experts import deep_gemm_packed, deep_gemm_rows

    groups = {"GROUPS": 4, "BLOCK": 4, "GROUP": 128}
    cubins = [
        cross_compile(
            deep_gemm_places._expert_places_kernel,
            arch=arch,
            signature={
                **dict.fromkeys(("ids_ptr", "place_ptr", "expert_ptr", "count_ptr"), "*i32"),
                **dict.fromkeys(("rows", "places", "capacity"), "i32"),
            },
            constexprs={
                "E": 6,
                "BINS": 8,
                "MASKED": False,
                "PACKED": True,
                "ALIGNMENT": 16,
                "OVERFLOW": -2,
                "BLOCK": 1024,
            },
        ),
        cross_compile(
            deep_gemm_rows._to_places_kernel,
            arch=arch,
            signature={
                "q_ptr": "*u8",
                "s_ptr": "*fp32",
                "place_ptr": "*i32",
                "out_ptr": "*u8",
                "out_scale_ptr": "*fp32",
                **dict.fromkeys(("s_row_stride", "s_column_stride", "s_places"), "i32"),
            },
            constexprs={"SLOTS": 2, "K": 512, **groups},
        ),
        cross_compile(
            deep_gemm_rows._quantize_to_places_kernel,
            arch=arch,
            signature={
                "x_ptr": "*bf16",
                "place_ptr": "*i32",
                "q_ptr": "*u8",
                "s_ptr": "*fp32",
                **dict.fromkeys(("x_stride", "s_places"), "i32"),
            },
            constexprs={"SLOTS": 2, "K": 512, "UE8M0": False, **groups},
        ),
        cross_compile(
            deep_gemm_rows._place_and_quantize_kernel,
            arch=arch,
            signature={
                "x_ptr": "*bf16",
                **dict.fromkeys(("ids_ptr", "place_ptr", "expert_ptr", "count_ptr"), "*i32"),
                "q_ptr": "*u8",
                "s_ptr": "*fp32",
                **dict.fromkeys(("x_stride", "rows", "capacity"), "i32"),
            },
            constexprs={
                "E": 6,
                "SLOTS": 2,
                "K": 512,
                "UE8M0": False,
                "OVERFLOW": -2,
                "ROWS": 1024,
                "ALIGNMENT": 128,
                **groups,
            },
        ),
        cross_compile(
            deep_gemm_packed._quantize_packed_kernel,
            arch=arch,
            signature={
                "x_ptr": "*bf16",
                "place_ptr": "*i32",
                "q_ptr": "*u8",
                "s_ptr": "*fp32",
                **dict.fromkeys(("x_stride", "places"), "i32"),
            },
            constexprs={"SLOTS": 2, "LANES": 2, "K": 512, "UE8M0": True, **groups},
        ),
        cross_compile(
            deep_gemm_packed._pack_and_quantize_kernel,
            arch=arch,
            signature={
                "x_ptr": "*bf16",
                **dict.fromkeys(("ids_ptr", "place_ptr", "end_ptr"), "*i32"),
                "q_ptr": "*u8",
                "s_ptr": "*fp32",
                **dict.fromkeys(("x_stride", "tokens", "places"), "i32"),
            },
            constexprs={
                "E": 6,
                "BINS": 8,
                "SLOTS": 2,
                "LANES": 2,
                "K": 512,
                "UE8M0": False,
                "ROWS": 128,
                "ALIGNMENT": 16,
                **groups,
            },
        ),
        cross_compile(
            _combine_places_kernel,
            arch=arch,
            signature={
                **dict.fromkeys(("x_ptr", "shared_ptr", "out_ptr"), "*bf16"),
                "place_ptr": "*i32",
                "weights_ptr": "*fp32",
                "shared_stride": "i32",
            },
            constexprs={
                "H": 512,
                "K": 2,
                "HAS_SHARED": True,
                "OVERFLOW": -2,
                "BLOCK": 1024,
            },
            enable_fp_fusion=False,
        ),
        cross_compile(
            deep_gemm_rows._activate_and_quantize_kernel,
            arch=arch,
            signature={
                "x_ptr": "*bf16",
                "place_ptr": "*i32",
                "q_ptr": "*u8",
                "s_ptr": "*fp32",
                "limit": "fp32",
                "s_places": "i32",
            },
            constexprs={
                "WIDTH": 512,
                "UE8M0": True,
                "HAS_LIMIT": True,
                **groups,
            },
            enable_fp_fusion=False,
        ),
        cross_compile(
            _from_places_kernel,
            arch=arch,
            signature={"x_ptr": "*bf16", "place_ptr": "*i32", "y_ptr": "*bf16"},
            constexprs={"H": 512, "OVERFLOW": -2, "BLOCK": 1024},
        ),
    ]
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


def test_experts_deep_gemm_rejects_what_it_cannot_serve() -> None:
    x, *weights, ids = operands(3, "fp32")
    with pytest.raises(UnsupportedError, match=r"compute capability 0\.x"):
        fp8_expert_outputs_deep_gemm(x, *weights, ids, None, "fp32")
    with pytest.raises(UnsupportedError, match=r"float32 .* supported: torch\.bfloat16"):
        fp8_expert_outputs_deep_gemm(x.float(), *weights, ids, None, "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_DEEP_GEMM, reason="needs Hopper or Blackwell and vLLM's CUDA wheel")
@pytest.mark.usefixtures("compiled")
class TestOnHopper:
    @staticmethod
    def outputs(given: tuple[torch.Tensor, ...], layout: str, fmt: str = "fp32") -> torch.Tensor:
        *tensors, ids = given
        return fp8_expert_outputs_deep_gemm(*tensors, ids, None, fmt, layout)

    @pytest.mark.parametrize("scale_format", FORMATS)
    def test_layouts_equal_the_dense_gemm(self, scale_format: str) -> None:
        from consistent_kernels.fp8_linear.deep_gemm import multiply
        from consistent_kernels.quantization import quantize_rows
        from consistent_kernels.silu_and_mul import silu_and_mul

        given = operands(300, scale_format, device="cuda", impl="triton")
        x, w13, w13_scale, w2, w2_scale, ids = given
        flat = ids.view(-1)
        expected = torch.zeros(300 * SLOTS, HIDDEN, dtype=x.dtype, device="cuda")
        quantize = {"scale_format": scale_format, "impl": "triton", "tma_aligned": True}
        for expert in range(EXPERTS - 1):
            mine = flat == expert
            rows = quantize_rows(x.repeat_interleave(SLOTS, 0)[mine], **quantize)
            gate_up = multiply(*rows, w13[expert], w13_scale[expert], scale_format)
            hidden = silu_and_mul(gate_up[:, :WIDTH], gate_up[:, WIDTH:], impl="triton")
            rows = quantize_rows(hidden, **quantize)
            expected[mine] = multiply(*rows, w2[expert], w2_scale[expert], scale_format)
        for layout in LAYOUTS:
            y = self.outputs(given, layout, scale_format)
            assert_bitwise_equal(y.view(expected.shape), expected, layout)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_experts_deep_gemm_is_batch_invariant(self, layout: str) -> None:
        x, *weights, ids = operands(300, "fp32", device="cuda", impl="triton")
        whole = self.outputs((x, *weights, ids), layout)
        for rows in (1, 8, 17, 64, 129, 257):
            for start in {0, 5, 300 - rows}:
                part = slice(start, start + rows)
                y = self.outputs((x[part], *weights, ids[part]), layout)
                assert_bitwise_equal(y, whole[part], f"rows {part}")
        order = torch.randperm(300, device="cuda")
        y = self.outputs((x[order], *weights, ids[order]), layout)
        assert_bitwise_equal(y, whole[order])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_experts_deep_gemm_ignores_poison(self, layout: str) -> None:
        x, *weights, ids = operands(65, "fp32", device="cuda", impl="triton")
        expected = self.outputs((x, *weights, ids), layout)
        # Freed NaN is what the uninitialized places are made of.
        torch.full((1 << 26,), float("nan"), device="cuda")
        assert_bitwise_equal(self.outputs((x, *weights, ids), layout), expected)
        x[3] = float("nan")
        y = self.outputs((x, *weights, ids), layout)
        keep = torch.arange(65, device="cuda") != 3
        assert_bitwise_equal(y[keep], expected[keep])
        assert bool(y[3][ids[3] >= 0].isnan().all())

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_experts_deep_gemm_graph_replay_equals_eager(self, layout: str) -> None:
        x, *weights, ids = operands(64, "fp32", device="cuda", impl="triton")
        expected = self.outputs((x, *weights, ids), layout)
        static_x, static_ids = torch.zeros_like(x), torch.full_like(ids, -1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self.outputs((static_x, *weights, static_ids), layout)
        static_x.copy_(x)
        static_ids.copy_(ids)
        graph.replay()
        assert_bitwise_equal(captured, expected)

    def test_control_another_expert_differs(self) -> None:
        x, *weights, ids = operands(65, "fp32", device="cuda", impl="triton")
        moved = torch.where(ids >= 0, (ids + 1) % EXPERTS, ids)
        first = self.outputs((x, *weights, ids), "contiguous")
        assert not bitwise_equal(self.outputs((x, *weights, moved), "contiguous"), first)
