"""The backward of attention alone, fed with fp64 intermediates, against another derivation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from attention_cases import CASES, Batch, attention_fp64, borders, make_batch, visible

from consistent_kernels.attention import (
    AttentionParameters,
    attention_varlen_bwd,
    plan_attention,
    reference,
)
from consistent_kernels.errors import InvalidInputError
from consistent_kernels.testing import assert_bitwise_equal

LENGTHS = (1, 17, 65, 150)


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    """The switch under which CUDA gradients are promised to repeat."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


cases = pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())


def gradients_fp64(batch: Batch, grad_out: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
    """Softmax Jacobian written out in fp64, and magnitudes that bound the rounding of each sum.

    With o = P v and g the gradient of o: dP = g v^T, dS = P (dP - rowsum(P dP)).

    Returns:
        ([grad_q, grad_k, grad_v], [the same sums over absolute values]).
    """
    params = batch.params
    begin = borders(batch.lengths).tolist()
    exact: list[list[torch.Tensor]] = [[], [], []]
    sizes: list[list[torch.Tensor]] = [[], [], []]
    for first, last in itertools.pairwise(begin):
        tensors = (batch.q, batch.k, batch.v, grad_out)
        q, k, v, g = (x[first:last].double().transpose(0, 1) for x in tensors)
        k, v = (x.repeat_interleave(params.group, 0) for x in (k, v))
        seen = visible(last - first, last - first, params.sliding_window, q.device)
        p = (q @ k.mT * params.scale).masked_fill(~seen, float("-inf")).softmax(-1)
        dp, dp_size = g @ v.mT, g.abs() @ v.abs().mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * params.scale
        ds_size = p * (dp_size + (p * dp_size).sum(-1, keepdim=True)) * params.scale
        per_head = (ds @ k, ds.mT @ q, p.mT @ g)
        bounds = (ds_size @ k.abs(), ds_size.mT @ q.abs(), p.mT @ g.abs())
        for i, (value, size) in enumerate(zip(per_head, bounds, strict=True)):
            if i:
                value, size = (x.unflatten(0, (-1, params.group)).sum(1) for x in (value, size))
            exact[i].append(value.transpose(0, 1))
            sizes[i].append(size.transpose(0, 1))
    return [torch.cat(x) for x in exact], [torch.cat(x) for x in sizes]


@cases
def test_attention_grad_matches_reference(
    impl_device: tuple[str, str], params: AttentionParameters
) -> None:
    impl, device = impl_device
    dtype = torch.float32 if impl == "reference" else torch.bfloat16
    batch = make_batch(params, impl, device, lengths=LENGTHS, dtype=dtype)
    grad_out = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(5))
    grad_out = grad_out.to(device, dtype)
    forward = attention_fp64(batch)
    out, lse = forward.out.to(dtype), forward.lse.float()
    cu = borders(LENGTHS, device)
    grads = attention_varlen_bwd(
        grad_out, batch.q, batch.k, batch.v, out, lse, cu, cu, params=params, impl=impl
    )
    exact, sizes = gradients_fp64(batch, grad_out)
    # P = exp(s - lse) has the relative error of s (D + 4 roundings of sum |q| |k|) and of lse;
    # every product and every sum of n terms adds n u of its sum of magnitudes, n <= D, keys, or
    # queries times heads of a group. In bf16, `out` in delta, P or dS before their products, each
    # head's part of grad_k and grad_v, and the results carry a rounding of 2^-9.
    unit, width, longest = 2**-24, params.head_dim, max(LENGTHS)
    score = float(forward.score.max()) * (width + 4) * unit + float(lse.abs().max()) * unit
    relative = score + (2 * width + longest * (1 + params.group) + 16) * unit
    rounding = unit if dtype == torch.float32 else 2**-8
    inner = rounding if dtype == torch.float32 else 3 * 2**-9
    for grad, value, size in zip(grads, exact, sizes, strict=True):
        assert grad.dtype == dtype
        bound = size * (relative + inner) + value.abs() * rounding + 1e-30
        assert bool(((grad.double() - value).abs() <= bound).all())


def test_attention_grad_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    params = CASES["mqa96-window70-split64"]
    batch = make_batch(params, "reference", "cpu", lengths=LENGTHS, dtype=torch.float32)
    out, lse = batch.attend()
    cu = borders(LENGTHS)
    args = (torch.ones_like(out), batch.q, batch.k, batch.v, out, lse, cu, cu)
    whole = attention_varlen_bwd(*args, params=params, impl="reference")
    monkeypatch.setattr(reference, "BACKWARD_BYTES", 4 * 8 * 150 * 7)
    parts = attention_varlen_bwd(*args, params=params, impl="reference")
    for a, b in zip(parts, whole, strict=True):
        # The same sums in another order: a few hundred roundings of the largest magnitude.
        assert float((a - b).abs().max()) <= 2**-24 * 512 * float(b.abs().max())


def test_attention_grad_is_run_to_run_stable(
    impl_device: tuple[str, str], deterministic_algorithms: None
) -> None:
    impl, device = impl_device
    batch = make_batch(CASES["smollm2"], impl, device, lengths=LENGTHS)
    out, lse = batch.attend()
    cu = borders(LENGTHS, device)
    args = (torch.ones_like(out), batch.q, batch.k, batch.v, out, lse, cu, cu)
    first = attention_varlen_bwd(*args, params=batch.params, impl=impl)
    plan = plan_attention(
        cu, params=batch.params, num_tokens=out.shape[0], impl=impl, cu_seqlens_k=cu
    )
    for _ in range(3):
        again = attention_varlen_bwd(*args, params=batch.params, impl=impl, plan=plan)
        for a, b in zip(again, first, strict=True):
            assert_bitwise_equal(a, b)


def test_attention_bwd_rejects_other_shapes() -> None:
    batch = make_batch(CASES["smollm2"], "reference", "cpu", lengths=(4,))
    out, lse = batch.attend()
    cu = borders([4])
    with pytest.raises(InvalidInputError, match="grad_out, out, lse must be shaped like q"):
        attention_varlen_bwd(
            out[:3],
            batch.q,
            batch.k,
            batch.v,
            out,
            lse,
            cu,
            cu,
            params=batch.params,
            impl="reference",
        )
