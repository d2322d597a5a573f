"""`attn_implementation="train_bridge"` on stock models: the bits of the bridged attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from consistent_kernels.attention import AttentionParameters
from consistent_kernels.errors import ConfigurationError, InvalidInputError
from consistent_kernels.experts import experts, prepare_expert_weight
from consistent_kernels.resolve import choose_implementation
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge.functions.attention import AttentionFunction
from train_bridge.functions.experts import ExpertsFunction
from train_bridge.hf_interfaces import (
    NAME,
    attention_forward,
    experts_forward,
    register_hf_interfaces,
)

Calls = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What transformers passed to the registered function, and what it returned."""
    seen: Calls = []

    def record(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        result = attention_forward(module, q, k, v, mask, **kwargs)
        seen.append({"q": q, "k": k, "v": v, "mask": mask, "out": result[0]})
        return result

    register_hf_interfaces()
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, record)
    return seen


@pytest.fixture
def make_named(make_stock: Callable) -> Callable[..., torch.nn.Module]:
    """Return a function (family, device) -> stock model whose attention is ours."""

    def make(family: str, device: str = "cpu") -> torch.nn.Module:
        model = make_stock(family, device=device)
        model.set_attn_implementation(NAME)
        return model

    return make


def bridged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], device: str
) -> torch.Tensor:
    """The bridged attention on packed [T, heads, D]."""
    params = AttentionParameters(q.shape[1], k.shape[1], q.shape[2], q.shape[2] ** -0.5)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    impl = choose_implementation("attention", device)
    return AttentionFunction.apply(q, k, v, cu, cu, params, impl, None)


def rows(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, L, D] to [B * L, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_named_attention_equals_bridged_when_padded(
    side: str,
    family: str,
    device: str,
    calls: Calls,
    make_named: Callable,
    make_sequences: Callable,
) -> None:
    sequences = make_sequences(family, device)
    ids, mask = sequences.padded(side)
    model = make_named(family, device)
    with torch.no_grad():
        model(ids, attention_mask=mask)
    assert len(calls) == model.config.num_hidden_layers
    real = mask.flatten().nonzero().squeeze(1)
    lengths = [len(tokens) for tokens in sequences.tokens]
    for index, call in enumerate(calls):
        q, k, v = (rows(call[name])[real] for name in "qkv")
        expected = bridged_attention(q, k, v, lengths, device)
        assert_bitwise_equal(call["out"].flatten(0, 1)[real], expected, f"layer {index}")
        assert call["out"].flatten(0, 1)[mask.flatten() == 0].eq(0).all()


def test_named_attention_equals_bridged_when_packed(
    family: str, device: str, calls: Calls, make_named: Callable, make_sequences: Callable
) -> None:
    sequences = make_sequences(family, device)
    ids, positions = sequences.packed()
    with torch.no_grad():
        make_named(family, device)(ids, position_ids=positions)
    lengths = [len(tokens) for tokens in sequences.tokens]
    for call in calls:
        expected = bridged_attention(*(rows(call[name]) for name in "qkv"), lengths, device)
        assert_bitwise_equal(call["out"].flatten(0, 1), expected)


def test_named_attention_control_one_sequence(
    calls: Calls, make_named: Callable, make_sequences: Callable
) -> None:
    """Packed sequences taken for one: the comparison sees it."""
    ids, positions = make_sequences("qwen3").packed()
    with torch.no_grad():
        make_named("qwen3")(ids, position_ids=positions)
    one = bridged_attention(*(rows(calls[0][name]) for name in "qkv"), [ids.numel()], "cpu")
    with pytest.raises(AssertionError):
        assert_bitwise_equal(calls[0]["out"].flatten(0, 1), one)


def test_named_attention_control_stock(
    calls: Calls, make_named: Callable, make_sequences: Callable
) -> None:
    """transformers' own sdpa on the same tensors has other bits."""
    (ids, _) = make_sequences("qwen3").packed()
    with torch.no_grad():
        make_named("qwen3")(ids)
    call = calls[0]
    group = call["q"].shape[1] // call["k"].shape[1]
    k, v = (call[name].repeat_interleave(group, dim=1) for name in "kv")
    stock = torch.nn.functional.scaled_dot_product_attention(call["q"], k, v, is_causal=True)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(call["out"], stock.transpose(1, 2).contiguous())


def test_named_attention_with_a_cache_prefill_equals_decode(
    calls: Calls, make_named: Callable, make_sequences: Callable
) -> None:
    ids = make_sequences("qwen3").tokens[2][None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model = make_named("qwen3")
    with torch.no_grad():
        cache = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
        calls.clear()
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True)
    lengths = mask.sum(1).tolist()
    real = mask.flatten().nonzero().squeeze(1)
    for call in calls:
        k, v = (rows(call[name])[real] for name in "kv")
        q = k.new_zeros(k.shape[0], call["q"].shape[1], k.shape[2])
        last = torch.tensor(lengths).cumsum(0) - 1
        q[last] = rows(call["q"])
        expected = bridged_attention(q, k, v, lengths, "cpu")[last]
        assert_bitwise_equal(call["out"].flatten(0, 1), expected)


def test_named_attention_grad_equals_bridged(
    family: str, device: str, calls: Calls, make_named: Callable, make_sequences: Callable
) -> None:
    sequences = make_sequences(family, device)
    ids, positions = sequences.packed()
    make_named(family, device)(ids, position_ids=positions)
    call = calls[-1]
    leaves = [call[name].detach().requires_grad_() for name in "qkv"]
    out, _ = attention_forward(torch.nn.Module(), *leaves, None, position_ids=positions)
    grad = torch.randn_like(out)
    out.backward(grad)
    packed = [rows(call[name]).detach().requires_grad_() for name in "qkv"]
    lengths = [len(tokens) for tokens in sequences.tokens]
    bridged_attention(*packed, lengths, device).backward(grad.flatten(0, 1))
    for name, leaf, expected in zip("qkv", leaves, packed, strict=True):
        assert_bitwise_equal(rows(leaf.grad), expected.grad, name)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_named_functions_run_under_compile(family: str, make_stock: Callable) -> None:
    """Dynamo leaves both out, as it cannot trace plans; the graph around them is compiled."""
    register_hf_interfaces()
    model = make_stock(family, device="cpu").to(torch.bfloat16)
    model.set_attn_implementation(NAME)
    if family == "qwen3_moe":
        model.set_experts_implementation(NAME)
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).logits
        compiled = torch.compile(model, backend="eager")(input_ids=ids, attention_mask=mask).logits
    assert_bitwise_equal(compiled, plain)


def make_qkv(length: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, heads, length, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]


def test_named_attention_rejects_everything_it_does_not_compute() -> None:
    options = {"is_causal": False, "softcap": 30.0, "s_aux": torch.zeros(4)}
    with pytest.raises(ConfigurationError) as caught:
        attention_forward(torch.nn.Module(), *make_qkv(), None, dropout=0.1, **options)
    assert len(caught.value.violations) == 4


def test_named_attention_rejects_a_4d_mask() -> None:
    with pytest.raises(InvalidInputError, match=r"2-D padding mask"):
        attention_forward(torch.nn.Module(), *make_qkv(), torch.zeros(2, 1, 8, 8))


def test_named_attention_rejects_padding_inside_a_sequence() -> None:
    mask = torch.ones(2, 8)
    mask[1, 3] = 0
    with pytest.raises(InvalidInputError, match="one run of ones"):
        attention_forward(torch.nn.Module(), *make_qkv(), mask)


def test_a_mask_changed_in_place_is_seen() -> None:
    qkv, mask = make_qkv(), torch.ones(2, 8)
    before, _ = attention_forward(torch.nn.Module(), *qkv, mask)
    mask[:, :2] = 0
    after, _ = attention_forward(torch.nn.Module(), *qkv, mask)
    assert after[:, :2].eq(0).all()
    assert not before[:, :2].eq(0).all()


def expert_calls(
    model: torch.nn.Module, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """(module, hidden, ids, weights, out) of every layer of a forward."""
    from transformers.integrations.moe import ExpertsInterface

    seen: list[tuple[Any, ...]] = []

    def record(*args: Any) -> torch.Tensor:
        out = experts_forward(*args)
        seen.append((*args, out))
        return out

    register_hf_interfaces()
    monkeypatch.setitem(ExpertsInterface._global_mapping, NAME, record)
    model.set_experts_implementation(NAME)
    with torch.no_grad():
        model(ids)
    return seen


def bridged_experts(
    module: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    impl = choose_implementation("experts", x.device.type)
    prepared = tuple(
        prepare_expert_weight(w, dtype=x.dtype, impl=impl)
        for w in (module.gate_up_proj, module.down_proj)
    )
    w13, w2 = module.gate_up_proj, module.down_proj
    return ExpertsFunction.apply(x, w13, w2, ids, weights.float(), None, prepared, None, impl)


def test_named_experts_equal_bridged(
    device: str, make_stock: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(3, 1000, (2, 21), generator=torch.Generator().manual_seed(0)).to(device)
    model = make_stock("qwen3_moe", device=device)
    calls = expert_calls(model, ids, monkeypatch)
    assert len(calls) == model.config.num_hidden_layers - len(model.config.mlp_only_layers)
    for module, x, index, weights, out in calls:
        assert_bitwise_equal(out, bridged_experts(module, x, index, weights))


def test_named_experts_are_batch_invariant_and_control_stock(
    make_stock: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row alone has its bits; transformers' own sum over experts rounds in another order."""
    ids = torch.randint(3, 1000, (2, 21), generator=torch.Generator().manual_seed(0))
    model = make_stock("qwen3_moe")
    module, x, index, weights, out = expert_calls(model, ids, monkeypatch)[0]
    alone = experts_forward(module, x[5:6], index[5:6], weights[5:6])
    assert_bitwise_equal(alone, out[5:6])
    model.set_experts_implementation("eager")
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_bitwise_equal(module(x, index, weights), out)


def test_named_experts_grad_equals_bridged(
    make_stock: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(3, 1000, (1, 33), generator=torch.Generator().manual_seed(0))
    module, x, index, weights, out = expert_calls(make_stock("qwen3_moe"), ids, monkeypatch)[0]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = []
    for forward in (experts_forward, bridged_experts):
        leaf = x.detach().clone().requires_grad_()
        module.zero_grad()
        forward(module, leaf, index, weights).backward(grad)
        grads.append((leaf.grad, module.gate_up_proj.grad, module.down_proj.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert_bitwise_equal(ours, theirs)


def test_named_experts_clamp_as_deepseek_v4() -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    register_hf_interfaces()
    config = DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=32, n_routed_experts=4, swiglu_limit=0.5
    )
    module = DeepseekV4Experts(config).bfloat16()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16() * 0.2
    x = torch.randn((9, 64), generator=generator).bfloat16()
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand((9, 2), generator=generator)
    with torch.no_grad():
        config._experts_implementation = "eager"
        stock = module(x, index, weights).float()
        config._experts_implementation = NAME
        out = module(x, index, weights)
        prepared = [
            prepare_expert_weight(w, dtype=x.dtype, impl="reference") for w in module.parameters()
        ]
        clamped, free = (
            experts(x, *prepared, index, weights, limit=limit, impl="reference").float()
            for limit in (0.5, None)
        )
    # Stock rounds more often, to bf16: within a hundredth as a whole. Unclamped is another result.
    assert float((out.float() - stock).norm() / stock.norm()) < 1e-2
    assert float((out.float() - clamped).norm() / stock.norm()) < 1e-2
    assert float((free - stock).norm() / stock.norm()) > 0.5


def test_named_experts_reject_a_gate_of_their_own() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    class Squared(Qwen3MoeExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate).square() * up

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=4)
    module = Squared(config).bfloat16()
    rows = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match="_apply_gate of Squared: SwiGLU with or without"):
        experts_forward(module, *rows, torch.zeros(1, 2))


def test_named_experts_reject_everything_they_do_not_compute() -> None:
    module = torch.nn.Module()
    module.has_bias = module.is_transposed = True
    module.is_concatenated = module.has_gate = False
    module.act_fn, module._hf_tp_plan = torch.nn.GELU(), "moe_tp_experts"
    with pytest.raises(ConfigurationError, match="tp_plan 'moe_tp_experts'") as caught:
        experts_forward(module, torch.zeros(1, 64), torch.zeros(1, 2), torch.zeros(1, 2))
    assert len(caught.value.violations) == 6
