"""Relations of the compressor: one prefill = chunks = token by token, paged = packed, fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kv_cases import poisoned_cache

from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_to_cache,
    compressor_state,
    packed_windows,
    paged_windows,
    write_compressor_state,
)
from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.kv_cache_fp8 import INDEXER, V4, KVLayout, write_kv_fp8
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.testing import (
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    norm_weight,
)

ROPE = RopeParameters(head_dim=64, rotary_dim=16, theta=160000.0, max_position=4096)
PARAMETERS = (
    CompressorParameters(ratio=4, overlap=True, head_dim=64, norm_eps=1e-6),
    CompressorParameters(ratio=128, overlap=False, head_dim=64, norm_eps=1e-6),
    CompressorParameters(ratio=16, overlap=False, head_dim=32, norm_eps=1e-6),
)
LENGTHS = (3, 137, 0, 260, 4, 128)
BLOCK = 8


@dataclasses.dataclass
class Inputs:
    """Packed sequences of LENGTHS tokens."""

    kv_score: torch.Tensor
    bias: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    cu_seqlens: torch.Tensor


def make_inputs(params: CompressorParameters, device: str) -> Inputs:
    lengths = torch.tensor(LENGTHS)
    total, width = int(lengths.sum()), params.state_width
    kv_score = hazard_activations((total, 2 * width), seed=1, dtype=torch.float32)
    kv_score[:, width::17] /= 30.0  # an outlier score would make its window one-hot
    kv_score[5] = kv_score[4]  # ties
    generator = torch.Generator().manual_seed(2)
    return Inputs(
        kv_score.to(device),
        torch.randn(params.ratio, width, generator=generator).to(device),
        norm_weight(params.head_dim, seed=3, device=device),
        torch.cat([torch.arange(n) for n in LENGTHS]).to(device),
        torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths).to(device),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device),
    )


def packed(inputs: Inputs, params: CompressorParameters, impl: str) -> torch.Tensor:
    """All entries of all sequences, as a trainer forms them."""
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl=impl)
    rows, positions, _ = packed_windows(inputs.cu_seqlens, params)
    return compress(state, rows, positions, inputs.weight, rope=ROPE, params=params, impl=impl)


class Engine:
    """A paged state cache whose unused slots hold NaN, fed in steps."""

    def __init__(self, inputs: Inputs, params: CompressorParameters, impl: str) -> None:
        self.inputs, self.params, self.impl = inputs, params, impl
        device = inputs.kv_score.device
        pages = max(LENGTHS) // BLOCK + 1
        generator = torch.Generator().manual_seed(4)
        order = torch.randperm(pages * len(LENGTHS), generator=generator)
        self.table = order.view(len(LENGTHS), pages).to(device, torch.int32)
        slots = pages * len(LENGTHS) * BLOCK
        self.cache = torch.full((slots, 2 * params.state_width), float("nan"), device=device)

    def step(self, tokens: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Run these rows of the packed input, and padded rows; return the entries they close."""
        inputs, params = self.inputs, self.params
        positions = torch.nn.functional.pad(inputs.positions[tokens], (0, padding))
        requests = torch.nn.functional.pad(inputs.requests[tokens], (0, padding))
        kv_score = torch.nn.functional.pad(
            inputs.kv_score[tokens], (0, 0, 0, padding), value=float("nan")
        )
        pages = self.table[requests, positions // BLOCK]
        slots = pages * BLOCK + positions % BLOCK
        slots[len(tokens) :] = -1
        write_compressor_state(kv_score, inputs.bias, positions, self.cache, slots, impl=self.impl)
        rows = paged_windows(positions, requests, self.table, BLOCK, params)
        rows[len(tokens) :] = -1
        first = positions // params.ratio * params.ratio
        entries = compress(
            self.cache, rows, first, inputs.weight, rope=ROPE, params=params, impl=self.impl
        )
        closed = (rows >= 0).any(1)
        assert not bool(entries[~closed].any())
        return entries[closed]


def in_order(inputs: Inputs, params: CompressorParameters, order: torch.Tensor) -> torch.Tensor:
    """Ranks of the entries that tokens close, in the packed order, for a step order."""
    closes = (inputs.positions[order] + 1) % params.ratio == 0
    return torch.argsort(order[closes])


@pytest.mark.parametrize("params", PARAMETERS)
def test_compressor_prefill_equals_decode(
    impl_device: tuple[str, str], params: CompressorParameters
) -> None:
    """Packed = paged in one prefill = in chunks that cut windows = token by token, all requests."""
    impl, device = impl_device
    inputs = make_inputs(params, device)
    expected = packed(inputs, params, impl)
    total = inputs.positions.shape[0]
    everything = torch.arange(total, device=device)
    assert_bitwise_equal(Engine(inputs, params, impl).step(everything), expected)
    for size in {4: (1, 5), 128: (1, 64), 16: (5,)}[params.ratio]:
        chunk = inputs.positions // size
        steps = [everything[chunk == i] for i in range(int(chunk.max()) + 1)]
        engine = Engine(inputs, params, impl)
        entries = torch.cat([engine.step(tokens, padding=3) for tokens in steps])
        ranks = in_order(inputs, params, torch.cat(steps))
        assert_bitwise_equal(entries[ranks], expected)


@pytest.mark.parametrize("params", PARAMETERS)
def test_compressor_matches_reference(
    impl_device: tuple[str, str], params: CompressorParameters
) -> None:
    impl, device = impl_device
    inputs = make_inputs(params, device)
    entries = packed(inputs, params, impl)
    expected, size = [], []
    cos, sin = (table.double() for table in rope_tables(ROPE, device))
    width, dim, ratio = params.state_width, params.head_dim, params.ratio
    for start, end in zip(
        inputs.cu_seqlens[:-1].tolist(), inputs.cu_seqlens[1:].tolist(), strict=True
    ):
        for first in range(0, (end - start) // ratio * ratio, ratio):
            parts = [(start + first, dim if params.overlap else 0)]
            if params.overlap and first:
                parts.insert(0, (start + first - ratio, 0))
            rows = inputs.kv_score.double()
            kv = torch.cat([rows[at : at + ratio, c : c + dim] for at, c in parts])
            score = torch.cat(
                [
                    rows[at : at + ratio, width + c : width + c + dim]
                    + inputs.bias.double()[:, c : c + dim]
                    for at, c in parts
                ]
            )
            p = score.softmax(0)
            c = (p * kv).sum(0)
            rstd = torch.rsqrt(c.square().mean() + params.norm_eps)
            normed = c * rstd * inputs.weight.double()
            noise = (p * kv.abs()).sum(0) * rstd * inputs.weight.double()
            pairs = torch.view_as_complex(normed[-ROPE.rotary_dim :].view(-1, 2))
            turned = pairs * torch.complex(cos[first], sin[first])
            expected.append(
                torch.cat((normed[: -ROPE.rotary_dim], torch.view_as_real(turned).flatten()))
            )
            size.append(noise + pairs.abs().max() + noise.max())
    expected, size = torch.stack(expected), torch.stack(size)
    # Scores are exact sums of two fp32 numbers up to 2^-24 of at most 8; exp, the sums of `tokens`
    # terms, the division and the norm over head_dim add tokens + head_dim + 16 roundings.
    noise = (params.tokens + dim + 32) * 2**-24
    bound = expected.abs() * 2**-8 + size * noise
    assert bool(((entries.double() - expected).abs() <= bound).all())


def test_compressor_agrees_with_transformers_in_fp32() -> None:
    """The HCA and CSA compressors of transformers on the same projections, run in fp32."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=32, head_dim=64, qk_rope_head_dim=16, q_lora_rank=16, num_hidden_layers=2,
        num_attention_heads=2, index_n_heads=2, index_head_dim=32, layer_types=None,
    )  # fmt: skip
    rope_numbers = config.rope_parameters["compress"]
    assert rope_numbers["rope_type"] == "default"
    rope = dataclasses.replace(ROPE, theta=float(rope_numbers["rope_theta"]))
    hidden = torch.randn(1, 260, 32, generator=torch.Generator().manual_seed(5))
    for module_class, params in (
        (modeling.DeepseekV4CSACompressor, PARAMETERS[0]),
        (modeling.DeepseekV4HCACompressor, PARAMETERS[1]),
    ):
        torch.manual_seed(6)
        module = module_class(config).float()
        torch.nn.init.normal_(module.position_bias)
        torch.nn.init.normal_(module.kv_norm.weight, 1.0, 0.2)
        positions = torch.arange(260)
        theirs, _ = module(hidden, torch.zeros(1, 260, 16), positions[None], None, 0)
        kv_score = torch.cat((module.kv_proj(hidden), module.gate_proj(hidden)), dim=-1)[0]
        state = compressor_state(
            kv_score.detach(), module.position_bias.detach(), positions, impl="reference"
        )
        rows, first, _ = packed_windows(torch.tensor([0, 260]), params)
        ours = compress(
            state, rows, first, module.kv_norm.weight.detach(), rope=rope,
            params=dataclasses.replace(params, norm_eps=config.rms_norm_eps),
            dtype=torch.float32, impl="reference",
        )  # fmt: skip
        assert torch.allclose(ours, theirs[0, 0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("params", PARAMETERS)
def test_compressor_is_batch_invariant(
    impl_device: tuple[str, str], params: CompressorParameters
) -> None:
    impl, device = impl_device
    inputs = make_inputs(params, device)
    whole = packed(inputs, params, impl)
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl=impl)
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)
    for start in range(0, rows.shape[0], 7):
        part = slice(start, start + 3)
        some = compress(
            state, rows[part], first[part], inputs.weight, rope=ROPE, params=params, impl=impl
        )
        assert_bitwise_equal(some, whole[part])


def test_control_a_window_cut_at_the_chunk_differs(impl_device: tuple[str, str]) -> None:
    """Without the state of the chunk before, the first entry of a chunk is another one."""
    impl, device = impl_device
    params = PARAMETERS[0]
    inputs = make_inputs(params, device)
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl=impl)
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)
    cut = rows.clone()
    cut[5, : params.ratio] = -1
    kwargs = {"rope": ROPE, "params": params, "impl": impl}
    whole = compress(state, rows, first, inputs.weight, **kwargs)
    other = compress(state, cut, first, inputs.weight, **kwargs)
    assert not bitwise_equal(other[5], whole[5])
    assert_bitwise_equal(other[6:], whole[6:])


def test_control_rounding_the_projections_early_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    params = PARAMETERS[0]
    inputs = make_inputs(params, device)
    expected = packed(inputs, params, impl)
    inputs.kv_score = inputs.kv_score.bfloat16().float()
    assert not bitwise_equal(packed(inputs, params, impl), expected)


@pytest.mark.parametrize(("ratio", "layout"), [(4, V4), (4, INDEXER), (128, V4)])
def test_compress_to_cache_equals_compress_then_write(
    impl_device: tuple[str, str], ratio: int, layout: KVLayout
) -> None:
    """The same bytes of the whole cache, padding slots and untouched ones included."""
    impl, device = impl_device
    size = layout.width
    params = CompressorParameters(ratio, ratio == 4, size, 1e-6)
    inputs = make_inputs(params, device)
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl=impl)
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)
    state[int(rows[1, -1]), 3] = float("nan")
    slots = torch.arange(len(rows), device=device).flip(0) * 3
    slots[2] = -1
    rope = dataclasses.replace(ROPE, head_dim=size, rotary_dim=64)
    kwargs = {"rope": rope, "params": params, "impl": impl}
    blocks = 3 * len(rows) // BLOCK + 1
    caches = [poisoned_cache(blocks, BLOCK, layout, device=device) for _ in range(3)]
    entries = compress(state, rows, first, inputs.weight, **kwargs)
    write_kv_fp8(entries, caches[0], slots, layout=layout, impl=impl)
    for cache, places in ((caches[1], first), (caches[2], first + ratio)):
        compress_to_cache(state, rows, places, inputs.weight, cache, slots, layout=layout, **kwargs)
    raw = [cache.as_strided((blocks * cache.stride(0),), (1,)) for cache in caches]
    assert_bitwise_equal(raw[1], raw[0])
    # The control: entries rotated to another position.
    assert not bitwise_equal(raw[2], raw[0])


def test_compress_to_cache_rejects_bad_inputs() -> None:
    params = CompressorParameters(4, True, 128, 1e-6)
    inputs = make_inputs(params, "cpu")
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl="reference")
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)
    slots = torch.arange(len(rows))
    kwargs = {"rope": ROPE, "params": params, "impl": "reference"}
    cache = poisoned_cache(16, BLOCK, INDEXER)
    with pytest.raises(InvalidInputError, match="slots must be integers of shape"):
        compress_to_cache(
            state, rows, first, inputs.weight, cache, slots[:-1], layout=INDEXER, **kwargs
        )
    with pytest.raises(UnsupportedError, match="'v4' for entries of 128 columns"):
        compress_to_cache(state, rows, first, inputs.weight, cache, slots, layout=V4, **kwargs)
    with pytest.raises(InvalidInputError, match="cache must be"):
        compress_to_cache(
            state, rows, first, inputs.weight, cache[..., :-4], slots, layout=INDEXER, **kwargs
        )


def test_compressor_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    params = PARAMETERS[0]
    inputs = make_inputs(params, device)
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)

    def entries(kv_score: torch.Tensor) -> torch.Tensor:
        state = compressor_state(kv_score, inputs.bias, inputs.positions, impl=impl)
        return compress(state, rows, first, inputs.weight, rope=ROPE, params=params, impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(entries, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(inputs.kv_score), entries(inputs.kv_score))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_compressor_graph_replay_equals_eager() -> None:
    params = PARAMETERS[0]
    inputs = make_inputs(params, "cuda")
    expected = packed(inputs, params, "triton")
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl="triton")
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)
    static = torch.full_like(rows, -1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compress(
            state, static, first, inputs.weight, rope=ROPE, params=params, impl="triton"
        )
    static[:20] = rows[:20]
    graph.replay()
    assert_bitwise_equal(captured[:20], expected[:20])
    assert not bool(captured[20:].any())


def test_compressor_rejects_bad_inputs() -> None:
    params = PARAMETERS[0]
    inputs = make_inputs(params, "cpu")
    state = compressor_state(inputs.kv_score, inputs.bias, inputs.positions, impl="reference")
    rows, first, _ = packed_windows(inputs.cu_seqlens, params)
    kwargs = {"rope": ROPE, "params": params, "impl": "reference"}
    with pytest.raises(InvalidInputError, match=r"rows must be integers of shape \(\d+, 8\)"):
        compress(state, rows[:, :7], first, inputs.weight, **kwargs)
    with pytest.raises(InvalidInputError, match=r"state must be float32 \[n, 256\]"):
        compress(state.bfloat16(), rows, first, inputs.weight, **kwargs)
    with pytest.raises(InvalidInputError, match=r"weight must be of shape \(64,\)"):
        compress(state, rows, first, inputs.weight[:63], **kwargs)
    with pytest.raises(InvalidInputError, match=r"kv_score must be float32 \[n, 256\]"):
        compressor_state(inputs.kv_score[:, 1:], inputs.bias, inputs.positions, impl="reference")
    beyond = rows.clone()
    beyond[3, 1] = len(state)
    with pytest.raises(InvalidInputError, match=r"rows\[3, 1\] must be -1 or a row of state below"):
        compress(state, beyond, first, inputs.weight, **kwargs)
    with pytest.raises(InvalidInputError, match="a power of two tokens, got 3"):
        CompressorParameters(ratio=3, overlap=False, head_dim=64, norm_eps=1e-6)
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported"):
        compress(state, rows, first, inputs.weight, **(kwargs | {"impl": "cuda"}))
