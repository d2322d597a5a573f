"""Rope types, head dims and windows that the contract names start, and score as they sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from consistent_kernels.testing import assert_bitwise_equal

pytestmark = pytest.mark.engine

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama3": ({"rope_parameters": LLAMA3, "head_dim": 64}, "ConsistentLlama3RotaryEmbedding"),
    "yarn": ({"rope_parameters": YARN, "head_dim": 64}, "ConsistentYaRNScalingRotaryEmbedding"),
    "linear": (
        {"rope_parameters": LINEAR, "head_dim": 64},
        "ConsistentLinearScalingRotaryEmbedding",
    ),
    # 80 and 96 cut the fused q, k, v inside a block of columns: they are multiplied apart.
    "head_dim 80": ({"head_dim": 80}, "ConsistentRotaryEmbedding"),
    "head_dim 96": ({"head_dim": 96}, "ConsistentRotaryEmbedding"),
    "head_dim 256": ({"head_dim": 256}, "ConsistentRotaryEmbedding"),
}


def build(folder: Path, model: Any) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def check(engine: Any) -> None:
    from vllm import SamplingParams

    prompts = [list(range(9, 9 + n)) for n in (3, 17, 70)]
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, logprobs=0, seed=5, temperature=0.8, detokenize=False
    )
    samples = engine.generate_with_logprobs(prompts, params)
    scores = engine.score([[*s.prompt_ids, *s.token_ids] for s in samples], temperature=0.8)
    for s, score in zip(samples, scores, strict=True):
        assert_bitwise_equal(s.logprobs, score[len(s.prompt_ids) - 1 :])


@pytest.mark.parametrize("case", CASES)
def test_sampled_equals_rescored(
    case: str, start_engine: Callable[..., Any], tmp_path: Path
) -> None:
    changes, rotary = CASES[case]
    torch.manual_seed(3)
    folder = build(tmp_path, LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})))
    engine = start_engine("llama", model_folder=folder, max_model_len=256)
    assert rotary in engine.consistency_report()["layers"]
    check(engine)


def test_sliding_window(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = Qwen2Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 2,
    )
    folder = build(tmp_path, Qwen2ForCausalLM(config))
    engine = start_engine("qwen2", model_folder=folder, max_model_len=256)
    assert engine.contract.model["sliding_window"] == 24
    check(engine)
