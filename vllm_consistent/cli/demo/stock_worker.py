"""The stock pair, in a process of its own: vLLM with the plugin off, and a plain HF forward.

Run as `python -m vllm_consistent.cli.demo.stock_worker REQUEST.json RESPONSE.json`. It answers on
stdout in lines of JSON: {} once RESPONSE is written, then tokens/s for each line on stdin. All else
that it or vLLM prints goes to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_consistent import env
from vllm_consistent.cli.demo.output import private_copy
from vllm_consistent.cli.demo.rollout import (
    Rollout,
    SamplingPlan,
    response_positions,
    sample,
    to_batch,
)
from vllm_consistent.cli.demo.speed import time_rollout, warm_up


def main(request_path: Path, response_path: Path) -> None:
    """Sample and score as REQUEST says, write RESPONSE, then time rollouts until stdin ends."""
    answers = private_copy(sys.stdout)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    env.set_enabled(False)
    env.keep_engine_in_process()
    request = json.loads(request_path.read_text())
    llm, start_seconds = _start(request)
    plans = [
        SamplingPlan(
            request["samples"], request["max_tokens"], request["temperature"], tuple(step["seeds"])
        )
        for step in request["steps"]
    ]
    rollouts = [
        sample(llm, step["prompt_ids"], plan)
        for step, plan in zip(request["steps"], plans, strict=True)
    ]
    steps = _scored(request, rollouts) if rollouts else []
    warm_up(llm, request["work"])
    partial = response_path.with_suffix(".partial")
    partial.write_text(json.dumps({"steps": steps, "start_seconds": start_seconds}))
    os.replace(partial, response_path)
    answers.write("{}\n")
    for _ in sys.stdin:
        answers.write(json.dumps(dataclasses.asdict(time_rollout(llm, request["work"]))) + "\n")


def _scored(request: dict[str, Any], rollouts: list[Rollout]) -> list[dict[str, Any]]:
    model = _hf_model(request)
    return [
        {
            "step": step["step"],
            "num_tokens": rollout.num_tokens,
            "seconds": rollout.seconds,
            "responses": _responses(rollout, _score(model, rollout, request["temperature"])),
        }
        for step, rollout in zip(request["steps"], rollouts, strict=True)
    ]


def _start(request: dict[str, Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    from vllm import LLM

    llm = LLM(model=request["model"], **request["engine"])
    return llm, time.perf_counter() - begin


def _hf_model(request: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()


def _score(model: Any, rollout: Rollout, temperature: float) -> Tensor:
    """Return the HF log-prob of every sampled token, [B, R] fp32; arbitrary where padded."""
    batch = to_batch(rollout)
    rows, positions = response_positions(batch)
    with torch.inference_mode():
        logits = model(
            input_ids=batch.input_ids.to(model.device),
            attention_mask=batch.attention_mask.to(model.device),
        ).logits.cpu()
    selected = logits[rows, positions - 1].float() / temperature
    ids = batch.input_ids[rows, positions]
    return selected.log_softmax(dim=-1).gather(-1, ids[..., None])[..., 0]


def _responses(rollout: Rollout, log_probs: Tensor) -> list[dict[str, Any]]:
    return [
        {
            "prompt_index": response.prompt_index,
            "token_ids": list(response.token_ids),
            "rollout_log_probs": list(response.logprobs),
            "train_log_probs": log_probs[row, : len(response.token_ids)].tolist(),
        }
        for row, response in enumerate(rollout.responses)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
