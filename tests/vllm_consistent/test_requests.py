"""Requests that cannot be mirrored, or that vLLM itself refuses, fail clearly and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from consistent_kernels.errors import ConfigurationError, InvalidInputError

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(engines: Callable[..., Any]) -> Any:
    return engines("llama")


def params(**changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 3, "logprobs": 0, "detokenize": False, **changes})


def works(engine: Any) -> bool:
    return len(engine.generate_with_logprobs([[5, 6, 7]], params())) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_p": 0.9}, r"top_p=0\.9 is not mirrored by the trainer; leave it at 1\.0"),
        ({"top_k": 3, "min_p": 0.2}, "refused for 2 reason"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"logit_bias": {3: 1.0}}, "logit_bias="),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids="),
    ],
)
def test_rejects_sampling_parameters(engine: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        engine.generate_with_logprobs([[5, 6, 7]], params(**changes))
    assert works(engine)


def test_rejects_an_empty_list_of_prompts(engine: Any) -> None:
    with pytest.raises(InvalidInputError, match="prompts must be at least one, got an empty list"):
        engine.generate_with_logprobs([], params())
    with pytest.raises(InvalidInputError, match="sequences must be at least one"):
        engine.score([])


def test_rejects_an_empty_prompt(engine: Any) -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        engine.generate_with_logprobs([[]], params())
    assert works(engine)


@pytest.mark.parametrize("token", [-1, 1280])
def test_rejects_an_id_outside_the_vocabulary(engine: Any, token: int) -> None:
    with pytest.raises(InvalidInputError, match=f"sequence 1 must be below 1280, got {token}"):
        engine.generate_with_logprobs([[5], [5, token]], params())
    with pytest.raises(InvalidInputError, match=f"sequence 0 must be below 1280, got {token}"):
        engine.score([[5, token]])
    assert works(engine)


def test_rejects_scoring_at_a_temperature_that_vllm_raises(engine: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"or 0\.01 to 2\.0, got 0\.005"):
        engine.score([[5, 6, 7]], temperature=0.005)


def test_a_request_of_which_every_token_is_masked_leaves_the_engine_alive(engine: Any) -> None:
    every = params(min_tokens=3, stop_token_ids=list(range(1280)))
    assert len(engine.generate_with_logprobs([[5, 6, 7]], every)) == 1
    assert works(engine)


def test_rejects_a_prompt_longer_than_the_model(engine: Any) -> None:
    with pytest.raises(ValueError, match="maximum context length is 512 tokens"):
        engine.generate_with_logprobs([[5] * 600], params())
    assert works(engine)


def test_a_response_stops_at_max_model_len(engine: Any) -> None:
    sample = engine.generate_with_logprobs([[5] * 505], params(max_tokens=50, ignore_eos=True))[0]
    assert len(sample.prompt_ids) + len(sample.token_ids) <= 512
    assert sample.finish_reason == "length"
    assert len(sample.logprobs) == len(sample.token_ids)


def test_rejects_parameters_without_logprobs(engine: Any) -> None:
    with pytest.raises(InvalidInputError, match="logprobs must be at least 0, got None"):
        engine.generate_with_logprobs([[5]], params(logprobs=None))
