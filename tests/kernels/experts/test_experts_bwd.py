"""The experts' gradients against autograd in fp64, with a derived bound."""

from __future__ import annotations

import pytest
import torch
from expert_cases import SHAPES, prepared, routing, tokens
from expert_gradients import TINY, U, graph, magnitudes

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.experts import experts_bwd, prepare_expert_weight
from consistent_kernels.testing import hazard_activations


def case(name: str, rows: int, impl: str, device: str) -> dict[str, torch.Tensor]:
    shape = SHAPES[name]
    w13, w2 = prepared(shape, impl, device)
    ids, weights = routing(shape, rows, device, seed=2)
    return {
        "x": tokens(shape, rows, device, seed=1),
        "w13": w13,
        "w2": w2,
        "topk_ids": ids,
        "topk_weights": weights,
    }


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("name", ["tiny", "ragged"])
def test_experts_grad_matches_reference(
    impl_device: tuple[str, str], name: str, limit: float | None
) -> None:
    impl, device = impl_device
    given = case(name, 23, impl, device)
    grad = hazard_activations((23, SHAPES[name].hidden), seed=3, device=device)
    actual = experts_bwd(grad, **given, limit=limit, impl=impl)
    exact = {
        key: value.double().requires_grad_() for key, value in given.items() if key != "topk_ids"
    }
    out = graph(
        **{
            **{"ids": given["topk_ids"], "limit": limit},
            **{
                "x": exact["x"],
                "w13": exact["w13"],
                "w2": exact["w2"],
                "weights": exact["topk_weights"],
            },
        }
    )
    (out * grad.double()).sum().backward()
    size = magnitudes(grad, given, limit)
    # Intermediates are rounded to bf16 at: gate and up, hidden, y (the forward's points, which may
    # fall on the other side of a tie), w g, the gradients of gate and up: at most five roundings
    # of U meet in one term, and the fp32 sums are shorter than n = 2 I + H + rows.
    steps = 2 * SHAPES[name].width + SHAPES[name].hidden + 23
    relative = 5 * U * (1 + U) ** 5 + steps * TINY
    for key, grads in zip(("x", "w13", "w2", "topk_weights"), actual, strict=True):
        assert grads.dtype == (torch.bfloat16 if key == "x" else torch.float32)
        bound = size[key] * relative + exact[key].grad.abs() * U
        error = (grads.double() - exact[key].grad).abs()
        assert bool((error <= bound).all()), key
        # The bound is not loose enough to pass anything: gradients are well above it on the whole.
        assert float(bound.norm()) < 0.5 * float(size[key].norm())


def test_control_a_wrong_gradient_breaks_the_bound(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    given = case("tiny", 23, impl, device)
    grad = hazard_activations((23, 64), seed=3, device=device)
    right = experts_bwd(grad, **given, impl=impl)
    swapped = given | {"topk_weights": given["topk_weights"].flip(1).contiguous()}
    wrong = experts_bwd(grad, **swapped, impl=impl)
    size = magnitudes(grad, given, None)
    for index, key in enumerate(("x", "w13", "w2")):
        error = (wrong[index].double() - right[index].double()).abs()
        assert not bool((error <= size[key] * 6 * U).all()), key


def test_experts_bwd_computes_what_is_needed(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    given = case("tiny", 5, impl, device)
    grad = hazard_activations((5, 64), seed=4, device=device)
    for wanted in range(4):
        needs = tuple(index == wanted for index in range(4))
        grads = experts_bwd(grad, **given, needs=needs, impl=impl)
        assert [g is not None for g in grads] == list(needs)


def test_experts_bwd_gives_unused_experts_zero(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    given = case("tiny", 5, impl, device)
    grad = hazard_activations((5, 64), seed=5, device=device)
    _, grad_w13, grad_w2, _ = experts_bwd(grad, **given, impl=impl)
    assert not bool(grad_w13[-1].any() | grad_w2[-1].any())


def test_experts_bwd_of_no_rows(impl_device: tuple[str, str]) -> None:
    # A rank without tokens takes part in expert parallelism all the same.
    impl, device = impl_device
    given = case("tiny", 0, impl, device)
    grad = torch.empty((0, 64), dtype=torch.bfloat16, device=device)
    grad_x, grad_w13, grad_w2, _ = experts_bwd(grad, **given, impl=impl)
    assert grad_x.shape == (0, 64)
    assert not bool(grad_w13.any() | grad_w2.any())


def test_experts_bwd_rejects_bad_inputs() -> None:
    given = case("tiny", 3, "reference", "cpu")
    with pytest.raises(
        InvalidInputError, match=r"grad_out must be torch\.bfloat16 of shape \(3, 64\)"
    ):
        experts_bwd(torch.zeros(3, 64), **given, impl="reference")
    grad = torch.zeros(3, 64, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match=r"grad_out must be .* on cpu, got .* on meta"):
        experts_bwd(grad.to("meta"), **given, impl="reference")
    with pytest.raises(InvalidInputError, match=r"limit must be positive or None, got -1\.0"):
        experts_bwd(grad, **given, limit=-1.0, impl="reference")
    for name, value, text in (
        (
            "topk_ids",
            torch.full_like(given["topk_ids"], 8),
            r"topk_ids must be in \[-1, 8\), got 8",
        ),
        (
            "topk_weights",
            given["topk_weights"][:2],
            r"topk_weights must be torch\.float32 of shape",
        ),
    ):
        with pytest.raises(InvalidInputError, match="experts_bwd: " + text):
            experts_bwd(grad, **(given | {name: value}), impl="reference")


def test_prepare_expert_weight_rejects_bad_inputs() -> None:
    master = torch.zeros(2, 4, 6)
    for value, dtype, text in (
        (master[0], torch.bfloat16, r"master must be \[E, N, K\], .*, got \(4, 6\)"),
        (master.int(), torch.bfloat16, r"master must be .*, got \(2, 4, 6\), torch\.int32"),
        (master, torch.int8, r"dtype must be bfloat16, float16 or float32, got torch\.int8"),
    ):
        with pytest.raises(InvalidInputError, match="prepare_expert_weight: " + text):
            prepare_expert_weight(value, dtype=dtype, impl="reference")
