"""Gradients of sparse attention against fp64 autograd through a dense formula."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from block_cases import BlockCase
from sparse_attention_cases import PROGRAMS, SparseCase, attention_fp64, make_case, shapes_of

from consistent_kernels.errors import MissingBinaryError, UnsupportedError
from consistent_kernels.sparse_attention import (
    cudnn,
    require_backward,
    sparse_attention,
    sparse_attention_bwd,
)
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations
from train_bridge.blocks import PackedV32Attention
from train_bridge.functions.sparse_attention import SparseAttentionFunction

TOKENS = 33


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=["v32", "v4"])
def case(request: pytest.FixtureRequest, program: tuple[str, str]) -> SparseCase:
    shape = shapes_of(program[1])[0 if request.param == "v32" else 1]
    return make_case(tokens=TOKENS, device=program[1], **shape)


def assert_within_bound(
    case: SparseCase,
    grad_out: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> None:
    """Compare with fp64 autograd.

    A program rounds P, dS, out (inside delta) and the results to bf16, 2^-8 each, and scores err by
    D 2^-24 sum|q k| scale. So an error is at most 4 2^-8 plus twice that noise, times the same
    expression with every factor replaced by its magnitude: P (|g| |v| + |g| |out|) scale |k| for
    grad_q, and so on; the bound sums those magnitudes in fp64.
    """
    leaves = [case.q.double().requires_grad_(), case.kv.double().requires_grad_()]
    sinks = None if case.sinks is None else case.sinks.double().requires_grad_()
    out, lse = attention_fp64(*leaves, case.indices, sinks, case.scale, case.d_v)
    out.backward(grad_out.double())
    with torch.no_grad():
        g, q, kv = grad_out.double().abs(), case.q.double(), case.kv.double()
        valid = (case.indices >= 0).unsqueeze(1)
        entries = kv[case.indices.clamp_min(0).long()]
        value = entries[..., : case.d_v].abs()
        scores = torch.einsum("thd,tkd->thk", q, entries) * case.scale
        total = lse if sinks is None else torch.logaddexp(lse, sinks.expand_as(lse))
        total = torch.where(lse == float("-inf"), float("inf"), total)
        p = torch.exp(scores - total.unsqueeze(-1)).masked_fill(~valid, 0.0)
        size = torch.einsum("thd,tkd->thk", q.abs(), entries.abs()).amax() * case.scale
        unit = 4 * 2**-8 + 2 * float(size) * q.shape[2] * 2**-24
        delta = torch.einsum("thd,thd->th", g, out.abs() + torch.einsum("thk,tkd->thd", p, value))
        ds = p * (torch.einsum("thd,tkd->thk", g, value) + delta.unsqueeze(-1)) * case.scale
        bound_q = torch.einsum("thk,tkd->thd", ds, entries.abs())
        pairs = torch.einsum("thk,thd->tkd", ds, q.abs())
        pairs[..., : case.d_v] += torch.einsum("thk,thd->tkd", p, g)
        pairs = pairs.masked_fill(~valid[:, 0].unsqueeze(-1), 0.0).flatten(0, 1)
        bound_kv = torch.zeros_like(kv)
        bound_kv.index_add_(0, case.indices.clamp_min(0).long().flatten(), pairs)
    for actual, leaf, bound in zip(grads, leaves, (bound_q, bound_kv), strict=False):
        excess = (actual.double() - leaf.grad).abs() - unit * bound
        assert bool((excess <= 1e-30).all()), float(excess.max())
    if sinks is not None:
        p_sink = torch.exp(sinks.detach() - total)
        bound_sink = (p_sink * delta).sum(0)
        assert bool(((grads[2].double() - sinks.grad).abs() <= unit * bound_sink + 1e-30).all())


def forward_and_grad(
    case: SparseCase, impl: str, backward: str = "own"
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    out, lse = sparse_attention(*case.arguments, **case.keywords, impl=impl)
    grad_out = hazard_activations(tuple(out.shape), seed=9, device=out.device)
    grads = sparse_attention_bwd(
        grad_out, *case.arguments, out, lse, scale=case.scale, sinks=case.sinks, impl=impl,
        backward=backward,
    )  # fmt: skip
    return grad_out, grads


def test_sparse_attention_grad_matches_reference(
    program: tuple[str, str], case: SparseCase
) -> None:
    grad_out, grads = forward_and_grad(case, program[0])
    assert grads[0].dtype == case.q.dtype
    assert grads[1].dtype == case.kv.dtype
    assert_within_bound(case, grad_out, grads)


def test_sparse_attention_grad_ignores_poison(program: tuple[str, str], case: SparseCase) -> None:
    """A query that names nothing is padding: its gradient and its q reach nothing."""
    out, lse = sparse_attention(*case.arguments, **case.keywords, impl=program[0])
    grad_out = hazard_activations(tuple(out.shape), seed=9, device=out.device)
    assert bool((case.indices[1] == -1).all())

    def back(grad_out: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = sparse_attention_bwd(
            grad_out, q, case.kv, case.indices, out, lse, scale=case.scale, sinks=case.sinks,
            impl=program[0],
        )  # fmt: skip
        return tuple(grad for grad in grads if grad is not None)

    expected = back(grad_out, case.q)
    poisoned_grad, poisoned_q = grad_out.clone(), case.q.clone()
    poisoned_grad[1] = poisoned_q[1] = float("nan")
    for actual, value in zip(back(poisoned_grad, poisoned_q), expected, strict=True):
        assert_bitwise_equal(actual, value)
    assert not bool(expected[0][1].any())
    poisoned_grad[3] = float("nan")  # control: a query that names entries
    assert bool(back(poisoned_grad, case.q)[1].isnan().any())


def test_sparse_attention_grad_is_run_to_run_stable(
    program: tuple[str, str], case: SparseCase
) -> None:
    """No atomics: entries named by many queries have one order of addition."""
    _, first = forward_and_grad(case, program[0])
    for _ in range(3):
        _, again = forward_and_grad(case, program[0])
        for actual, expected in zip(again, first, strict=True):
            if expected is not None:
                assert_bitwise_equal(actual, expected)


def test_sparse_attention_grad_does_not_follow_the_chunks(
    program: tuple[str, str], case: SparseCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = forward_and_grad(case, program[0])
    if program[0] == "reference":
        from consistent_kernels.sparse_attention import reference

        monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    else:
        from consistent_kernels.sparse_attention import triton_bwd

        monkeypatch.setattr(triton_bwd, "BUFFER_BYTES", 1)
    _, chunked = forward_and_grad(case, program[0])
    if program[0] == "reference":  # its GEMMs follow the chunk; the program on CUDA does not
        assert_within_bound(case, *forward_and_grad(case, program[0]))
        return
    for actual, expected in zip(chunked, whole, strict=True):
        if expected is not None:
            assert_bitwise_equal(actual, expected)


def test_control_a_backward_without_the_sink_is_out_of_bound() -> None:
    case = make_case(tokens=TOKENS, **shapes_of("cpu")[1])
    out, lse = sparse_attention(*case.arguments, **case.keywords, impl="reference")
    grad_out = hazard_activations(tuple(out.shape), seed=9)
    blind = sparse_attention_bwd(
        grad_out, *case.arguments, out, lse, scale=case.scale, sinks=None, impl="reference"
    )
    with pytest.raises(AssertionError):
        assert_within_bound(case, grad_out, (blind[0], blind[1], torch.zeros(case.q.shape[1])))


def test_control_entries_named_twice_get_two_gradients() -> None:
    case = make_case(tokens=TOKENS, **shapes_of("cpu")[0])
    _, grads = forward_and_grad(case, "reference")
    once = case.indices.clone()
    once[2, 1] = -1  # row 2 names entry 0 in columns 0 and 1
    case.indices = once
    _, fewer = forward_and_grad(case, "reference")
    assert not bitwise_equal(grads[1][0], fewer[1][0])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cudnn") is None,
    reason="needs a CUDA device and nvidia-cudnn-frontend[cutedsl]",
)
@pytest.mark.parametrize("form", [0, 1])
def test_sparse_attention_cudnn_grad_matches_reference(form: int) -> None:
    case = make_case(tokens=TOKENS, device="cuda", **shapes_of("cuda")[form])
    grad_out, grads = forward_and_grad(case, "flash_mla", "cudnn")
    assert_within_bound(case, grad_out, grads)


@pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is not None, reason="nvidia-cudnn-frontend is installed here"
)
def test_sparse_attention_cudnn_says_what_is_missing() -> None:
    """At a trainer's start and in its forward, not in the backward after a first rollout."""
    case = make_case(tokens=2, heads=2, d_v=512, rope=0, entries=8, columns=8, sinks=True)
    missing = pytest.raises(
        MissingBinaryError,
        match=r"nvidia-cudnn-frontend: .*pip install 'nvidia-cudnn-frontend\[cutedsl\]==1\.28\.0', "
        r"or take backward='own'",
    )
    with missing:
        require_backward("cudnn")
    with missing:
        SparseAttentionFunction.apply(
            case.q, case.kv, case.indices, case.sinks, case.scale, case.d_v, "reference", "cudnn"
        )
    block = BlockCase.make("v32", "cpu")
    with missing:
        PackedV32Attention(block.params, block.weights, programs=block.programs, backward="cudnn")


def test_sparse_attention_backward_rejects_what_it_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedError, match="'cuDNN' is not supported; supported: own, cudnn"):
        require_backward("cuDNN")
    monkeypatch.setattr(cudnn, "_wrapper", lambda: pytest.fail("called with what it cannot take"))
    monkeypatch.setattr(cudnn, "require_cudnn", lambda: None)
    case = make_case(tokens=2, **shapes_of("cpu")[1])
    with pytest.raises(UnsupportedError, match="width 64 with d_v 64 by backward 'cudnn'"):
        forward_and_grad(case, "reference", "cudnn")
    wide = make_case(tokens=2, heads=2, d_v=512, rope=0, entries=8, columns=8, sinks=True)
    with pytest.raises(UnsupportedError, match="cpu by backward 'cudnn' is not supported"):
        forward_and_grad(wide, "reference", "cudnn")


def test_sparse_attention_function_returns_the_kernel_tensor() -> None:
    case = make_case(tokens=9, **shapes_of("cpu")[1])
    q, kv, sinks = (value.clone().requires_grad_() for value in (case.q, case.kv, case.sinks))
    out = SparseAttentionFunction.apply(
        q, kv, case.indices, sinks, case.scale, case.d_v, "reference"
    )
    expected, _ = sparse_attention(*case.arguments, **case.keywords, impl="reference")
    assert_bitwise_equal(out, expected)
    out.sum().backward()
    for leaf in (q, kv, sinks):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
