"""The grouped linear over DeepGEMM: calls, layouts, the start-up probe, and what is refused.

On a CPU a stand-in takes the place of the library's einsum; the relations run on a GPU, in
`test_grouped_linear.py`, where "deep_gemm" is one implementation of several.
"""

from __future__ import annotations

import types

import pytest
import torch
from implementations import HAS_DEEP_GEMM

from consistent_kernels import deep_gemm_start as probe
from consistent_kernels.errors import NumericsError, UnsupportedError
from consistent_kernels.grouped_linear import (
    deep_gemm,
    deep_gemm_grouped,
    deep_gemm_start,
    grouped_linear,
)
from consistent_kernels.grouped_linear.deep_gemm_start import GroupedShape, layer_shapes
from consistent_kernels.linear.reference import linear_ref
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

CPU = torch.device("cpu")
SHAPES = {
    "v32 k_up": (128, 512, 128),
    "v32 v_up": (128, 128, 512),
    "v4 out_a": (8, 1024, 4096),
}
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_DEEP_GEMM, reason="needs Hopper or Blackwell and vLLM's CUDA wheel"),
]


class StandIn:
    """The library on a CPU: what TMA asks of its operands, the reference's bits, and its calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def einsum(self, expr: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        assert expr == "bhr,hdr->bhd"
        for tensor in (a, b, d):
            assert tensor.dtype == torch.bfloat16
            assert tensor.stride(2) == 1
            assert tensor.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 and stride > 0 for stride in tensor.stride()[:2])
        assert a.shape == (d.shape[0], b.shape[0], b.shape[2])
        assert d.shape[1:] == b.shape[:2]
        self.rows.append(a.shape[0])
        for group in range(b.shape[0]):
            d[:, group] = linear_ref(a[:, group], b[group].float(), None, a.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    fake = types.SimpleNamespace(deep_gemm=lambda: stand_in)
    monkeypatch.setattr(deep_gemm_grouped, "vendored", fake)
    deep_gemm_start.start.cache_clear()
    monkeypatch.setattr(probe, "_passed", set())
    yield stand_in
    deep_gemm_start.start.cache_clear()


@pytest.fixture
def unprobed(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The library where every shape passes at once."""
    monkeypatch.setattr(deep_gemm_start, "check_rows", lambda shape, device: None)
    return library


def weights(groups: int = 2, columns: int = 24, inner: int = 40) -> torch.Tensor:
    return hazard_activations((groups, columns, inner), seed=2)


@pytest.mark.parametrize(
    ("columns", "inner", "served"),
    [(1024, 4096, True), (24, 40, True), (12, 64, False), (64, 60, False)],
)
def test_grouped_linear_deep_gemm_is_chosen_by_layer(
    columns: int, inner: int, served: bool
) -> None:
    assert deep_gemm_grouped.is_served(columns, inner) is served
    found = layer_shapes([(2, columns, inner)], 100_000)
    assert found == ({GroupedShape(2, columns, inner, 16384)} if served else set())


@pytest.mark.parametrize(("rows", "sizes"), [(0, []), (5, [5]), (600, [512, 88]), (1024, [1024])])
def test_grouped_linear_deep_gemm_calls_are_few_sizes(
    unprobed: StandIn, rows: int, sizes: list[int]
) -> None:
    x, weight = hazard_activations((rows or 1, 2, 40), seed=1)[:rows], weights()
    y = deep_gemm.grouped_linear_fwd(x, weight)
    assert unprobed.rows == sizes
    assert_bitwise_equal(y, grouped_linear(x, weight, impl="reference"))


def test_grouped_linear_deep_gemm_takes_any_rows(unprobed: StandIn) -> None:
    x, weight = hazard_activations((9, 2, 40), seed=1), weights()
    expected = grouped_linear(x, weight, impl="reference")
    wide = x.new_full((9, 2, 56), float("nan"))
    wide[..., :40] = x
    odd = x.new_full((9, 2, 43), float("nan"))
    odd[..., 1:41] = x
    swapped = x.transpose(1, 2).contiguous().transpose(1, 2)
    groups_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (wide[..., :40], odd[..., 1:41], swapped, groups_first):
        assert_bitwise_equal(deep_gemm.grouped_linear_fwd(view, weight), expected)
    same = x[:1].expand(9, 2, 40)
    expected = grouped_linear(same, weight, impl="reference")
    assert_bitwise_equal(deep_gemm.grouped_linear_fwd(same, weight), expected)
    # Rows that TMA can address are read where they stand.
    for view in (x, wide[..., :40], groups_first):
        assert deep_gemm.addressable(view).data_ptr() == view.data_ptr()


def test_grouped_linear_deep_gemm_probes_a_layer_once(
    library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ROWS", (1, 5, 17, 64, 512))
    x, weight = hazard_activations((3, 2, 16), seed=1), weights(columns=8, inner=16)
    deep_gemm.grouped_linear_fwd(x, weight)
    assert {1, 5, 17, 64, 512, 1024} <= set(library.rows)
    calls = len(library.rows)
    deep_gemm.grouped_linear_fwd(x, weight)
    assert len(library.rows) == calls + 1


def test_control_the_start_refuses_rows_that_follow_the_batch(
    library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        deep_gemm_grouped.grouped_gemm(x, weight, y)
        if x.shape[0] == 17:
            y.view(torch.int16)[3, 1, 5] ^= 1

    monkeypatch.setattr(probe, "ROWS", (1, 17, 64))
    shape = GroupedShape(2, 8, 16, 100)
    probe.check_rows(shape, CPU)
    assert probe.has_passed(shape, CPU)
    monkeypatch.setattr(deep_gemm_start, "grouped_gemm", fault)
    with pytest.raises(NumericsError, match="M=17 and M=100"):
        probe.check_rows(shape, CPU)


def test_the_probe_shows_another_order_of_additions() -> None:
    """Its operands cancel: a sum cut in two has other bits, also after the rounding to bf16.

    Sums written out: in which order a library adds follows its threads.
    """
    x, weight = GroupedShape(2, 24, 512, 32).operands(32, CPU)

    def ascending(part: slice) -> torch.Tensor:
        total = torch.zeros(32, 2, 24, dtype=torch.float32)
        for k in range(part.start, part.stop):
            total += x[:, :, None, k].float() * weight[None, :, :, k].float()
        return total

    whole = ascending(slice(0, 512)).bfloat16()
    halves = ascending(slice(0, 256)) + ascending(slice(256, 512))
    assert not bitwise_equal(whole, halves.bfloat16())
    assert float((whole != halves.bfloat16()).float().mean()) > 0.5


def test_grouped_linear_deep_gemm_rejects_other_dtypes() -> None:
    x = torch.zeros(4, 2, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        deep_gemm.grouped_linear_fwd(x, torch.zeros(2, 8, 64, dtype=torch.float16))


@pytest.fixture(scope="module")
def device() -> torch.device:
    """A device on which the kernels of SHAPES are compiled and probed."""
    device = torch.device("cuda", torch.cuda.current_device())
    probe.prepare(layer_shapes(SHAPES.values(), 4096), device)
    return device


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("name", SHAPES)
    def test_grouped_linear_deep_gemm_is_batch_invariant(
        self, device: torch.device, name: str
    ) -> None:
        groups, columns, inner = SHAPES[name]
        x = hazard_activations((300, groups, inner + 64), seed=4, device=device)[..., :inner]
        weight = torch.randn(groups, columns, inner, device=device).bfloat16() * inner**-0.5
        whole = grouped_linear(x, weight, impl="deep_gemm")
        for rows in (1, 8, 17, 64, 65, 129, 256):
            for first in (0, 5, 300 - rows):
                part = slice(first, first + rows)
                assert_bitwise_equal(
                    grouped_linear(x[part], weight, impl="deep_gemm"),
                    whole[part][: len(x[part])],
                )

    def test_grouped_linear_deep_gemm_serves_the_other_layers_by_triton(
        self, device: torch.device
    ) -> None:
        x = hazard_activations((20, 2, 64), seed=9, device=device)
        weight = torch.randn(2, 12, 64, device=device).bfloat16()
        assert_bitwise_equal(
            grouped_linear(x, weight, impl="deep_gemm"), grouped_linear(x, weight, impl="triton")
        )

    def test_grouped_linear_deep_gemm_graph_replay_equals_eager(self, device: torch.device) -> None:
        groups, columns, inner = SHAPES["v4 out_a"]
        x = hazard_activations((64, groups, inner), seed=5, device=device)
        weight = torch.randn(groups, columns, inner, device=device).bfloat16() * inner**-0.5
        eager = grouped_linear(x, weight, impl="deep_gemm")
        static = torch.full_like(x, float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = grouped_linear(static, weight, impl="deep_gemm")
        static[:50] = x[:50]
        graph.replay()
        assert_bitwise_equal(captured[:50], eager[:50])
