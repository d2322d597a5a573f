"""A rollout that stops after some engine steps, so that another engine can take its turn."""

from __future__ import annotations

import os
import time
from typing import Any

import torch


class Stepping:
    """One rollout of `vllm.LLM.generate`, taken step by step.

    Args:
        llm: a `vllm.LLM` whose engine core is in this process.
        prompts: token ids.
        params: sampling parameters of all requests.
    """

    def __init__(self, llm: Any, prompts: list[list[int]], params: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        # As LLM.generate asks for them (vllm/entrypoints/offline_utils.py).
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self.core = llm.llm_engine
        self.params = params
        self.waiting = {f"turn-{index}": ids for index, ids in enumerate(prompts)}
        self.names = list(self.waiting)
        self.outputs: dict[str, Any] = {}
        self.cores = sorted(os.sched_getaffinity(0))

    def advance(self, steps: int, core: int) -> dict[str, Any]:
        """Take up to `steps` steps and wait until the device is idle; the first call adds requests.

        Args:
            steps: engine steps.
            core: which core this thread runs on meanwhile, counted modulo those that it may use:
                engines of one turn share it.

        Returns:
            Seconds, tokens so far, how many requests have one, whether requests are unfinished.
        """
        os.sched_setaffinity(0, {self.cores[core % len(self.cores)]})
        try:
            begin = time.perf_counter()
            for name, ids in self.waiting.items():
                self.core.add_request(name, {"prompt_token_ids": ids}, self.params)
            self.waiting = {}
            for _ in range(steps):
                if not self.core.has_unfinished_requests():
                    break
                for output in self.core.step():
                    self.outputs[output.request_id] = output
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        finally:
            os.sched_setaffinity(0, self.cores)
        counts = [len(output.outputs[0].token_ids) for output in self.outputs.values()]
        running = self.core.output_processor.request_states.values()
        counts += [state.stats.num_generation_tokens for state in running]
        return {
            "seconds": seconds,
            "tokens": sum(counts),
            "started": sum(count > 0 for count in counts),
            "unfinished": self.core.has_unfinished_requests(),
        }

    def finish(self) -> list[Any]:
        """Return the outputs, by prompt."""
        return [self.outputs[name] for name in self.names]
