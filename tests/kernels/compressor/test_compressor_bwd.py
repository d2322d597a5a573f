"""Gradients of the compressor against fp64 autograd through an independent formula."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.compressor import CompressorParameters, compress_bwd, packed_windows
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations, norm_weight
from train_bridge.functions.compressor import CompressFunction, CompressorStateFunction

ROPE = RopeParameters(head_dim=64, rotary_dim=16, theta=160000.0, max_position=512)
PARAMETERS = (
    CompressorParameters(ratio=4, overlap=True, head_dim=64, norm_eps=1e-6),
    CompressorParameters(ratio=32, overlap=False, head_dim=64, norm_eps=1e-6),
)
LENGTHS = (37, 3, 70)


def entries_fp64(
    kv_score: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, params: CompressorParameters
) -> torch.Tensor:
    """One sequence after another, windows by reshaping as transformers does it."""
    ratio, dim, width = params.ratio, params.head_dim, params.state_width
    cos, sin = (table.double() for table in rope_tables(ROPE, kv_score.device))
    results = []
    for rows in kv_score.split(list(LENGTHS)):
        count = rows.shape[0] // ratio
        if not count:
            continue
        windows = rows[: count * ratio].view(count, ratio, 2, width)
        kv, score = windows[:, :, 0], windows[:, :, 1] + bias
        if params.overlap:
            before = kv.new_zeros(1, ratio, dim)
            nothing = before + float("-inf")
            kv = torch.cat((torch.cat((before, kv[:-1, :, :dim])), kv[:, :, dim:]), dim=1)
            score = torch.cat((torch.cat((nothing, score[:-1, :, :dim])), score[:, :, dim:]), dim=1)
        c = (score.softmax(1) * kv).sum(1)
        normed = torch.nn.functional.rms_norm(c, (dim,), weight, params.norm_eps)
        first = torch.arange(count, device=rows.device) * ratio
        pairs = normed[:, -ROPE.rotary_dim :].unflatten(1, (-1, 2))
        even, odd = pairs[..., 0], pairs[..., 1]
        turned = torch.stack(
            (even * cos[first] - odd * sin[first], odd * cos[first] + even * sin[first]), dim=-1
        )
        results.append(torch.cat((normed[:, : -ROPE.rotary_dim], turned.flatten(1)), dim=1))
    return torch.cat(results)


@pytest.mark.parametrize("params", PARAMETERS)
def test_compressor_grad_matches_reference(
    impl_device: tuple[str, str], params: CompressorParameters
) -> None:
    impl, device = impl_device
    total = sum(LENGTHS)
    kv_score = hazard_activations((total, 2 * params.state_width), seed=1, dtype=torch.float32)
    kv_score[:, params.state_width :: 17] /= 30.0
    bias = torch.randn(params.ratio, params.state_width, generator=torch.Generator().manual_seed(2))
    weight = norm_weight(params.head_dim, seed=3)
    leaves = [x.to(device).requires_grad_() for x in (kv_score, bias, weight)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
    borders = torch.nn.functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).to(device)
    rows, first, _ = packed_windows(borders, params)
    state = CompressorStateFunction.apply(leaves[0], leaves[1], positions, impl)
    entries = CompressFunction.apply(
        state, leaves[2], rows, first, ROPE, params, torch.bfloat16, impl
    )
    grad = hazard_activations(tuple(entries.shape), seed=4, device=device)
    entries.backward(grad)
    expected = entries_fp64(*doubles, params)
    expected.backward(grad.double())
    # All in fp32: an entry's gradient goes through a mean over head_dim, softmax weights and their
    # sums of `tokens` terms. Where 1/rms is large a gradient is the small difference of large
    # terms, so the error is measured against the largest gradient of the tensor's own kind.
    chain = 8 * (params.head_dim + params.tokens + 32) * 2**-24
    width = params.state_width
    groups = (
        (leaves[0].grad[:, :width], doubles[0].grad[:, :width], 1),
        (leaves[0].grad[:, width:], doubles[0].grad[:, width:], 1),
        (leaves[1].grad, doubles[1].grad, total),
        (leaves[2].grad, doubles[2].grad, rows.shape[0]),
    )
    for actual, value, terms in groups:
        rounding = 2**-8 if actual.dtype == torch.bfloat16 else 0.0
        size = value.abs().max()
        bound = size * (chain + terms * 2**-24) + value.abs() * rounding
        assert bool(((actual.double() - value).abs() <= bound).all())
        assert bool(value.abs().sum() > 0)


@pytest.mark.parametrize("params", PARAMETERS)
def test_compressor_grad_ignores_poison(params: CompressorParameters) -> None:
    """An entry of no tokens is padding, and so is a state that no entry names."""
    rows, first, _ = packed_windows(torch.tensor([0, 3 * params.ratio]), params)
    generator = torch.Generator().manual_seed(8)
    state = torch.randn(3 * params.ratio + 2, 2 * params.state_width, generator=generator)
    grad = torch.randn(len(rows) + 1, params.head_dim, generator=generator)
    weight, options = norm_weight(params.head_dim, seed=9), {"rope": ROPE, "params": params}
    options["impl"] = "reference"
    expected = compress_bwd(grad[:-1], state, rows, first, weight, **options)
    state[-2:] = grad[-1] = float("nan")
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 1), value=-1)
    first = torch.nn.functional.pad(first, (0, 1))
    actual = compress_bwd(grad, state, rows, first, weight, **options)
    for ours, clean in zip(actual, expected, strict=True):
        assert_bitwise_equal(ours, clean)


def test_control_a_backward_without_the_norm_is_out_of_bound() -> None:
    """Softmax weights times the gradient alone, as if the norm were the identity."""
    params = PARAMETERS[0]
    kv_score = torch.randn(sum(LENGTHS), 2 * params.state_width, dtype=torch.float64)
    kv_score.requires_grad_()
    bias = torch.zeros(params.ratio, params.state_width, dtype=torch.float64)
    weight = torch.ones(params.head_dim, dtype=torch.float64)
    entries = entries_fp64(kv_score, bias, weight, params)
    grad = torch.randn_like(entries)
    (whole,) = torch.autograd.grad(entries, kv_score, grad, retain_graph=True)
    scaled = entries / entries.detach().square().mean(1, keepdim=True).sqrt()
    assert float((whole - torch.autograd.grad(scaled, kv_score, grad * 2)[0]).abs().max()) > 1e-3
