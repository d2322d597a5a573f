"""The allow-list, over every field that SamplingParams has."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from consistent_kernels.errors import ConfigurationError
from vllm_consistent.sampling import ALLOWED, check_sampling_params, refused_fields

ACCEPTED: dict[str, Any] = {
    "n": 4,
    "temperature": 0.7,
    "seed": 3,
    "stop": ["."],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 77,
    "min_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "flat_logprobs": True,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "skip_clone": True,
    "skip_reading_prefix_cache": True,
}
DERIVED = {"output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids"}
REFUSED: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "logprob_token_ids": [3],
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [1, 2],
    "extra_args": {"a": 1},
    "routed_experts_prompt_start": 1,
    "bad_words": ["no"],
    "_bad_words_token_ids": [[1]],
    "thinking_token_budget": 5,
    "repetition_detection": RepetitionDetectionParams(4, 1, 2),
}
FIELDS = SamplingParams.__struct_fields__


def test_every_field_is_classified() -> None:
    assert set(FIELDS) == ACCEPTED.keys() | DERIVED | REFUSED.keys()
    assert set(ALLOWED) == ACCEPTED.keys() | DERIVED


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_accepts(name: str) -> None:
    check_sampling_params(SamplingParams(**{name: ACCEPTED[name]}))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_rejects_by_name(name: str) -> None:
    params = SamplingParams()
    setattr(params, name, REFUSED[name])
    with pytest.raises(ConfigurationError, match=f"{name}=.* is not mirrored by the trainer"):
        check_sampling_params(params)


def test_all_refusals_come_in_one_error() -> None:
    params = SamplingParams(top_p=0.9, top_k=4, bad_words=["no"])
    with pytest.raises(ConfigurationError) as caught:
        check_sampling_params(params)
    assert len(caught.value.violations) == 3


@pytest.mark.parametrize("neutral", [{}, {"top_k": -1}, {"top_k": 0}, {"temperature": 0.0}])
def test_neutral_values_pass(neutral: dict[str, Any]) -> None:
    assert refused_fields(SamplingParams(**neutral)) == []
