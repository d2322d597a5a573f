"""Relations of the hyper-connection maps: tokens alone and together, poison, stock formulas."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.hyper_connections import hc_head, hc_post, hc_pre
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    flip_lowest_bit,
    hazard_activations,
    poisoned_rows,
)

NUMBERS = {"norm_eps": 1e-6, "eps": 1e-6, "iterations": 20}
HEAD_NUMBERS = {"norm_eps": 1e-6, "eps": 1e-6}
SHAPES = ((4, 96), (4, 640), (2, 64), (8, 32))
TOKENS = max(BATCH_SIZES)


def parameters(
    streams: int, hidden: int, *, head: bool = False, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = streams if head else (2 + streams) * streams
    fn = torch.randn(columns, streams * hidden, generator=generator) * 0.05
    scale = 1.0 + 0.2 * torch.randn(1 if head else 3, generator=generator)
    base = 0.3 * torch.randn(columns, generator=generator)
    return fn.to(device), scale.to(device), base.to(device)


def pre_fp64(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula of `hc_pre` in fp64, written apart from the reference."""
    x, fn, scale, base = (value.double() for value in (x, fn, scale, base))
    streams = x.shape[1]
    flat = x.flatten(1)
    m = flat @ fn.t() * torch.rsqrt(flat.square().mean(1, keepdim=True) + NUMBERS["norm_eps"])
    pre = torch.sigmoid(m[:, :streams] * scale[0] + base[:streams]) + NUMBERS["eps"]
    middle = slice(streams, 2 * streams)
    post = 2 * torch.sigmoid(m[:, middle] * scale[1] + base[middle])
    comb = m[:, 2 * streams :] * scale[2] + base[2 * streams :]
    comb = comb.view(-1, streams, streams).softmax(-1) + NUMBERS["eps"]
    comb = comb / (comb.sum(-2, keepdim=True) + NUMBERS["eps"])
    for _ in range(NUMBERS["iterations"] - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + NUMBERS["eps"])
        comb = comb / (comb.sum(-2, keepdim=True) + NUMBERS["eps"])
    return (pre.unsqueeze(-1) * x).sum(1), post, comb


@pytest.mark.parametrize(("streams", "hidden"), SHAPES)
def test_hc_pre_matches_reference(impl_device: tuple[str, str], streams: int, hidden: int) -> None:
    impl, device = impl_device
    x = hazard_activations((33, streams, hidden), seed=1, device=device)
    weights = parameters(streams, hidden, device=device)
    expected = pre_fp64(x, *weights)
    out, post, comb = hc_pre(x, *weights, **NUMBERS, impl=impl)
    # A mix of K terms in fp32 is off by at most K 2^-24 sum|x fn| rstd (any order of additions),
    # times scale (below 2); sigmoid and softmax pass at most 1/4 and 1 of it on. Sinkhorn's maps
    # have slope at most 2 a step in l-infinity here and contract towards the fixed point; 16 covers
    # all steps together with their own roundings.
    fn = weights[0].double()
    flat = x.double().flatten(1)
    rstd = torch.rsqrt(flat.square().mean(1, keepdim=True) + 1e-6)
    slack = (flat.abs() @ fn.abs().t() * rstd).amax(1) * flat.shape[1] * 2**-24 * 2 + 2**-20
    assert bool(((post.double() - expected[1]).abs() <= 2 * slack[:, None]).all())
    assert bool(((comb.double() - expected[2]).abs() <= 16 * slack[:, None, None]).all())
    bound = expected[0].abs() * 2**-8 + x.double().abs().sum(1) * (slack[:, None] + 2**-20)
    assert bool(((out.double() - expected[0]).abs() <= bound).all())


@pytest.mark.parametrize(("streams", "hidden"), SHAPES)
def test_hyper_connections_are_batch_invariant(
    impl_device: tuple[str, str], streams: int, hidden: int
) -> None:
    impl, device = impl_device
    x = hazard_activations((TOKENS, streams, hidden), seed=2, device=device)
    y = hazard_activations((TOKENS, hidden), seed=3, device=device)
    weights = parameters(streams, hidden, device=device)
    head = parameters(streams, hidden, head=True, seed=4, device=device)
    whole = hc_pre(x, *weights, **NUMBERS, impl=impl)
    whole_head = hc_head(x, *head, **HEAD_NUMBERS, impl=impl)
    whole_post = hc_post(y, x, *whole[1:], impl=impl)
    for rows in BATCH_SIZES:
        for start in {0, TOKENS - rows}:
            part = slice(start, start + rows)
            some = hc_pre(x[part], *weights, **NUMBERS, impl=impl)
            for actual, expected in zip(some, whole, strict=True):
                assert_bitwise_equal(actual, expected[part])
            assert_bitwise_equal(
                hc_head(x[part], *head, **HEAD_NUMBERS, impl=impl), whole_head[part]
            )
            assert_bitwise_equal(hc_post(y[part], x[part], *some[1:], impl=impl), whole_post[part])


def test_control_a_split_that_follows_the_batch_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((64, 4, 640), seed=5, device=device)
    fn, scale, base = parameters(4, 640, device=device)
    expected = hc_pre(x, fn, scale, base, **NUMBERS, impl=impl)[1]
    flat = x.flatten(1).float()
    halves = [a @ b.t() for a, b in zip(flat.chunk(2, 1), fn.chunk(2, 1), strict=True)]
    rstd = torch.rsqrt(flat.square().mean(1, keepdim=True) + 1e-6)
    m = (halves[0] + halves[1]) * rstd
    split = 2.0 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    assert not bitwise_equal(split, expected)
    assert torch.allclose(split, expected, atol=1e-4)


def test_control_one_bit_of_a_weight_reaches_the_output(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((8, 4, 96), seed=6, device=device)
    y = hazard_activations((8, 96), seed=7, device=device)
    _, post, comb = hc_pre(x, *parameters(4, 96, device=device), **NUMBERS, impl=impl)
    out = hc_post(y.float(), x.float(), post, comb, impl="reference")
    changed = flip_lowest_bit(comb, (3, 1, 2))
    assert not bitwise_equal(
        hc_post(y.float(), x.float(), post, changed, impl="reference")[3], out[3]
    )
    assert_bitwise_equal(
        hc_post(y.float(), x.float(), post, changed, impl="reference")[:3], out[:3]
    )


def test_hyper_connections_ignore_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((9, 4, 96), seed=8, device=device)
    y = hazard_activations((9, 96), seed=9, device=device)
    weights = parameters(4, 96, device=device)
    buffer, rows = poisoned_rows(x, before=3, after=5)
    y_buffer, _ = poisoned_rows(y, before=3, after=5)
    alone = hc_pre(x, *weights, **NUMBERS, impl=impl)
    among = hc_pre(buffer, *weights, **NUMBERS, impl=impl)
    for actual, expected in zip(among, alone, strict=True):
        assert_bitwise_equal(actual[rows], expected)
    assert_bitwise_equal(
        hc_post(y_buffer, buffer, *among[1:], impl=impl)[rows], hc_post(y, x, *alone[1:], impl=impl)
    )


def test_hyper_connections_are_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((65, 4, 640), seed=10, device=device)
    weights = parameters(4, 640, device=device)
    first = hc_pre(x, *weights, **NUMBERS, impl=impl)
    for _ in range(5):
        again = hc_pre(x, *weights, **NUMBERS, impl=impl)
        for actual, expected in zip(again, first, strict=True):
            assert_bitwise_equal(actual, expected)


def test_hyper_connections_compiled_equal_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((17, 4, 96), seed=11, device=device)
    y = hazard_activations((17, 96), seed=12, device=device)
    weights = parameters(4, 96, device=device)
    head = parameters(4, 96, head=True, device=device)

    def layer(streams: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _, post, comb = hc_pre(streams, *weights, **NUMBERS, impl=impl)
        streams = hc_post(out, streams, post, comb, impl=impl)
        return hc_head(streams, *head, **HEAD_NUMBERS, impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x, y), layer(x, y))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_hyper_connections_graph_replay_equals_eager() -> None:
    x = hazard_activations((64, 4, 640), seed=13, device="cuda")
    y = hazard_activations((64, 640), seed=14, device="cuda")
    weights, head = parameters(4, 640, device="cuda"), parameters(4, 640, device="cuda", head=True)

    def layer(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        collapsed, post, comb = hc_pre(x, *weights, **NUMBERS, impl="triton")
        merged = hc_post(y, x, post, comb, impl="triton")
        last = hc_head(x, *head, **HEAD_NUMBERS, impl="triton")
        return collapsed, post, comb, merged, last

    eager = layer(x, y)
    static_x, static_y = torch.full_like(x, float("nan")), torch.full_like(y, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(static_x, static_y)
    # Rows 37 and on are padding that holds NaN.
    static_x[:37], static_y[:37] = x[:37], y[:37]
    graph.replay()
    for actual, expected in zip(captured, eager, strict=True):
        assert_bitwise_equal(actual[:37], expected[:37])


def test_hyper_connections_agree_with_stock_vllm(impl_device: tuple[str, str]) -> None:
    """Stock vLLM's PyTorch form on the same inputs: one bf16 rounding and fp32 noise apart."""
    stock = pytest.importorskip("vllm.model_executor.kernels.mhc.torch")
    impl, device = impl_device
    x = hazard_activations((33, 4, 640), seed=14, device=device)
    y = hazard_activations((33, 640), seed=15, device=device)
    fn, scale, base = parameters(4, 640, device=device)
    out, post, comb = hc_pre(x, fn, scale, base, **NUMBERS, impl=impl)
    theirs = stock.mhc_pre_torch(x, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    # Both add K = 2,560 products of a norm of about one in fp32: errors of either sign grow as
    # sqrt(K) 2^-24, and post and comb pass at most 1/2 and 1 of them on. A GPU's cores drop bits.
    noise = 2 * 2560**0.5 * 2**-24 if device == "cpu" else 2e-4
    assert torch.allclose(theirs[0].squeeze(-1), post, atol=noise, rtol=0)
    assert torch.allclose(theirs[1], comb, atol=noise if device == "cpu" else 10 * noise, rtol=0)
    magnitude = x.float().abs().sum(1)
    assert bool(((theirs[2].float() - out.float()).abs() <= magnitude * 2**-8).all())
    merged = hc_post(y, x, post, comb, impl=impl).float()
    stock_merged = stock.mhc_post_torch(y, x, post.unsqueeze(-1), comb).float()
    reach = merged.abs() * 2**-7 + (2 * y.float().abs() + magnitude)[:, None] * 2**-20
    assert bool(((merged - stock_merged).abs() <= reach).all())


def test_hyper_connections_agree_with_transformers() -> None:
    """The same function as `DeepseekV4HyperConnection` and `DeepseekV4HyperHead` in fp32."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=96, num_hidden_layers=1)
    module, top = modeling.DeepseekV4HyperConnection(config), modeling.DeepseekV4HyperHead(config)
    fn, scale, base = parameters(4, 96)
    head = parameters(4, 96, head=True, seed=1)
    module.load_state_dict({"fn": fn, "scale": scale, "base": base})
    top.load_state_dict(dict(zip(("hc_fn", "hc_scale", "hc_base"), head, strict=True)))
    x = hazard_activations((17, 4, 96), seed=16, dtype=torch.float32)
    post, comb, collapsed = (value[0] for value in module(x.unsqueeze(0)))
    ours = hc_pre(x, fn, scale, base, **NUMBERS, impl="reference")
    for actual, expected in zip(ours, (collapsed, post, comb), strict=True):
        assert torch.allclose(actual, expected, atol=1e-4, rtol=1e-4)
    ours_top = hc_head(x, *head, **HEAD_NUMBERS, impl="reference")
    assert torch.allclose(ours_top, top(x.unsqueeze(0))[0], atol=1e-4, rtol=1e-4)


def test_hyper_connections_reject_bad_inputs() -> None:
    x = torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    fn, scale, base = parameters(4, 8)
    with pytest.raises(InvalidInputError, match=r"hc_pre: fn must be .*\(24, 32\), got"):
        hc_pre(x, fn[:, :31], scale, base, **NUMBERS, impl="reference")
    with pytest.raises(InvalidInputError, match=r"scale must be torch.float32 of shape \(3,\)"):
        hc_pre(x, fn, scale.bfloat16(), base, **NUMBERS, impl="reference")
    with pytest.raises(InvalidInputError, match="iterations must be an integer, at least 1, got 0"):
        hc_pre(x, fn, scale, base, norm_eps=1e-6, eps=1e-6, iterations=0, impl="reference")
    with pytest.raises(UnsupportedError, match=r"hc_pre: 3 streams is not supported; supported: 2"):
        hc_pre(x[:, :3], fn, scale, base, **NUMBERS, impl="reference")
    with pytest.raises(InvalidInputError, match=r"hc_post: y must be .*\(2, 8\)"):
        hc_post(x[:, 0, :7], x, torch.ones(2, 4), torch.ones(2, 4, 4), impl="reference")
    with pytest.raises(InvalidInputError, match=r"x must be .*bfloat16 for impl 'triton'"):
        hc_pre(x.float(), fn, scale, base, **NUMBERS, impl="triton")
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported"):
        hc_head(x, *parameters(4, 8, head=True), **HEAD_NUMBERS, impl="cuda")
