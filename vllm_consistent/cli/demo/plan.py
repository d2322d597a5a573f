"""What every step will ask: problems, prompts, seeds, and the engine that fits them all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from consistent_kernels.errors import invalid
from consistent_kernels.model_facts import model_facts
from vllm_consistent.cli.demo.data import Problem, ProblemSource, render
from vllm_consistent.cli.demo.model_source import ModelSource
from vllm_consistent.cli.demo.options import DemoOptions
from vllm_consistent.cli.demo.rollout import SamplingPlan, engine_arguments, request_seed
from vllm_consistent.cli.demo.stock import StepPrompts

STOCK_SAMPLES = 2
STOCK_TOKENS = 8
TIMED_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is known before anything is sampled.

    Attributes:
        problems: by step.
        prompts: by step, as token ids with their seeds.
        engine: vLLM engine arguments, the same for both pairs.
        work: what both engines roll out to be timed: the first step, responses of fixed length.
        tokenizer: the model's.
    """

    options: DemoOptions
    source: ModelSource
    problems: list[list[Problem]]
    prompts: list[StepPrompts]
    engine: dict[str, Any]
    work: dict[str, Any]
    tokenizer: Any

    def sampling(self, step: int) -> SamplingPlan:
        """Return how step `step` is sampled."""
        options = self.options
        seeds = tuple(self.prompts[step].seeds)
        return SamplingPlan(options.samples, options.max_tokens, options.temperature, seeds)


def _loaded(kind: Any, path: Path) -> Any:
    try:
        return kind.from_pretrained(path)
    except Exception as error:
        # Whatever transformers raises of a damaged file, the file is what must be mended.
        raise invalid(
            "demo", "--model", f"a folder that {kind.__name__} reads", f"{path}: {error}"
        ) from error


def make_plan(options: DemoOptions, source: ModelSource, problems: ProblemSource) -> Plan:
    """Draw and tokenize the problems of all steps.

    Raises:
        ConfigurationError: no contract covers the model.
        InvalidInputError: a prompt plus its response does not fit the model, or transformers
            cannot read its configuration or tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer

    model_facts(_loaded(AutoConfig, source.path), "bfloat16")
    tokenizer = _loaded(AutoTokenizer, source.path)
    config = json.loads((source.path / "config.json").read_text())
    drawn = [problems.problems(step, options.prompts) for step in range(options.steps)]
    prompts = [
        StepPrompts(
            step,
            [render(tokenizer, problem.messages) for problem in asked],
            [request_seed(options.seed, step, index) for index in range(options.prompts)],
        )
        for step, asked in enumerate(drawn)
    ]
    engine = engine_arguments(
        [step.prompt_ids for step in prompts],
        samples=options.samples,
        max_tokens=options.max_tokens,
        config=config,
    )
    work = {
        "prompt_ids": prompts[0].prompt_ids,
        "seeds": prompts[0].seeds,
        "samples": options.samples,
        "max_tokens": min(TIMED_TOKENS, options.max_tokens),
        "temperature": options.temperature,
    }
    return Plan(options, source, drawn, prompts, engine, work, tokenizer)
