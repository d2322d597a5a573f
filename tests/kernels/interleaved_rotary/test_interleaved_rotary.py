"""Relations of interleaved rotary: rows alone, its inverse, stock formulas, compilation."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.interleaved_rotary import interleaved_rotary, interleaved_rotary_
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
)
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile
from train_bridge.functions.interleaved_rotary import InterleavedRotaryFunction

ROPES = (
    RopeParameters(head_dim=64, rotary_dim=64, theta=10000.0, max_position=4096),
    RopeParameters(head_dim=128, rotary_dim=16, theta=160000.0, max_position=4096),
)
TOKENS = max(BATCH_SIZES)


def inputs(rope: RopeParameters, device: str, heads: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(rope.max_position, (TOKENS,), generator=generator)
    positions[::5] = 0  # where sin is 0, the sign of a zero shows how a product was subtracted
    x = hazard_activations((TOKENS, heads, rope.head_dim), seed=1, device=device)
    return positions.to(device), x


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_interleaved_rotary_matches_reference(
    impl_device: tuple[str, str], rope: RopeParameters, inverse: bool
) -> None:
    impl, device = impl_device
    positions, x = inputs(rope, device)
    out = interleaved_rotary(positions, x, rope=rope, inverse=inverse, impl=impl)
    cos, sin = (table[positions].unsqueeze(1).double() for table in rope_tables(rope, x.device))
    pairs = torch.view_as_complex(x[..., -rope.rotary_dim :].double().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.complex(cos, -sin if inverse else sin)).flatten(-2)
    expected = torch.cat((x[..., : -rope.rotary_dim].double(), turned), dim=-1)
    # One rounding (2^-8), two fp32 products and a sum before it (3 2^-24 of their magnitudes).
    size = pairs.abs().repeat_interleave(2, -1)
    noise = torch.nn.functional.pad(size, (rope.head_dim - rope.rotary_dim, 0)) * 2**-21
    assert bool(((out.double() - expected).abs() <= expected.abs() * 2**-8 + noise).all())
    assert_bitwise_equal(out[..., : -rope.rotary_dim], x[..., : -rope.rotary_dim])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_interleaved_rotary_zeros_have_the_references_sign(
    impl_device: tuple[str, str], rope: RopeParameters, inverse: bool
) -> None:
    impl, device = impl_device
    positions, x = inputs(rope, device)
    x[:, ::3, -rope.rotary_dim :: 2] = -0.0
    first = positions == 0
    out = interleaved_rotary(positions, x, rope=rope, inverse=inverse, impl=impl)
    expected = interleaved_rotary(
        positions.cpu(), x.cpu(), rope=rope, inverse=inverse, impl="reference"
    )
    # At position 0 products are exact, so no implementation may round otherwise.
    assert_bitwise_equal(out[first].cpu(), expected[first.cpu()])


@pytest.mark.parametrize("rope", ROPES)
def test_interleaved_rotary_is_batch_invariant(
    impl_device: tuple[str, str], rope: RopeParameters
) -> None:
    impl, device = impl_device
    positions, x = inputs(rope, device)
    whole = interleaved_rotary(positions, x, rope=rope, impl=impl)
    for rows in BATCH_SIZES:
        part = slice(TOKENS - rows, TOKENS)
        assert_bitwise_equal(
            interleaved_rotary(positions[part], x[part], rope=rope, impl=impl), whole[part]
        )
    strided = torch.cat((x, x), dim=1)[:, 2:5]
    assert_bitwise_equal(
        interleaved_rotary(positions, strided, rope=rope, impl=impl), whole[:, 2:5].contiguous()
    )


def test_interleaved_rotary_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    positions, x = inputs(ROPES[1], device)
    buffer, rows = poisoned_rows(x, before=2, after=3)
    places = torch.nn.functional.pad(positions, (2, 3))
    assert_bitwise_equal(
        interleaved_rotary(places, buffer, rope=ROPES[1], impl=impl)[rows],
        interleaved_rotary(positions, x, rope=ROPES[1], impl=impl),
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_interleaved_rotary_in_place_equals_the_copy(
    impl_device: tuple[str, str], rope: RopeParameters, inverse: bool
) -> None:
    impl, device = impl_device
    positions, x = inputs(rope, device)
    for rows in BATCH_SIZES:
        part = slice(TOKENS - rows, TOKENS)
        expected = interleaved_rotary(
            positions[part], x[part], rope=rope, inverse=inverse, impl=impl
        )
        turned = x[part].clone()
        out = interleaved_rotary_(positions[part], turned, rope=rope, inverse=inverse, impl=impl)
        assert out is turned
        assert_bitwise_equal(turned, expected)
    # Heads inside wider rows: what stands beside them stays.
    wide = torch.cat((x, x), dim=1)
    interleaved_rotary_(positions, wide[:, 2:5], rope=rope, inverse=inverse, impl=impl)
    expected = torch.cat((x, x), dim=1)
    expected[:, 2:5] = interleaved_rotary(
        positions, expected[:, 2:5], rope=rope, inverse=inverse, impl=impl
    )
    assert_bitwise_equal(wide, expected)


def test_interleaved_rotary_in_place_rejects_what_it_cannot_turn() -> None:
    positions, x = inputs(ROPES[0], "cpu")
    turn = {"rope": ROPES[0], "impl": "reference"}
    with pytest.raises(InvalidInputError, match="interleaved_rotary_: x must be without a grad"):
        interleaved_rotary_(positions, x.clone().requires_grad_(), **turn)
    with pytest.raises(InvalidInputError, match="x must be with contiguous columns"):
        interleaved_rotary_(positions, x.transpose(1, 2).contiguous().transpose(1, 2), **turn)
    with pytest.raises(InvalidInputError, match="x must be with contiguous columns"):
        interleaved_rotary_(positions, x[:, :1].expand(-1, 9, -1), **turn)


def test_interleaved_rotary_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    positions, x = inputs(ROPES[1], device)

    def there_and_back(value: torch.Tensor) -> torch.Tensor:
        turned = interleaved_rotary(positions, value, rope=ROPES[1], impl=impl)
        return interleaved_rotary(positions, turned, rope=ROPES[1], inverse=True, impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(there_and_back, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x), there_and_back(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_interleaved_rotary_graph_replay_equals_eager() -> None:
    positions, x = inputs(ROPES[1], "cuda")
    eager = interleaved_rotary(positions, x, rope=ROPES[1], impl="triton")
    static = torch.full_like(x, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = interleaved_rotary(positions, static, rope=ROPES[1], impl="triton")
    static[:50] = x[:50]
    graph.replay()
    assert_bitwise_equal(captured[:50], eager[:50])


def test_interleaved_rotary_equals_transformers_in_fp32() -> None:
    """transformers' V4 formula has the same products and sums: equal bits on equal tables."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    positions, x = inputs(ROPES[1], "cpu")
    cos, sin = (table[positions].unsqueeze(0) for table in rope_tables(ROPES[1], x.device))
    theirs = modeling.apply_rotary_pos_emb(x.transpose(0, 1).unsqueeze(0), cos, sin)
    ours = interleaved_rotary(positions, x, rope=ROPES[1], impl="reference")
    assert_bitwise_equal(ours, theirs[0].transpose(0, 1).contiguous())


@pytest.mark.parametrize("inverse", [False, True])
def test_interleaved_rotary_agrees_with_stock_vllm(inverse: bool) -> None:
    """V4's class with yarn tables, both directions: one rounding to bf16 and the tables apart.

    Frequencies are fp32 on both sides; vLLM's has some four roundings more, which a position of at
    most 1,023 multiplies: an angle off by at most 1023 * 4 * 2^-24 < 2^-12.
    """
    stock = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope")
    rope = RopeParameters(
        head_dim=512, rotary_dim=64, theta=160000.0, max_position=1024, rope_type="yarn",
        factor=4.0, original_max_position=256, attention_factor=1.0,
    )  # fmt: skip
    kind = stock.DeepseekV4ScalingRotaryEmbedding
    theirs = SimpleNamespace(
        rotary_dim=64, base=rope.theta, max_position_embeddings=256, scaling_factor=4.0,
        beta_fast=32, beta_slow=1, extrapolation_factor=1, mscale=1.0, is_neox_style=False,
    )  # fmt: skip
    theirs._compute_inv_freq = functools.partial(kind._compute_inv_freq, theirs)
    theirs.cos_sin_cache = kind._compute_cos_sin_cache(theirs)
    positions, x = inputs(rope, "cpu", heads=3)
    expected, _ = kind.forward_native(theirs, positions, x, inverse=inverse)
    ours = interleaved_rotary(positions, x, rope=rope, inverse=inverse, impl="reference")
    assert_bitwise_equal(ours[..., :448], expected[..., :448].contiguous())
    pair = x[..., 448:].float().unflatten(-1, (-1, 2)).abs().sum(-1).repeat_interleave(2, -1)
    turned = expected[..., 448:].float()
    allowed = turned.abs() * 2**-7 + pair * 2**-12
    assert bool(((ours[..., 448:].float() - turned).abs() <= allowed).all())
    other = interleaved_rotary(positions, x, rope=rope, inverse=not inverse, impl="reference")
    far = (other[..., 448:].float() - turned).abs() > allowed
    assert float(far.float().mean()) > 0.5, "control: the other direction is out of bound"


def test_control_halves_instead_of_pairs_differ(impl_device: tuple[str, str]) -> None:
    from consistent_kernels.rotary import rotary

    impl, device = impl_device
    positions, x = inputs(ROPES[0], device)
    halves, _ = rotary(positions, x, x, rope=ROPES[0], impl=impl)
    assert not bitwise_equal(halves, interleaved_rotary(positions, x, rope=ROPES[0], impl=impl))


def test_interleaved_rotary_grad_matches_reference(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    positions, x = inputs(ROPES[1], device)
    grad = hazard_activations(tuple(x.shape), seed=2, device=device)
    leaf = x.clone().requires_grad_()
    InterleavedRotaryFunction.apply(positions, leaf, ROPES[1], False, impl).backward(grad)
    expected = interleaved_rotary(positions, grad, rope=ROPES[1], inverse=True, impl=impl)
    assert_bitwise_equal(leaf.grad, expected)
    # <rotate(x), g> = <x, rotate_back(g)>, each side rounded once (2^-8 of its magnitudes).
    turned = interleaved_rotary(positions, x, rope=ROPES[1], impl=impl)
    left = (turned.double() * grad.double()).sum()
    right = (x.double() * leaf.grad.double()).sum()
    size = (x.double().abs() * grad.double().abs()).sum() * 2
    assert abs(float(left - right)) <= float(size) * 2**-7


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_interleaved_rotary_cross_compiles(arch: int) -> None:
    from consistent_kernels.interleaved_rotary.spec import HEADS, NUM_WARPS
    from consistent_kernels.interleaved_rotary.triton import (
        _interleaved_rotary_fwd_kernel,
        _interleaved_rotary_in_place_kernel,
    )

    signature = {
        "positions_ptr": "*i64", "x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
        "out_ptr": "*bf16", "x_stride": "i32", "head_stride": "i32", "heads": "i32",
        "max_position": "i32",
    }  # fmt: skip
    constexprs = {"D": 512, "HALF": 32, "BLOCK_D": 512, "HEADS": HEADS, "INVERSE": True}
    in_place = {name: kind for name, kind in signature.items() if name != "out_ptr"}
    pairs = {"D": 512, "HALF": 32, "BLOCK_HALF": 32, "HEADS": HEADS, "INVERSE": True}
    for kernel, types, constants in (
        (_interleaved_rotary_fwd_kernel, signature, constexprs),
        (_interleaved_rotary_in_place_kernel, in_place, pairs),
    ):
        cubin = cross_compile(
            kernel,
            arch=arch,
            signature=types,
            constexprs=constants,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        assert cubin.startswith(b"\x7fELF")


def test_interleaved_rotary_rejects_bad_inputs() -> None:
    positions, x = inputs(ROPES[0], "cpu")
    with pytest.raises(InvalidInputError, match=r"x must be \[T, heads, 64\]"):
        interleaved_rotary(positions, x[..., :63], rope=ROPES[0], impl="reference")
    with pytest.raises(InvalidInputError, match="positions must be 257 integers"):
        interleaved_rotary(positions.float(), x, rope=ROPES[0], impl="reference")
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported"):
        interleaved_rotary(positions, x, rope=ROPES[0], impl="cuda")
