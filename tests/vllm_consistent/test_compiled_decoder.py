"""The list of kernel calls gives the bits of the layers' ops one by one, and follows updates."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from consistent_kernels import llvm
from consistent_kernels.attention import AttentionParameters, attention_paged, write_kv
from consistent_kernels.linear import linear, pack_weight
from consistent_kernels.rms_norm import add_rms_norm, rms_norm
from consistent_kernels.rotary import RopeParameters, norm_rotary, rotary
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations
from vllm_consistent.layers import compiled_decoder
from vllm_consistent.layers.compiled_decoder import CompiledDecoder

pytestmark = pytest.mark.skipif(
    not llvm.is_available(), reason="needs an x86-64 CPU with AVX2, and llvmlite"
)

EPS, BLOCK, BLOCKS = 1e-5, 16, 12


class Linear:
    """What the list reads of a linear layer and of its method."""

    def __init__(self, columns: int, inner: int, seed: int, has_bias: bool) -> None:
        self.weight = (0.1 * hazard_activations((columns, inner), seed=seed)).bfloat16()
        self.bias = hazard_activations((columns,), seed=seed + 1) if has_bias else None
        self.quant_method = self
        self.packed = [pack_weight(self.weight, impl="llvm")]
        panels = self.packed_columns()
        self._addend = torch.zeros(panels, dtype=torch.float32)
        if self.bias is not None:
            self._addend[:columns] = self.bias

    def packed_columns(self) -> int:
        from consistent_kernels.linear.llvm import panel_columns

        return self.weight.shape[0] + -self.weight.shape[0] % panel_columns()

    def addend(self, layer: Any) -> torch.Tensor:
        return self._addend

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, impl="llvm")


def norm(size: int, seed: int) -> SimpleNamespace:
    weight = torch.nn.Parameter(hazard_activations((size,), seed=seed), requires_grad=False)
    return SimpleNamespace(weight=weight, _parameters={"weight": weight}, variance_epsilon=EPS)


@dataclasses.dataclass
class Shape:
    hidden: int
    inner: int
    params: AttentionParameters
    has_bias: bool = False
    has_norm: bool = False


SHAPES = {
    "smollm2": Shape(192, 512, AttentionParameters(3, 1, 64, 0.125)),
    "qwen2-bias": Shape(128, 200, AttentionParameters(4, 2, 80, 0.2), has_bias=True),
    "qwen3-norm": Shape(256, 320, AttentionParameters(4, 2, 128, 0.1), has_norm=True),
    "window": Shape(192, 512, AttentionParameters(3, 3, 64, 0.125, sliding_window=20)),
}


def build(shape: Shape, layers: int = 2) -> Any:
    """Build the parts of vLLM's model that the list reads."""
    params = shape.params
    width = params.head_dim
    rope = RopeParameters(head_dim=width, rotary_dim=width, theta=1e4, max_position=512)
    made = []
    for index in range(layers):
        seed = 100 * index
        heads = params.num_heads + 2 * params.num_kv_heads
        cache = torch.full(
            (BLOCKS, 2, BLOCK, params.num_kv_heads, width), float("nan"), dtype=torch.bfloat16
        )
        attention = SimpleNamespace(
            qkv_proj=Linear(heads * width, shape.hidden, seed, shape.has_bias),
            o_proj=Linear(shape.hidden, params.num_heads * width, seed + 10, shape.has_bias),
            rotary_emb=SimpleNamespace(rope=rope),
            attn=SimpleNamespace(
                kv_cache=cache, impl=SimpleNamespace(params=params), layer_name=f"layer {index}"
            ),
        )
        if shape.has_norm:
            attention.q_norm, attention.k_norm = norm(width, seed + 3), norm(width, seed + 4)
        mlp = SimpleNamespace(
            gate_up_proj=Linear(2 * shape.inner, shape.hidden, seed + 20, False),
            down_proj=Linear(shape.hidden, shape.inner, seed + 30, False),
        )
        made.append(
            SimpleNamespace(
                self_attn=attention,
                mlp=mlp,
                input_layernorm=norm(shape.hidden, seed + 1),
                post_attention_layernorm=norm(shape.hidden, seed + 2),
            )
        )
    return SimpleNamespace(layers=made, norm=norm(shape.hidden, 999))


def one_by_one(
    model: Any, hidden: torch.Tensor, positions: torch.Tensor, meta: Any
) -> torch.Tensor:
    """Run the ops that the layers run where no list serves them."""
    rows = hidden.shape[0]
    residual = x = None
    for layer in model.layers:
        block = layer.self_attn
        params = block.attn.impl.params
        if residual is None:
            residual, x = (
                hidden,
                rms_norm(hidden, layer.input_layernorm.weight, EPS, impl="reference"),
            )
        else:
            x, residual = add_rms_norm(
                x, residual, layer.input_layernorm.weight, EPS, impl="reference"
            )
        qkv = block.qkv_proj(x).view(rows, -1, params.head_dim)
        q, k, v = qkv.split([params.num_heads, params.num_kv_heads, params.num_kv_heads], 1)
        rope = block.rotary_emb.rope
        if hasattr(block, "q_norm"):
            weights = block.q_norm.weight, block.k_norm.weight
            q, k = norm_rotary(positions, q, k, *weights, EPS, rope=rope, impl="reference")
        else:
            q, k = rotary(positions, q, k, rope=rope, impl="reference")
        k_cache, v_cache = block.attn.kv_cache.unbind(1)
        write_kv(k, v, k_cache, v_cache, meta.slot_mapping, impl="llvm")
        out, _ = attention_paged(
            q, k_cache, v_cache, meta.block_table, meta.seq_lens, meta.query_start_loc,
            params=params, impl="llvm", max_query_len=64, max_seq_len=64,
        )  # fmt: skip
        x = block.o_proj(out.view(rows, -1))
        x, residual = add_rms_norm(
            x, residual, layer.post_attention_layernorm.weight, EPS, impl="reference"
        )
        both = layer.mlp.gate_up_proj(x)
        half = both.shape[1] // 2
        x = layer.mlp.down_proj(silu_and_mul(both[:, :half], both[:, half:], impl="llvm"))
    return add_rms_norm(x, residual, model.norm.weight, EPS, impl="reference")[0]


def batch(lengths: list[int], counts: list[int]) -> tuple[torch.Tensor, Any]:
    """Return positions and metadata of requests with so many keys and so many new tokens."""
    table = torch.arange(len(lengths) * 3, dtype=torch.int32).view(-1, 3).flip(0)
    positions, slots = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for position in range(length - count, length):
            positions.append(position)
            slots.append(int(table[row, position // BLOCK]) * BLOCK + position % BLOCK)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    meta = SimpleNamespace(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        num_actual_tokens=len(slots),
        max_query_len=max(counts),
    )
    return torch.tensor(positions), meta


STEPS = (
    ([5, 17, 33], [5, 17, 33]),
    ([6, 18, 34], [1, 1, 1]),
    ([7, 19, 35], [1, 1, 1]),
    ([8, 20, 40], [1, 1, 5]),
    ([9, 21, 41], [1, 1, 1]),
)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_list_equals_the_ops_one_by_one(shape: Shape) -> None:
    ours, theirs = build(shape), build(shape)
    decoder = CompiledDecoder(ours)
    for step, (lengths, counts) in enumerate(STEPS):
        positions, meta = batch(lengths, counts)
        hidden = hazard_activations((len(positions), shape.hidden), seed=50 + step)
        expected = one_by_one(theirs, hidden, positions, meta)
        assert_bitwise_equal(decoder.run(hidden, positions, meta), expected, f"step {step}")
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert_bitwise_equal(a.self_attn.attn.kv_cache, b.self_attn.attn.kv_cache)


def test_decode_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["smollm2"]
    decoder, model = CompiledDecoder(build(shape)), build(shape)
    for step, (lengths, counts) in enumerate((([3, 17], [3, 17]), ([4, 18], [1, 1]))):
        positions, meta = batch(lengths, counts)
        hidden = hazard_activations((len(positions), shape.hidden), seed=step)
        assert_bitwise_equal(
            decoder.run(hidden, positions, meta), one_by_one(model, hidden, positions, meta)
        )

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(compiled_decoder, "plan_attention", refuse)
    for step in range(15):
        positions, meta = batch([5 + step, 19 + step], [1, 1])
        hidden = hazard_activations((2, shape.hidden), seed=10 + step)
        assert_bitwise_equal(
            decoder.run(hidden, positions, meta), one_by_one(model, hidden, positions, meta)
        )
    positions, meta = batch([20, 35], [1, 2])
    with pytest.raises(AssertionError, match="planned again"):
        decoder.run(hazard_activations((3, shape.hidden), seed=30), positions, meta)


def test_a_kept_list_serves_other_values_of_the_same_shape() -> None:
    shape = SHAPES["smollm2"]
    decoder, model = CompiledDecoder(build(shape)), build(shape)
    for seed in range(3):
        positions, meta = batch([5 + seed, 17 - seed], [2, 1])
        for each in (decoder.model, model):
            for layer in each.layers:
                layer.self_attn.attn.kv_cache.zero_()
        hidden = hazard_activations((3, shape.hidden), seed=seed)
        expected = one_by_one(model, hidden, positions, meta)
        assert_bitwise_equal(decoder.run(hidden, positions, meta), expected)
    assert len(decoder.steps) == 1


def test_a_kept_list_follows_weights_rebuilt_in_place() -> None:
    shape = SHAPES["qwen2-bias"]
    decoder, model = CompiledDecoder(build(shape)), build(shape)
    positions, meta = batch([9], [9])
    hidden = hazard_activations((9, shape.hidden), seed=1)
    before = decoder.run(hidden, positions, meta)
    for each in (decoder.model, model):
        for layer in each.layers:
            projection = layer.self_attn.qkv_proj
            projection.weight.mul_(-2)
            projection.packed[0].rebuild(projection.weight)
            layer.input_layernorm.weight.data.mul_(1.5)
    after = decoder.run(hidden, positions, meta)
    assert len(decoder.steps) == 1
    assert_bitwise_equal(after, one_by_one(model, hidden, positions, meta))
    assert not bitwise_equal(after, before)


def test_control_another_row_of_a_weight_shows() -> None:
    shape = SHAPES["smollm2"]
    decoder, model = CompiledDecoder(build(shape)), build(shape)
    projection = model.layers[1].mlp.down_proj
    projection.weight[5].neg_()
    positions, meta = batch([9], [9])
    hidden = hazard_activations((9, shape.hidden), seed=1)
    ours = decoder.run(hidden, positions, meta)
    assert not bitwise_equal(ours, one_by_one(model, hidden, positions, meta))
