"""Engine = trainer on a real model with its own tokenizer: SmolLM2-135M-Instruct, few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import padded, rescored, sampled_scores, train_step, trainer_scores
from transformers import AutoModelForCausalLM, AutoTokenizer

from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, compare_logprobs, push_weights
from vllm_consistent.cli.demo.model_source import resolve_model
from vllm_consistent.cli.demo.options import BUNDLED_MODEL

pytestmark = pytest.mark.engine

QUESTIONS = (
    "What is 3 + 4?",
    "The capital of France is",
    "List three colours.",
    "Write one sentence about the sea and one about the mountains, then stop.",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(BUNDLED_MODEL, tmp_path_factory.mktemp("models"), lambda _: None).path


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Any]:
    from vllm_consistent.integrations.engine import ConsistentEngine

    engine = ConsistentEngine(str(checkpoint), dtype="bfloat16", max_model_len=256)
    yield engine
    engine.close()


def sample(engine: Any, checkpoint: Path, seed: int, temperature: float) -> list[Any]:
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    params = SamplingParams(
        n=2, max_tokens=8, seed=seed, temperature=temperature, ignore_eos=True, logprobs=0
    )
    return engine.generate_with_logprobs(prompts, params)


def test_smollm2_train_equals_infer_and_stock_does_not(engine: Any, checkpoint: Path) -> None:
    model = bridge_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    push_weights(model, engine.llm)
    for update, temperature in enumerate((1.0, 0.7)):
        samples = sample(engine, checkpoint, 7 + update, temperature)
        sampled = sampled_scores(samples)
        train = trainer_scores(model, samples, temperature=temperature).detach()
        assert_bitwise_equal(train, sampled, f"after {update} updates")
        assert_bitwise_equal(rescored(engine, samples, temperature), sampled, "re-scored")
        train_step(model, optimizer, samples)
        push_weights(model, engine.llm)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    push_weights(bridge_model(AutoModelForCausalLM.from_pretrained(checkpoint)), engine.llm)
    samples = sample(engine, checkpoint, 9, 1.0)
    ids, attention, response = padded(samples, "cpu")
    with torch.no_grad():
        logprobs = torch.log_softmax(stock(ids, attention_mask=attention).logits.float(), -1)
    chosen = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][response[:, 1:].bool()]
    report = compare_logprobs(sampled_scores(samples), chosen, torch.ones_like(chosen))
    assert report.mismatched_tokens > 0.9 * report.num_tokens
