"""Routings as configurations of published models give them, and what is refused."""

from __future__ import annotations

import dataclasses
import types

import pytest
from router_cases import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V4, QWEN3
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV4Config, Qwen3MoeConfig

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.router import RouterParameters

V2 = {
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 16.0,
}


def test_published_configurations_are_read() -> None:
    read = RouterParameters.from_hf_config
    assert read(Qwen3MoeConfig(norm_topk_prob=True)) == QWEN3
    assert read(Qwen3MoeConfig()) == dataclasses.replace(QWEN3, renormalize=False)
    assert read(DeepseekV3Config(scoring_func="sigmoid", topk_method="noaux_tc")) == DEEPSEEK_V3
    assert read(DeepseekV4Config()) == DEEPSEEK_V4
    assert read(DeepseekV2Config(**V2)) == DEEPSEEK_V2
    bare = DeepseekV4Config().to_dict()
    del bare["scoring_func"], bare["norm_topk_prob"]
    assert read(types.SimpleNamespace(**bare)) == DEEPSEEK_V4
    lite = V2 | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
    assert read(DeepseekV2Config(**lite)).num_groups == 1
    # transformers has no class of V3.2; its configuration has V3's names.
    fields = DeepseekV3Config(scoring_func="sigmoid").to_dict() | {"model_type": "deepseek_v32"}
    assert read(types.SimpleNamespace(**fields)) == DEEPSEEK_V3


def test_what_vllm_and_transformers_read_in_two_senses_is_refused() -> None:
    # vLLM would score with softmax, transformers with sigmoid.
    for config in (DeepseekV3Config(), DeepseekV3Config(scoring_func="softmax")):
        with pytest.raises(UnsupportedError, match=r"scoring_func=.*'sigmoid' in its c"):
            RouterParameters.from_hf_config(config)
    for change, text in (
        ({"topk_method": "greedy"}, "topk_method='greedy' with n_group=8 is not supported; supp"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True of a deepseek_v2 model is not supported"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            RouterParameters.from_hf_config(DeepseekV2Config(**(V2 | change)))
    with pytest.raises(
        UnsupportedError, match="norm_topk_prob=False of a deepseek_v4 model is not"
    ):
        RouterParameters.from_hf_config(DeepseekV4Config(norm_topk_prob=False))
    with pytest.raises(InvalidInputError, match="top_k must be between 1 and num_experts=0, got 8"):
        RouterParameters.from_hf_config(Qwen3MoeConfig(num_experts=0))
