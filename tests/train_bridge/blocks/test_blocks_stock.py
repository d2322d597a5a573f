"""The blocks compute the models' functions: stock Hugging Face attention on the same weights.

Stock runs in fp32 on masters rounded to bf16. Ours rounds to bf16 between ops (2^-9 of a value on
average) and reads keys and values from FP8 (e4m3: at most 2^-4 of a value, a third of it on
average). Errors of single elements are independent, so outputs and gradients are compared by their
norms: relative errors below 2^-4 for outputs, and for gradients, where P and dS carry the error of
the scores as well, below 2^-3.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from block_cases import BlockCase

from train_bridge.blocks import PackedSequences

TOKENS = 150


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def run_ours(case: BlockCase, hidden: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    block = case.trainer()
    leaf = hidden.clone().requires_grad_()
    out = block(leaf, PackedSequences.from_lengths([TOKENS]))
    out.backward(grad.to(out.dtype))
    return out.detach(), leaf.grad, dict(block.named_parameters())


def causal_mask(window: int | None) -> torch.Tensor:
    """Additive mask [1, 1, T, T]."""
    place = torch.arange(TOKENS)
    seen = place[None, :] <= place[:, None]
    if window is not None:
        seen &= place[None, :] > place[:, None] - window
    return torch.zeros(TOKENS, TOKENS).masked_fill_(~seen, float("-inf"))[None, None]


def load(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set parameters by name, rounded to bf16 where our block rounds them."""
    own = dict(module.named_parameters())
    for name, value in values.items():
        exact = name.endswith(("sinks", "position_bias"))
        own.pop(name).data.copy_(value if exact else value.bfloat16())
    assert not own, f"left at random: {sorted(own)}"


@pytest.mark.parametrize("name", ["v4-window", "v4-csa", "v4-hca"])
def test_v4_block_agrees_with_transformers(name: str) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    kinds = {
        "v4-window": "sliding_attention",
        "v4-csa": "compressed_sparse_attention",
        "v4-hca": "heavily_compressed_attention",
    }
    case = BlockCase.make(name, "cpu")
    # All entries are selected: stock's top-k leaves ties open.
    params = dataclasses.replace(case.params, topk=64)
    config = DeepseekV4Config(
        hidden_size=params.hidden, num_attention_heads=params.heads, head_dim=512,
        q_lora_rank=params.q_rank, o_groups=params.groups, o_lora_rank=params.out_rank,
        index_n_heads=params.index_heads, index_head_dim=128, index_topk=64,
        sliding_window=params.window, num_hidden_layers=1, layer_types=[kinds[name]],
        attn_implementation="eager", rms_norm_eps=params.norm_eps,
    )  # fmt: skip
    module = modeling.DeepseekV4Attention(config, 0).float().eval()
    theta = config.rope_parameters[module.rope_layer_type]["rope_theta"]
    params = dataclasses.replace(params, rope=dataclasses.replace(params.rope, theta=float(theta)))
    case = dataclasses.replace(case, params=params)
    w = case.weights
    names = {
        "q_a_proj.weight": "q_a", "q_a_norm.weight": "q_norm", "q_b_proj.weight": "q_b",
        "kv_proj.weight": "kv", "kv_norm.weight": "kv_norm", "sinks": "sinks",
        "o_b_proj.weight": "out_b",
    }  # fmt: skip
    values = {theirs: w[ours] for theirs, ours in names.items()}
    values["o_a_proj.weight"] = w["out_a"].flatten(0, 1)
    for prefix, ours in (("compressor.", "compress"), ("compressor.indexer.", "index_compress")):
        if ours in w:
            kv, gate = w[ours].chunk(2)
            values |= {f"{prefix}kv_proj.weight": kv, f"{prefix}gate_proj.weight": gate}
            values[f"{prefix}position_bias"] = w[f"{ours}_bias"]
            values[f"{prefix}kv_norm.weight"] = w[f"{ours}_norm"]
    if params.has_indexer:
        values["compressor.indexer.q_b_proj.weight"] = w["index_q"]
        values["compressor.indexer.scorer.weights_proj.weight"] = w["index_weights"]
    load(module, values)
    hidden = case.hidden(TOKENS, seed=1)
    grad = torch.randn(TOKENS, params.hidden, generator=torch.Generator().manual_seed(2))
    ours, grad_hidden, masters = run_ours(case, hidden, grad)
    leaf = hidden.float().requires_grad_()
    rotary = modeling.DeepseekV4RotaryEmbedding(config)
    positions = torch.arange(TOKENS)[None]
    tables = {kind: rotary(leaf, positions, layer_type=kind) for kind in ("main", "compress")}
    theirs, _ = module(leaf[None], tables, positions, causal_mask(params.window))
    theirs[0].backward(grad.bfloat16().float())
    assert error(ours, theirs[0].detach()) < 2**-4
    assert error(grad_hidden, leaf.grad) < 2**-3
    stock = dict(module.named_parameters())
    for theirs_name, ours_name in names.items():
        # A head's sink sums terms of both signs over all tokens: half of it may cancel.
        bound = 2**-2 if ours_name == "sinks" else 2**-3
        assert error(masters[ours_name].grad, stock[theirs_name].grad) < bound, ours_name
    assert error(masters["out_a"].grad.flatten(0, 1), stock["o_a_proj.weight"].grad) < 2**-3
    if params.ratio > 1:
        kv, gate = masters["compress"].grad.chunk(2)
        assert error(kv, stock["compressor.kv_proj.weight"].grad) < 2**-3
        assert error(gate, stock["compressor.gate_proj.weight"].grad) < 2**-3
        bias = stock["compressor.position_bias"].grad
        assert error(masters["compress_bias"].grad, bias) < 2**-3


def test_v32_block_agrees_with_transformers_mla() -> None:
    """Up to top-k positions, V3.2 attends to all of them: DeepSeek-V3's MLA, not absorbed."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    case = BlockCase.make("v32", "cpu")
    params = dataclasses.replace(case.params, topk=TOKENS)
    case = dataclasses.replace(case, params=params)
    config = DeepseekV3Config(
        hidden_size=params.hidden, num_attention_heads=params.heads,
        num_key_value_heads=params.heads, q_lora_rank=params.q_rank, kv_lora_rank=512,
        qk_nope_head_dim=params.nope_dim, qk_rope_head_dim=64, v_head_dim=params.value_dim,
        num_hidden_layers=1, attn_implementation="eager", rms_norm_eps=params.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": params.rope.theta},
        max_position_embeddings=512,
    )  # fmt: skip
    module = modeling.DeepseekV3Attention(config, 0).float().eval()
    w = case.weights
    names = {
        "q_a_proj.weight": "q_a", "q_a_layernorm.weight": "q_norm", "q_b_proj.weight": "q_b",
        "kv_a_proj_with_mqa.weight": "kv_a", "kv_a_layernorm.weight": "kv_norm",
        "o_proj.weight": "out",
    }  # fmt: skip
    values = {theirs: w[ours] for theirs, ours in names.items()}
    values["kv_b_proj.weight"] = torch.cat((w["k_up"].transpose(1, 2), w["v_up"]), 1).flatten(0, 1)
    load(module, values)
    hidden = case.hidden(TOKENS, seed=1)
    grad = torch.randn(TOKENS, params.hidden, generator=torch.Generator().manual_seed(2))
    ours, grad_hidden, masters = run_ours(case, hidden, grad)
    leaf = hidden.float().requires_grad_()
    positions = torch.arange(TOKENS)[None]
    tables = modeling.DeepseekV3RotaryEmbedding(config)(leaf, positions)
    theirs, _ = module(leaf[None], tables, causal_mask(None))
    theirs[0].backward(grad.bfloat16().float())
    assert error(ours, theirs[0].detach()) < 2**-4
    assert error(grad_hidden, leaf.grad) < 2**-3
    stock = dict(module.named_parameters())
    for theirs_name, ours_name in names.items():
        assert error(masters[ours_name].grad, stock[theirs_name].grad) < 2**-3, ours_name
    both = stock["kv_b_proj.weight"].grad.view(params.heads, -1, 512)
    up, value = both.split([params.nope_dim, params.value_dim], dim=1)
    assert error(masters["k_up"].grad, up.transpose(1, 2)) < 2**-3
    assert error(masters["v_up"].grad, value) < 2**-3


def test_control_another_scale_is_out_of_bound() -> None:
    """The bounds notice scores scaled by the latent's width instead of the head's."""
    case = BlockCase.make("v32", "cpu")
    hidden = case.hidden(TOKENS, seed=1)
    grad = torch.ones(TOKENS, case.params.hidden)
    right = run_ours(case, hidden, grad)[0]
    params = dataclasses.replace(case.params, scale=576**-0.5)
    wrong = run_ours(dataclasses.replace(case, params=params), hidden, grad)[0]
    assert error(wrong, right) > 2**-4
