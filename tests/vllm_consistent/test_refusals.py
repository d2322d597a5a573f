"""Every refusal comes from the front end, by name, and all of them in one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consistent_kernels.errors import ConfigurationError
from vllm_consistent import contracts, env, plugin
from vllm_consistent.refusals import EXTENSION, WORKERS

COMMON = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 256}


@pytest.fixture
def configure(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that builds a VllmConfig as the front end does."""
    monkeypatch.setenv(env.SWITCH, "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plugin.register()
    from vllm.engine.arg_utils import EngineArgs

    def build(model: Path | None = None, **arguments: Any) -> Any:
        folder = model or checkpoints("llama")
        return EngineArgs(model=str(folder), **{**COMMON, **arguments}).create_engine_config()

    return build


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    config = json.loads((source / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_good_configuration_carries_contract_worker_and_eager(configure: Any) -> None:
    config = configure()
    contract = contracts.attached(config)
    assert config.additional_config[contracts.KEY]["digest"] == contract.digest
    assert config.parallel_config.worker_cls == WORKERS["cpu"]
    assert config.parallel_config.worker_extension_cls == EXTENSION
    assert config.model_config.enforce_eager
    assert contract.model["architecture"] == "LlamaForCausalLM"


def test_compile_cache_key_sees_the_digest(configure: Any) -> None:
    config = configure()
    before = config.compute_hash()
    config.additional_config[contracts.KEY] = {"digest": "0" * 64, "contract": "{}"}
    other = config.compute_hash()
    config.additional_config = {}
    assert len({before, other, config.compute_hash()}) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
        ({"enable_lora": True}, "LoRA is not supported"),
        ({"moe_backend": "triton"}, "moe_backend='triton' is not supported"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts is not supported"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding is not supported",
        ),
        ({"disable_cascade_attn": False}, "cascade attention is not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not supported"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits' is not supported"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is not supported"),
        ({"dtype": "float32"}, "dtype float32 is not supported"),
        ({"dtype": "float16"}, "dtype float16 is not supported"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker_cls=.* is not supported"),
        ({"worker_extension_cls": "builtins.object"}, "must derive from vllm_consistent"),
        ({"attention_backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN is not supported"),
        ({"block_size": 20}, "block_size=20 must be a multiple of 8"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size is not supported"),
        ({"cpu_offload_gb": 1}, "weight offloading is not supported"),
        (
            {"data_parallel_size": 2},
            "data_parallel_size=2 is supported with enable_expert_parallel and a mixture",
        ),
        ({"quantization": "fp8"}, "quantization='fp8.*' is not supported; serve bfloat16 weights"),
    ],
)
def test_rejects(configure: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        configure(**arguments)
    assert len(caught.value.violations) == 1, caught.value


def test_data_parallel_needs_experts_on_consecutive_ranks(
    configure: Any, checkpoints: Callable[[str], Path]
) -> None:
    experts = checkpoints("qwen3_moe")
    parallel = {"data_parallel_size": 2, "enable_expert_parallel": True}
    assert contracts.attached(configure(experts, **parallel)) == contracts.attached(
        configure(experts)
    ), "ranks are no part of a contract"
    with pytest.raises(ConfigurationError, match="data_parallel_size=2 is supported with enable_"):
        configure(experts, data_parallel_size=2)
    with pytest.raises(ConfigurationError, match="use 'linear'"):
        configure(experts, expert_placement_strategy="round_robin", **parallel)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("VLLM_BATCH_INVARIANT", "1", "VLLM_BATCH_INVARIANT=1 replaces PyTorch operators"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "VLLM_USE_V2_MODEL_RUNNER=1 is not supported on CPU"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "1", "VLLM_USE_FLASHINFER_SAMPLER=1 is not supported"),
    ],
)
def test_rejects_an_environment(
    configure: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=text):
        configure()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is unknown; supported: LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"]}, "is unknown; supported: LlamaForCausalLM"),
        ({"head_dim": 32}, "head_dim 32 is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type.*dynamic|dynamic.*not supported",
        ),
    ],
)
def test_rejects_a_model(
    configure: Any,
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    changes: dict[str, Any],
    text: str,
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        configure(edited(checkpoints("llama"), tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"modules_to_not_convert": ["lm_head"]}, r"lacks model\.layers\.0\.mlp\.gate"),
        (
            {"modules_to_not_convert": ["model.layers.0.mlp.gate", "model.layers.2.mlp.gate",
                                        "model.layers.1.self_attn.o_proj"]},
            r"names model\.layers\.1\.self_attn\.o_proj",
        ),
    ],
)  # fmt: skip
def test_rejects_a_quantized_model(
    configure: Any,
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    changes: dict[str, Any],
    text: str,
) -> None:
    source = checkpoints("qwen3_moe_fp8")
    assert contracts.attached(configure(source)).name == "moe_block_fp8_v1"
    given = json.loads((source / "config.json").read_text())["quantization_config"]
    folder = edited(source, tmp_path, quantization_config=given | changes)
    with pytest.raises(ConfigurationError, match=text) as caught:
        configure(folder)
    assert len(caught.value.violations) == 1, caught.value


def test_all_violations_come_in_one_error(configure: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        configure(
            tensor_parallel_size=2,
            dtype="float16",
            enable_lora=True,
            logprobs_mode="raw_logits",
            block_size=20,
        )
    assert len(caught.value.violations) == 5
    assert "refused for 5 reason(s)" in str(caught.value)


def test_rejects_positions_beyond_the_rotary_table(
    configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    # An engine started before has had vLLM keep every variable it read.
    monkeypatch.setattr(envs, "VLLM_ALLOW_LONG_MAX_MODEL_LEN", True, raising=False)
    with pytest.raises(ConfigurationError, match=r"=4096 lies beyond the model.s 2048 positions"):
        configure(max_model_len=4096)
    configure(max_model_len=2048)


def test_a_vllm_error_stays_a_vllm_error(configure: Any) -> None:
    with pytest.raises(ValueError, match="max_model_len") as caught:
        configure(max_model_len=1 << 20)
    assert not isinstance(caught.value, ConfigurationError)


def test_layers_refuse_to_be_built_without_a_contract() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    with (
        set_current_vllm_config(VllmConfig()),
        pytest.raises(ConfigurationError, match="rms_norm is built without a contract"),
    ):
        contracts.current_contract("rms_norm")
