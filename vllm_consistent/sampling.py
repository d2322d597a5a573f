"""Which sampling parameters a request may use: an allow-list, because the trainer mirrors few.

A field that is not listed must keep vLLM's default. So a field that a later vLLM adds is refused
until somebody has decided what it does to log-probs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from consistent_kernels.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

ALLOWED = {
    "n": "how many samples",
    "temperature": "divides the logits on both sides; 0 is greedy and scores at 1",
    "seed": "the draw only",
    "stop": "ends a response",
    "stop_token_ids": "ends a response",
    "ignore_eos": "ends a response",
    "max_tokens": "ends a response",
    "min_tokens": "restricts the draw; log-probs stay those of the unrestricted distribution",
    "logprobs": "what is reported",
    "prompt_logprobs": "what is reported, at the request's temperature",
    "flat_logprobs": "how it is reported",
    "detokenize": "text only",
    "skip_special_tokens": "text only",
    "spaces_between_special_tokens": "text only",
    "include_stop_str_in_output": "text only",
    "output_kind": "how it is reported",
    "skip_clone": "no numerics",
    "skip_reading_prefix_cache": "hit and miss give the same bits",
    "output_text_buffer_length": "derived by vLLM",
    "_eos_token_id": "derived by vLLM",
    "_all_stop_token_ids": "derived by vLLM",
}
"""Field name to what it does; every other field of SamplingParams must keep its default."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Spellings of "off" that vLLM accepts beside the default.
    "top_k": (0, -1),
    "bad_words": ([], None),
    "extra_args": ({}, None),
}


def refused_fields(params: SamplingParams) -> list[str]:
    """Return one line for each field off the allow-list that is not at its default."""
    default = type(params)()
    lines = []
    for name in params.__struct_fields__:
        if name in ALLOWED:
            continue
        value = getattr(params, name)
        neutral = _NEUTRAL.get(name, (getattr(default, name),))
        if value not in neutral:
            lines.append(
                f"{name}={value!r} is not mirrored by the trainer; leave it at {neutral[0]!r}"
            )
    return lines


def check_sampling_params(params: SamplingParams) -> None:
    """Raise ConfigurationError naming every refused field of `params`."""
    lines = refused_fields(params)
    if lines:
        raise ConfigurationError(lines, "SamplingParams")
