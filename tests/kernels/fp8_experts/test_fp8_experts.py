"""Relations of FP8 experts: rows, counts, places, the dense FP8 MLP; gradients against fp64."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Shape, masters, routing, tokens
from expert_gradients import TINY, U, graph, magnitudes
from implementations import DEEP_GEMM_CUDA, TRITON_CUDA

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.experts import combine
from consistent_kernels.experts.spec import LAYOUTS
from consistent_kernels.fp8_experts import (
    Fp8ExpertWeight,
    fp8_expert_outputs,
    fp8_experts,
    fp8_experts_bwd,
    quantize_expert_weight,
)
from consistent_kernels.fp8_experts.spec import experts_of, quantization_of
from consistent_kernels.fp8_linear import fp8_linear
from consistent_kernels.quantization import (
    dequantize_blocks,
    dequantize_rows,
    quantize_rows,
    quantize_weight,
)
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.testing import (
    MANY_BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
)

SHAPE = Shape(6, 3, 256, 128)
RAGGED = Shape(5, 2, 160, 128)
FORMATS = ("fp32", "ue8m0")


def quantized(
    shape: Shape, impl: str, device: str, scale_format: str
) -> tuple[Fp8ExpertWeight, Fp8ExpertWeight]:
    w13, w2 = (
        quantize_expert_weight(w, scale_format=scale_format, impl=impl)
        for w in masters(shape, device)
    )
    return w13, w2


def skip_unserved(shape: Shape, impl: str) -> None:
    if impl == "deep_gemm" and shape is RAGGED:
        pytest.skip("DeepGEMM takes hidden sizes in multiples of 128 and refuses others by name")


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [SHAPE, RAGGED], ids=["whole", "ragged"])
def test_fp8_experts_equal_dense_fp8_mlps(
    impl_device: tuple[str, str], shape: Shape, scale_format: str, limit: float | None
) -> None:
    """Each expert is fp8_linear, activation, fp8_linear, bit for bit; fp8_linear has its bound."""
    impl, device = impl_device
    if limit is not None and impl != "reference":
        pytest.skip("torch.exp on CUDA is another exp than Triton's; the clamp has its own test")
    skip_unserved(shape, impl)
    x = tokens(shape, 37, device, seed=1)
    ids, weights = routing(shape, 37, device, seed=2)
    w13, w2 = quantized(shape, impl, device, scale_format)
    y = fp8_expert_outputs(x, w13, w2, ids, scale_format=scale_format, limit=limit, impl=impl)
    master13, master2 = masters(shape, device)
    fp8 = {"scale_format": scale_format, "impl": impl}
    quantizer = {"scale_format": scale_format, "impl": quantization_of(impl)}
    for expert in range(shape.experts):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        sides = [
            fp8_linear(x[rows], *quantize_weight(side.contiguous(), **quantizer), **fp8)
            for side in master13[expert].chunk(2)
        ]
        if limit is None:
            hidden = silu_and_mul(*sides, impl=experts_of(impl))
        else:
            gate, up = (side.float() for side in sides)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
        down = quantize_weight(master2[expert].contiguous(), **quantizer)
        expected = fp8_linear(hidden, *down, **fp8)
        assert_bitwise_equal(y[rows, slots], expected, f"expert {expert}")
    for shared in (None, hazard_activations((37, shape.hidden), seed=3, device=device)):
        options = {"scale_format": scale_format, "limit": limit, "impl": impl}
        out = fp8_experts(x, w13, w2, ids, weights, shared, **options)
        assert_bitwise_equal(out, combine(y, ids, weights, shared, impl=experts_of(impl)))


def test_fp8_experts_clamp_is_deepseek_v4s(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(SHAPE, 33, device, seed=17)
    ids = torch.ones((33, 1), dtype=torch.int32, device=device)
    w13, w2 = quantized(SHAPE, impl, device, "fp32")

    def run(limit: float | None) -> torch.Tensor:
        return fp8_expert_outputs(x, w13, w2, ids, scale_format="fp32", limit=limit, impl=impl)

    assert_bitwise_equal(run(1e4), run(None))
    # |hidden| <= limit^2, so |y| <= limit^2 sum |w2|, and one e4m3 and two bf16 roundings.
    down = dequantize_blocks(w2.values[1], w2.scale[1])
    most = 0.25**2 * down.abs().sum(1) * (1 + 2**-3)
    clamped = run(0.25)[:, 0]
    assert bool((clamped.float().abs() <= most).all())
    assert not bitwise_equal(clamped, run(None)[:, 0])


@pytest.mark.parametrize("layout", ["contiguous", "fastest"])
def test_fp8_experts_is_batch_invariant(impl_device: tuple[str, str], layout: str) -> None:
    """Sizes on both sides of those at which "fastest" changes the layout on a GPU: 5 and 256."""
    impl, device = impl_device
    most = 2100
    x = tokens(SHAPE, most, device, seed=3)
    ids, weights = routing(SHAPE, most, device, seed=4)
    w13, w2 = quantized(SHAPE, impl, device, "fp32")

    def run(part: slice | torch.Tensor) -> torch.Tensor:
        options = {"scale_format": "fp32", "layout": layout, "impl": impl}
        return fp8_experts(x[part], w13, w2, ids[part], weights[part], **options)

    whole = run(slice(0, most))
    for rows in (*MANY_BATCH_SIZES, 5, 6, 341, 342, most - 7):
        for start in {5, most - rows}:
            part = slice(start, start + rows)
            assert_bitwise_equal(run(part), whole[part], f"rows {start} to {start + rows}")
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0)).to(device)
    assert_bitwise_equal(run(order), whole[order])
    assert_bitwise_equal(run(slice(0, most)), whole, "a second run")


def test_fp8_experts_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(SHAPE, 17, device, seed=31)
    ids, weights = routing(SHAPE, 17, device, seed=32)
    shared = hazard_activations((17, SHAPE.hidden), seed=33, device=device)
    w13, w2 = quantized(SHAPE, impl, device, "fp32")

    def layer(value: torch.Tensor) -> torch.Tensor:
        options = {"scale_format": "fp32", "layout": "fastest", "impl": impl}
        return fp8_experts(value, w13, w2, ids, weights, shared, **options)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x), layer(x))


def test_fp8_experts_of_no_rows_are_empty(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = torch.empty((0, SHAPE.hidden), dtype=torch.bfloat16, device=device)
    ids = torch.empty((0, SHAPE.slots), dtype=torch.int32, device=device)
    w13, w2 = quantized(SHAPE, impl, device, "fp32")
    options = {"scale_format": "fp32", "impl": impl}
    assert fp8_expert_outputs(x, w13, w2, ids, **options).shape == (0, SHAPE.slots, SHAPE.hidden)
    assert fp8_experts(x, w13, w2, ids, ids.float(), **options).shape == (0, SHAPE.hidden)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [SHAPE, RAGGED], ids=["whole", "ragged"])
def test_fp8_experts_layouts_give_equal_bits(
    impl_device: tuple[str, str], shape: Shape, scale_format: str
) -> None:
    impl, device = impl_device
    skip_unserved(shape, impl)
    w13, w2 = quantized(shape, impl, device, scale_format)
    for rows in (1, 7, 64, 129):
        x = tokens(shape, rows, device, seed=7)
        ids, _ = routing(shape, rows, device, seed=8)
        contiguous, *others = (
            fp8_expert_outputs(x, w13, w2, ids, scale_format=scale_format, layout=layout, impl=impl)
            for layout in LAYOUTS
        )
        for layout, y in zip(LAYOUTS[1:], others, strict=True):
            assert_bitwise_equal(y[ids >= 0], contiguous[ids >= 0], f"{rows} rows, {layout}")


def test_fp8_experts_ignore_where_an_expert_stands(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(SHAPE, 20, device, seed=5)
    ids, _ = routing(SHAPE, 20, device, seed=6)
    w13, w2 = quantized(SHAPE, impl, device, "ue8m0")
    whole = fp8_expert_outputs(x, w13, w2, ids, scale_format="ue8m0", impl=impl)
    for first in (0, 3):
        part = slice(first, first + 3)
        local = torch.where((ids >= first) & (ids < first + 3), ids - first, -1)
        mine = [
            Fp8ExpertWeight(w.values[part].contiguous(), w.scale[part].contiguous())
            for w in (w13, w2)
        ]
        y = fp8_expert_outputs(x, *mine, local, scale_format="ue8m0", impl=impl)
        assert_bitwise_equal(y[local >= 0], whole[local >= 0], f"experts from {first}")


def test_fp8_experts_ignore_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(SHAPE, 9, device, seed=7)
    ids, weights = routing(SHAPE, 9, device, seed=8)
    w13, w2 = quantized(SHAPE, impl, device, "fp32")
    expected = fp8_experts(x, w13, w2, ids, weights, scale_format="fp32", impl=impl)
    buffer, rows = poisoned_rows(x, before=3, after=4)
    wide = torch.full((16, SHAPE.slots), -1, dtype=torch.int32, device=device)
    wide[rows] = ids
    wide[0] = torch.tensor([0, 1, 2], device=device)
    scale = torch.ones((16, SHAPE.slots), device=device)
    scale[rows] = weights
    out = fp8_experts(buffer, w13, w2, wide, scale, scale_format="fp32", impl=impl)
    assert_bitwise_equal(out[rows], expected)
    assert bool(out[0].isnan().all()), "a poisoned row that goes somewhere shows"


def test_fp8_experts_sum_in_slot_order(impl_device: tuple[str, str]) -> None:
    # Expert 2 is expert 0 over again; their weights cancel what they add, so that the order shows.
    impl, device = impl_device
    w13, w2 = (
        quantize_expert_weight(w[[0, 1, 0, 3, 4, 5]], scale_format="fp32", impl=impl)
        for w in masters(SHAPE, device)
    )
    x = tokens(SHAPE, 65, device, seed=18)
    shared = hazard_activations((65, SHAPE.hidden), seed=19, device=device)
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device).repeat(65, 1)
    weights = torch.tensor([[2.0**14, 1.0, -(2.0**14)]], device=device).repeat(65, 1)
    options = {"scale_format": "fp32", "impl": impl}
    terms = (weights[:, :, None] * fp8_expert_outputs(x, w13, w2, ids, **options)).unbind(1)
    expected = (((terms[0] + terms[1]) + terms[2]) + shared.float()).bfloat16()
    for layout in LAYOUTS:
        out = fp8_experts(x, w13, w2, ids, weights, shared, layout=layout, **options)
        assert_bitwise_equal(out, expected, layout)
    assert not bitwise_equal(out, ((shared + terms[0] + terms[1]) + terms[2]).bfloat16())
    assert not bitwise_equal(out, (((terms[0] + terms[2]) + terms[1]) + shared).bfloat16())


def test_control_a_hidden_row_that_is_not_quantized_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(SHAPE, 33, device, seed=9)
    ids = torch.zeros((33, 1), dtype=torch.int32, device=device)
    w13, w2 = quantized(SHAPE, impl, device, "fp32")
    y = fp8_expert_outputs(x, w13, w2, ids, scale_format="fp32", impl=impl)[:, 0]
    quantizer = {"scale_format": "fp32", "impl": quantization_of(impl)}
    seen = dequantize_rows(*quantize_rows(x, **quantizer))
    gate, up = (seen @ dequantize_blocks(w13.values[0], w13.scale[0]).t()).bfloat16().chunk(2, 1)
    hidden = silu_and_mul(gate, up, impl=experts_of(impl)).float()
    plain = (hidden @ dequantize_blocks(w2.values[0], w2.scale[0]).t()).bfloat16()
    assert not bitwise_equal(plain, y)


def test_control_a_block_over_gate_and_up_differs(impl_device: tuple[str, str]) -> None:
    # Why I must be a multiple of 128: one scale over rows of both sides is another quantization.
    impl, device = impl_device
    w13, _ = masters(Shape(1, 1, 256, 64), device)
    w13[:, 64:] *= 50
    quantizer = {"scale_format": "fp32", "impl": quantization_of(impl)}
    fused, _ = quantize_weight(w13[0], **quantizer)
    gate, _ = quantize_weight(w13[0, :64].contiguous(), **quantizer)
    assert not bitwise_equal(fused[:64].contiguous().view(torch.uint8), gate.view(torch.uint8))


@pytest.mark.parametrize("impl_device", [TRITON_CUDA, DEEP_GEMM_CUDA], indirect=True)
def test_fp8_experts_graph_replay_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    w13, w2 = quantized(SHAPE, impl, device, "fp32")
    x = tokens(SHAPE, 64, "cuda", seed=10)
    ids, weights = routing(SHAPE, 64, "cuda", seed=11)
    static = torch.zeros_like(x)

    def layer(value: torch.Tensor) -> torch.Tensor:
        options = {"scale_format": "fp32", "layout": "fastest", "impl": impl}
        return fp8_experts(value, w13, w2, ids, weights, **options)

    expected = layer(x)
    graph_ = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph_):
        captured = layer(static)
    static.copy_(x)
    graph_.replay()
    assert_bitwise_equal(captured, expected)


def _pairs(weight: Fp8ExpertWeight) -> zip:
    return zip(weight.values, weight.scale, strict=True)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_fp8_experts_grad_matches_reference(
    impl_device: tuple[str, str], limit: float | None
) -> None:
    impl, device = impl_device
    shape, rows = Shape(4, 2, 160, 128), 11
    x = tokens(shape, rows, device, seed=12)
    ids, weights = routing(shape, rows, device, seed=13)
    w13, w2 = quantized(shape, impl, device, "ue8m0")
    grad = hazard_activations((rows, shape.hidden), seed=14, device=device)
    actual = fp8_experts_bwd(
        grad, x, w13, w2, ids, weights, scale_format="ue8m0", limit=limit, impl=impl
    )
    quantizer = {"scale_format": "ue8m0", "impl": quantization_of(impl)}

    def seen(value: torch.Tensor) -> torch.Tensor:
        pair = quantize_rows(value.detach()[None].to(x.dtype), **quantizer)
        return value + (dequantize_rows(*pair)[0].double() - value.detach())

    given = {
        "x": dequantize_rows(*quantize_rows(x, **quantizer)),
        "w13": torch.stack([dequantize_blocks(*pair) for pair in _pairs(w13)]),
        "w2": torch.stack([dequantize_blocks(*pair) for pair in _pairs(w2)]),
        "topk_ids": ids,
        "topk_weights": weights,
    }
    names = ("x", "w13", "w2", "topk_weights")
    exact = {name: given[name].double().requires_grad_() for name in names}
    out = graph(exact["x"], exact["w13"], exact["w2"], ids, exact["topk_weights"], limit, seen)
    (out * grad.double()).sum().backward()
    size = magnitudes(grad, given, limit)
    # As for bf16 experts (five roundings of U); a hidden value on the other side of a tie moves one
    # e4m3 step, 2^-3 of it, so one such rounding more.
    steps = 2 * shape.width + shape.hidden + rows
    relative = (5 * U + 2**-3) * (1 + U) ** 5 + steps * TINY
    for name, grads in zip(names, actual, strict=True):
        error = (grads.double() - exact[name].grad).abs()
        assert bool((error <= size[name] * relative + exact[name].grad.abs() * U).all()), name
        # As a whole: five roundings, each U / sqrt(3) of the root mean square, add up to 1.3 U. The
        # gradient at a hidden row that was not quantized is 4 to 7 U off.
        typical = float(error.norm() / exact[name].grad.norm())
        assert typical < 2 * U, f"{name}: {typical}"


def test_fp8_experts_reject_bad_inputs() -> None:
    x = tokens(SHAPE, 3, "cpu", seed=15)
    ids, weights = routing(SHAPE, 3, "cpu", seed=16)
    w13, w2 = quantized(SHAPE, "reference", "cpu", "fp32")
    given = {
        "x": x,
        "w13": w13,
        "w2": w2,
        "topk_ids": ids,
        "topk_weights": weights,
        "scale_format": "fp32",
        "impl": "reference",
    }

    def call(**changes: object) -> None:
        fp8_experts(**(given | changes))

    with pytest.raises(InvalidInputError, match=r"w13 must be .* Quantize it with quantize_expert"):
        call(w13=Fp8ExpertWeight(w13.values.float(), w13.scale))
    with pytest.raises(InvalidInputError, match=r"w13\.scale must be float32 of shape \(6, 2, 2\)"):
        call(w13=Fp8ExpertWeight(w13.values, w13.scale[:, :1]))
    narrow = quantize_expert_weight(
        masters(Shape(6, 3, 256, 64), "cpu")[0], scale_format="fp32", impl="reference"
    )
    with pytest.raises(InvalidInputError, match="I a multiple of 128"):
        call(w13=narrow)
    with pytest.raises(InvalidInputError, match=r"w2 must be of shape \(6, 256, 128\), got \(5, 2"):
        call(w2=Fp8ExpertWeight(w2.values[:5], w2.scale[:5]))
    with pytest.raises(InvalidInputError, match=r"w2 must be of shape .*, got \(6, 128, 128\)"):
        call(
            w2=Fp8ExpertWeight(
                w2.values.view(torch.uint8)[:, :128].contiguous().view(w2.values.dtype),
                w2.scale[:, :1].contiguous(),
            )
        )
    sparse = w13.values.view(torch.uint8).repeat(1, 1, 2)[:, :, ::2].view(w13.values.dtype)
    with pytest.raises(InvalidInputError, match=r"w13 must be contiguous, got strides \(131072, "):
        call(w13=Fp8ExpertWeight(sparse, w13.scale))
    with pytest.raises(InvalidInputError, match=r"w2\.scale must be contiguous, got strides \("):
        call(w2=Fp8ExpertWeight(w2.values, w2.scale.repeat(1, 1, 2)[:, :, ::2]))
    with pytest.raises(InvalidInputError, match=r"w13\.scale must be on cpu, got meta"):
        call(w13=Fp8ExpertWeight(w13.values, w13.scale.to("meta")))
    with pytest.raises(InvalidInputError, match=r"topk_ids must be in \[-1, 6\), got 6 to 6"):
        call(topk_ids=torch.full_like(ids, 6))
    slots = r"fp8_experts: topk_weights must be torch\.float32 of shape \(3, 3\) on cpu, got "
    for wrong in (weights[:2], weights.bfloat16(), weights.to("meta")):
        with pytest.raises(InvalidInputError, match=slots):
            call(topk_weights=wrong)
    for wrong in (x.float(), x[:2]):
        with pytest.raises(InvalidInputError, match=r"fp8_experts: shared must be torch\.bfloat16"):
            call(shared=wrong)
    with pytest.raises(UnsupportedError, match="scale_format 'e5m3' is not supported"):
        call(scale_format="e5m3")
    with pytest.raises(UnsupportedError, match="layout 'dense' is not supported; supported: cont"):
        call(layout="dense")
    with pytest.raises(InvalidInputError, match="at most 3 rows of one expert in the masked layou"):
        call(topk_ids=torch.zeros_like(ids), layout="masked")
    with pytest.raises(UnsupportedError, match="impl 'cutlass' is not supported; supported: ref"):
        call(impl="cutlass")
    with pytest.raises(InvalidInputError, match="w13 must be a Fp8ExpertWeight, got Tensor"):
        call(w13=w13.values)
    for master in (torch.zeros(2, 2), torch.zeros(0, 256, 128), torch.zeros(2, 256, 0)):
        with pytest.raises(InvalidInputError, match=r"master must be \[E, N, K\], got \("):
            quantize_expert_weight(master, scale_format="fp32", impl="reference")


def test_fp8_experts_bwd_rejects_bad_inputs() -> None:
    x = tokens(SHAPE, 3, "cpu", seed=15)
    ids, weights = routing(SHAPE, 3, "cpu", seed=16)
    w13, w2 = quantized(SHAPE, "reference", "cpu", "fp32")
    given = {"grad_out": x, "x": x, "w13": w13, "w2": w2, "topk_ids": ids, "topk_weights": weights}
    given |= {"scale_format": "fp32", "impl": "reference"}
    for name, value, text in (
        (
            "grad_out",
            x.float(),
            r"grad_out must be torch\.bfloat16 of shape \(3, 256\) on cpu, got",
        ),
        ("grad_out", x.to("meta"), r"grad_out must be .* on cpu, got .* on meta"),
        ("topk_weights", weights[:2], r"topk_weights must be torch\.float32 of shape \(3, 3\)"),
        ("topk_weights", weights.bfloat16(), r"topk_weights must be .*, got torch\.bfloat16"),
        ("topk_ids", torch.full_like(ids, 6), r"topk_ids must be in \[-1, 6\), got 6 to 6"),
        ("limit", 0.0, r"limit must be positive or None, got 0\.0"),
    ):
        with pytest.raises(InvalidInputError, match="fp8_experts_bwd: " + text):
            fp8_experts_bwd(**(given | {name: value}))
