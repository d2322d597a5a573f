"""Contracts: frozen specs, digests that see every change, differences that name the key."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from consistent_kernels.contract import Contract, check_same, contract_from_dict, differences
from consistent_kernels.errors import ConfigurationError, ContractMismatchError, UnsupportedError
from consistent_kernels.model_facts import model_facts
from consistent_kernels.resolve import OPS_OF_CONTRACT, contract_specs, resolve_contract

CONTRACTS = Path(__file__).resolve().parents[2] / "configs" / "contracts"


def llama_config(**changes: object) -> SimpleNamespace:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    return SimpleNamespace(**(base | changes))


def cpu_contract(**changes: object) -> Contract:
    return resolve_contract(model_facts(llama_config(**changes), "bfloat16"), "cpu")


def moe_config(**changes: object) -> SimpleNamespace:
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    return llama_config(**(moe | changes))


@pytest.mark.parametrize("name", OPS_OF_CONTRACT)
def test_specs_equal_the_frozen_contract(name: str) -> None:
    file = CONTRACTS / f"{name}.json"
    frozen = json.loads(file.read_text())
    specs = {op: spec.to_dict() for op, spec in contract_specs(name).items()}
    assert specs == frozen["specs"], (
        f"a spec changed: bump its version and write a new contract file beside {file.name}"
    )


def test_a_model_gets_the_contract_of_its_kind() -> None:
    assert cpu_contract().name == "dense_bf16_v1"
    contract = resolve_contract(model_facts(moe_config(), "bfloat16"), "cpu")
    assert contract.name == "moe_bf16_v1"
    assert contract.model["moe.layers"] == "0,1"
    assert {"experts", "router"} <= contract.programs.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_tok": 4},
        {"norm_topk_prob": False},
        {"moe_intermediate_size": 128},
        {"mlp_only_layers": [0]},
    ],
)
def test_digest_sees_a_changed_moe_fact(changes: dict[str, object]) -> None:
    ours, theirs = (
        resolve_contract(model_facts(moe_config(**more), "bfloat16"), "cpu")
        for more in ({}, changes)
    )
    assert ours.digest != theirs.digest
    assert len(differences(ours, theirs)) == 1


def test_moe_violations_come_together() -> None:
    config = moe_config(shared_expert_intermediate_size=64, num_experts_per_tok=9)
    with pytest.raises(ConfigurationError, match="top_k must be between 1") as caught:
        model_facts(config, "bfloat16")
    assert len(caught.value.violations) == 2


def test_digest_is_stable_and_survives_a_round_trip() -> None:
    contract = cpu_contract()
    assert contract.digest == cpu_contract().digest
    assert contract_from_dict(json.loads(json.dumps(contract.to_dict()))).digest == contract.digest
    assert pickle.loads(pickle.dumps(contract)).digest == contract.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"num_key_value_heads": 9},
        {"tie_word_embeddings": False},
    ],
)
def test_digest_sees_a_changed_model_fact(changes: dict[str, object]) -> None:
    ours, theirs = cpu_contract(), cpu_contract(**changes)
    assert ours.digest != theirs.digest
    assert len(differences(ours, theirs)) == 1
    with pytest.raises(ContractMismatchError, match=r"model\."):
        check_same(ours, theirs, ours_is="the trainer", theirs_is="the engine")


def test_digest_sees_another_implementation() -> None:
    ours = cpu_contract()
    program = dataclasses.replace(ours.programs["linear"], implementation="other")
    theirs = dataclasses.replace(ours, programs={**ours.programs, "linear": program})
    with pytest.raises(ContractMismatchError, match=r"programs\.linear\.implementation"):
        check_same(ours, theirs, ours_is="the trainer", theirs_is="the engine")


def test_unknown_op_and_device_are_refused_by_name() -> None:
    contract = cpu_contract()
    with pytest.raises(UnsupportedError, match="op 'mamba' is not supported; supported: attention"):
        contract.implementation("mamba")
    facts = model_facts(llama_config(), "bfloat16")
    with pytest.raises(UnsupportedError, match="device 'tpu' is not supported; supported: cpu"):
        resolve_contract(facts, "tpu")


def test_all_violations_come_in_one_error() -> None:
    config = llama_config(head_dim=48, hidden_act="gelu", mlp_bias=True, attention_bias=True)
    with pytest.raises(ConfigurationError) as caught:
        model_facts(config, "float16")
    text = str(caught.value)
    for part in ("float16", "head_dim 48", "'gelu'", "mlp_bias", "attention_bias"):
        assert part in text
    assert len(caught.value.violations) == 5


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="supported: LlamaForCausalLM, Qwen2ForCausalLM"):
        model_facts(llama_config(architectures=["GPT2LMHeadModel"]), "bfloat16")


def qwen_config(**changes: object) -> SimpleNamespace:
    return llama_config(architectures=["Qwen2ForCausalLM"], **changes)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (llama_config(bias=True), "bias=True is read by vLLM and not by Hugging Face"),
        (llama_config(qkv_bias=True), "qkv_bias=True is read by vLLM"),
        (llama_config(logit_scale=0.5), "logit_scale=0.5 is read by vLLM"),
        (llama_config(sliding_window=64), "sliding_window=64 is read by vLLM"),
        (
            llama_config(layer_types=["sliding_attention"] * 2),
            r"layer_types=\['sliding_attention'\] is read by vLLM",
        ),
        (llama_config(is_causal=False), "is_causal=False is not supported: attention is causal"),
        (
            llama_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor=0.5 rotates a part of each head in vLLM",
        ),
        (qwen_config(qk_norm=True), "qk_norm=True is read by vLLM"),
        (qwen_config(dual_chunk_attention_config={"chunk_size": 8}), "dual_chunk_attention_config"),
        (qwen_config(head_dim=96), "head_dim=96 is not read by vLLM's Qwen2.* = 64; use that"),
        (
            qwen_config(
                use_sliding_window=True, sliding_window=64, layer_types=["full_attention"] * 2
            ),
            "sliding_window=64 applies to every layer in vLLM and to none in Hugging Face",
        ),
    ],
)
def test_what_vllm_and_hugging_face_read_differently_is_refused(
    config: SimpleNamespace, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        model_facts(config, "bfloat16")
    assert len(caught.value.violations) == 1


def test_windows_that_both_read_alike_are_accepted() -> None:
    off = qwen_config(
        use_sliding_window=False, sliding_window=64, layer_types=["full_attention"] * 2
    )
    assert model_facts(off, "bfloat16").sliding_window is None
    on = qwen_config(
        use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2
    )
    assert model_facts(on, "bfloat16").sliding_window == 64


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        ({"rope_type": "linear", "factor": 0.0}, "factor must be finite and above 0, got 0.0"),
        ({"rope_type": "linear", "factor": -2.0}, "factor must be finite and above 0, got -2.0"),
        ({"rope_theta": 0.0}, "theta must be finite and above 0, got 0.0"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            r"high_freq_factor must be above low_freq_factor \(4.0\), got 4.0",
        ),
    ],
)
def test_rope_numbers_without_a_table_are_refused(rope: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        model_facts(llama_config(rope_parameters={"rope_theta": 1e4} | rope), "bfloat16")
