"""The process of one engine: starts it, times rollouts, scores tokens again, profiles a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.env import variables
from benchmarks.rollout.process import serve
from benchmarks.rollout.samples import Sample
from benchmarks.rollout.stepping import Stepping
from benchmarks.rollout.works import FIRST_TOKEN, PROFILE_TOKENS
from vllm_consistent.integrations.engine import verify_reports

_TOP_KERNELS = 40
_OF_THE_BENCHMARK = {
    "VLLM_CACHE_ROOT",
    "VLLM_CONSISTENT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NO_USAGE_STATS",
}
"""Set for every engine, by this benchmark."""
_STEPS_IN_FLIGHT = 8
"""Asynchronous scheduling may still hold a step of requests that are finished."""


class Engine:
    """Answers `Process.call`; one engine in this process."""

    def prepare(self) -> None:
        """Import vLLM, which takes long and needs no checkpoint."""
        from vllm import LLM  # noqa: F401

    def start(self, model: str, arguments: dict[str, Any], consistent: bool) -> dict[str, Any]:
        """Start the engine.

        Returns:
            Seconds, contract (None for stock), what runs the model, and the further VLLM_ variables
            that this process was given.
        """
        environment = {
            name: value
            for name, value in sorted(variables().items())
            if name.startswith("VLLM_") and name not in _OF_THE_BENCHMARK
        }
        begin = time.perf_counter()
        from vllm import LLM

        self.llm = LLM(model=model, **arguments)
        seconds = time.perf_counter() - begin
        report = contract = None
        if consistent:
            reports = self.llm.collective_rpc("consistency_report")
            contract, report = verify_reports(reports).to_dict(), reports[0]
        return {
            "seconds": seconds,
            "contract": contract,
            "report": report,
            "environment": environment,
        }

    def rollout(
        self, prompts: list[list[int]], tokens: int, measure: str, cached: bool
    ) -> dict[str, Any]:
        """Sample and time; return the value in the measure's unit, seconds and the samples."""
        self._make_ready(cached)
        begin = time.perf_counter()
        if measure == FIRST_TOKEN:
            outputs, latencies = [], []
            for prompt in prompts:
                start = time.perf_counter()
                outputs += self._generate([prompt], tokens)
                latencies.append((time.perf_counter() - start) * 1e3)
            value = statistics.median(latencies)
        else:
            outputs = self._generate(prompts, tokens)
            value = len(prompts) * tokens / (time.perf_counter() - begin)
        seconds = time.perf_counter() - begin
        return {"value": value, "seconds": seconds, "samples": [_sample(o) for o in outputs]}

    def begin(self, prompts: list[list[int]], tokens: int, cached: bool) -> None:
        """Begin a rollout that `advance` takes on, a slice of steps at a time."""
        self._make_ready(cached)
        self.stepping = Stepping(self.llm, prompts, self._params(tokens))

    def advance(self, steps: int, core: int) -> dict[str, Any]:
        """See `Stepping.advance`."""
        return self.stepping.advance(steps, core)

    def finish(self) -> list[Sample]:
        """Return the samples of the rollout that `advance` has brought to its end."""
        return [_sample(output) for output in self.stepping.finish()]

    def _make_ready(self, cached: bool) -> None:
        if not cached:
            self._forget_pages()
        gc.collect()

    def _forget_pages(self) -> None:
        for _ in range(_STEPS_IN_FLIGHT):
            if self.llm.reset_prefix_cache():
                return
            self.llm.llm_engine.step()
        raise RuntimeError("the prefix cache could not be reset: requests are running")

    def _generate(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(requests, self._params(tokens), use_tqdm=False)

    def _params(self, tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
        )

    def score(self, samples: list[Sample]) -> list[np.ndarray]:
        """Score the sampled tokens again, as prompts: [len(token_ids)] fp32 for each sample."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        requests = [{"prompt_token_ids": sample.sequence} for sample in samples]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            _prompt_logprobs(output)[len(sample.prompt_ids) - 1 :]
            for sample, output in zip(samples, outputs, strict=True)
        ]

    def profile(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Return where the time of a decode step goes, over `steps` steps of all prompts.

        Wall time is taken over as many steps without the profiler; kernels by device time (on a
        CPU: operators by CPU time).
        """
        core = self.llm.llm_engine
        params = self._params(PROFILE_TOKENS)
        names = [f"profile-{index}" for index in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            core.add_request(name, {"prompt_token_ids": ids}, params)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {output.request_id for output in core.step() if output.outputs[0].token_ids}
        found = _profiled(lambda _: core.step(), steps)
        while core.has_unfinished_requests():
            core.step()
        return {"requests": len(prompts)} | found

    def profile_prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return where the time to a first token goes; a step is one prompt, each read anew."""

        def read(index: int) -> None:
            self._forget_pages()
            self._generate([prompts[index]], 1)

        read(0)
        return {"requests": 1} | _profiled(read, len(prompts))


def _profiled(step: Callable[[int], Any], steps: int) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_cuda else _nothing
    wait()
    begin = time.perf_counter()
    for index in range(steps):
        step(index)
    wait()
    wall = (time.perf_counter() - begin) / steps
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as record:
        for index in range(steps):
            step(index)
        wait()
    kernels = _kernels(record, steps, on_cuda)
    return {
        "steps": steps,
        "wall_us_per_step": wall * 1e6,
        "kernel_us_per_step": sum(kernel["us_per_step"] for kernel in kernels),
        "kernels": kernels[:_TOP_KERNELS],
    }


def _prompt_logprobs(output: Any) -> np.ndarray:
    ids, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    values = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
    return np.array(values, np.float32)


def _nothing() -> None:
    return None


def _kernels(record: Any, steps: int, on_cuda: bool) -> list[dict[str, Any]]:
    field = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    rows = [
        {
            "name": event.key,
            "us_per_step": getattr(event, field) / steps,
            "calls_per_step": event.count / steps,
        }
        for event in record.key_averages()
    ]
    return sorted(
        (row for row in rows if row["us_per_step"] > 0), key=lambda row: -row["us_per_step"]
    )


def _sample(output: Any) -> Sample:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    values = [entry[token].logprob for token, entry in zip(ids, completion.logprobs, strict=True)]
    return Sample(list(output.prompt_token_ids), ids, np.array(values, np.float32))


if __name__ == "__main__":
    serve(Engine())
