"""The router's gradient against autograd in fp64, with a derived bound."""

from __future__ import annotations

import pytest
import torch
from router_cases import MODELS, case, exact_scores

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.router import router, router_bwd
from consistent_kernels.router.reference import router_bwd_ref
from consistent_kernels.testing import assert_bitwise_equal, poisoned_rows


@pytest.mark.parametrize("name", MODELS)
def test_router_grad_matches_reference(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    logits, bias, p = case(name, 33, device, seed=1)
    valid = torch.ones(33, dtype=torch.bool, device=device)
    valid[-2:] = False
    ids, _ = router(logits, bias, parameters=p, valid=valid, impl=impl)
    grad = torch.randn((33, p.top_k), generator=torch.Generator().manual_seed(2)).to(device)
    slots = ids.clamp(min=0).long()
    exact = logits.double().requires_grad_()
    scores = exact_scores(exact, p.scoring)
    chosen = scores.gather(1, slots)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if p.renormalize else chosen
    routed = (ids >= 0).double()
    (weights * p.scale * grad.double() * routed).sum().backward()
    actual = router_bwd(grad, logits, ids, parameters=p, impl=impl)
    assert actual.dtype == torch.float32
    # Every term of the closed form is a product of scores that are good to `steps` roundings; the
    # terms cancel, so the bound counts their magnitudes: |g| p / S twice, then the scoring's slope.
    steps = float((logits - logits.amax(-1, keepdim=True)).abs().max()) + 8 + p.num_experts**0.5
    g = (grad.double() * p.scale * routed).abs()
    held = chosen.detach()
    total = held.sum(-1, keepdim=True) if p.renormalize else torch.ones_like(held[:, :1])
    inner = (g + (g * held).sum(-1, keepdim=True) / total) / total if p.renormalize else g
    inner = inner * routed
    full = torch.zeros_like(exact).scatter_add_(1, slots, inner)
    if p.scoring == "softmax":
        magnitude = scores.detach() * (full + (inner * held).sum(-1, keepdim=True))
    elif p.scoring == "sigmoid":
        magnitude = full * scores.detach()
    else:
        magnitude = full * torch.sigmoid(exact.detach()) / (2 * scores.detach())
    bound = magnitude * (steps + 2 * p.top_k) * 2**-23 + 1e-30
    assert bool(((actual.double() - exact.grad).abs() <= bound).all())
    assert not bool(actual[-2:].any()), "a row routed nowhere has no gradient"


@pytest.mark.parametrize("name", MODELS)
def test_router_bwd_ignores_poison(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    logits, bias, p = case(name, 9, device, seed=6)
    ids, _ = router(logits, bias, parameters=p, impl=impl)
    grad = torch.randn((9, p.top_k), generator=torch.Generator().manual_seed(7)).to(device)
    expected = router_bwd(grad, logits, ids, parameters=p, impl=impl)
    for poison in (float("nan"), float("inf")):
        buffer, rows = poisoned_rows(logits, before=3, after=4)
        buffer = buffer.nan_to_num(nan=poison)
        valid = torch.zeros(16, dtype=torch.bool, device=device)
        valid[rows] = True
        padded_ids, _ = router(buffer, bias, parameters=p, valid=valid, impl=impl)
        padded = torch.full((16, p.top_k), poison, device=device)
        padded[rows] = grad
        actual = router_bwd(padded, buffer, padded_ids, parameters=p, impl=impl)
        assert_bitwise_equal(actual[rows], expected)
        # A zero times a poisoned score would be NaN, and reach the weight of the gate.
        assert not bool(actual[:3].any() | actual[12:].any())


def test_control_a_poisoned_row_that_goes_somewhere_shows() -> None:
    logits, bias, p = case("deepseek-v3", 3, "cpu", seed=8)
    logits[1] = float("nan")
    ids, _ = router(logits, bias, parameters=p, impl="reference")
    grad = router_bwd(torch.ones(3, p.top_k), logits, ids, parameters=p, impl="reference")
    assert grad.isnan().any(-1).tolist() == [False, True, False]


def test_control_a_wrong_gradient_breaks_the_bound() -> None:
    # Forgetting that the renormalization depends on the scores is caught by the check above.
    logits, bias, p = case("deepseek-v3", 33, "cpu", seed=3)
    ids, weights = router(logits, bias, parameters=p, impl="reference")
    grad = torch.randn((33, p.top_k), generator=torch.Generator().manual_seed(4))
    chosen = torch.sigmoid(logits).gather(1, ids.long())
    naive = torch.zeros_like(logits).scatter_add_(1, ids.long(), grad * weights * (1 - chosen))
    actual = router_bwd(grad, logits, ids, parameters=p, impl="reference")
    assert float((actual - naive).abs().max()) > 1e-3


def test_router_bwd_rejects_bad_inputs() -> None:
    logits, _, p = case("qwen3", 3, "cpu", seed=5)
    ids = torch.zeros((3, 8), dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=r"grad_weights must be .* of shape \(3, 8\)"):
        router_bwd(torch.zeros(3, 4), logits, ids, parameters=p, impl="reference")
    with pytest.raises(InvalidInputError, match=r"ids must be torch\.int32 or torch\.int64"):
        router_bwd(torch.zeros(3, 8), logits, ids.float(), parameters=p, impl="reference")
    for grad in (torch.zeros(3, 8, dtype=torch.int32), torch.zeros(3, 8, device="meta")):
        with pytest.raises(
            InvalidInputError, match=r"grad_weights must be torch\.float32 .* on cpu"
        ):
            router_bwd(grad, logits, ids, parameters=p, impl="reference")
    for wrong in (p.num_experts, -2):
        ids[1, 2] = wrong
        low, high = min(wrong, 0), max(wrong, 0)
        with pytest.raises(InvalidInputError, match=rf"ids .* \[-1, 128\), got {low} to {high}"):
            router_bwd(torch.zeros(3, 8), logits, ids, parameters=p, impl="reference")


def test_router_bwd_gives_an_absent_expert_no_gradient() -> None:
    """On a GPU nobody looks at ids: the forward weighs such a slot with 0, and this follows."""
    logits, _, p = case("qwen3-raw", 3, "cpu", seed=6)
    ids, _ = router(logits, parameters=p, impl="reference")
    wrong, none, grad = ids.clone(), ids.clone(), torch.ones(3, p.top_k)
    wrong[1, 2], none[1, 2] = p.num_experts, -1
    assert_bitwise_equal(
        router_bwd_ref(grad, logits, wrong, p), router_bwd_ref(grad, logits, none, p)
    )
