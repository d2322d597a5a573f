"""What our V1 model runners do differently: the sampler, prompt scoring, generators.

The classes stand in `runner_v1_cpu.py` and `runner_v1_cuda.py`: vLLM's CPU runner may not be
imported on CUDA (see `worker_cpu.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_consistent.contracts import attached
from vllm_consistent.runner.sampler_v1 import ConsistentSampler
from vllm_consistent.runner.scoring import score_hidden


class RunnerV1Mixin:
    """Goes before vLLM's runner class."""

    def adopt(self) -> None:
        """Take over a runner that vLLM's worker has just built."""
        contract = attached(self.vllm_config)
        self.sampler = ConsistentSampler(
            contract.implementation("token_logprobs"), self.model_config.logprobs_mode
        )

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        self.sampler.undrawn = np.nonzero(discarded)[0].tolist()
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # Stock code rewinds the generators of discarded rows by a CUDA offset, which a CPU
        # generator does not have. Ours were not advanced (see `undrawn`): there is none to rewind.
        generators = self.input_batch.generators
        self.input_batch.generators = {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """Score prompt tokens at their request's temperature (stock: always at 1)."""
        finished: dict[str, LogprobsTensors | None] = {}
        for name, top in list(self.num_prompt_logprobs.items()):
            scheduled = num_scheduled_tokens.get(name)
            request = self.requests[name]
            if scheduled is None or request.prompt_token_ids is None:
                # Preempted while in its prompt.
                continue
            tensors = self._score_prompt(name, request, top, scheduled, hidden_states)
            if request.num_computed_tokens + scheduled >= len(request.prompt_token_ids):
                finished[name] = tensors
                del self.num_prompt_logprobs[name]
                request.in_progress_prompt_logprobs_cpu = None
        if finished:
            self._sync_device()
        return finished

    def _score_prompt(
        self, name: str, request: Any, top: int, scheduled: int, hidden_states: torch.Tensor
    ) -> LogprobsTensors:
        total = len(request.prompt_token_ids)
        tensors = request.in_progress_prompt_logprobs_cpu
        if tensors is None:
            tensors = LogprobsTensors.empty_cpu(total - 1, 1 + top)
            request.in_progress_prompt_logprobs_cpu = tensors
        start = request.num_computed_tokens
        # The last prompt position scores the first sampled token, which is the sampler's.
        count = min(scheduled, total - 1 - start)
        if count <= 0:
            return tensors
        row = self.query_start_loc.np[self.input_batch.req_id_to_index[name]].item()
        targets = torch.tensor(
            request.prompt_token_ids[start + 1 : start + 1 + count], device=self.device
        )
        ids, logprobs, ranks = score_hidden(
            self.model,
            hidden_states[row : row + count],
            targets,
            request.sampling_params.temperature,
            top,
            self.sampler.impl,
        )
        filled = slice(start, start + count)
        tensors.logprob_token_ids[filled].copy_(ids, non_blocking=True)
        tensors.logprobs[filled].copy_(logprobs, non_blocking=True)
        tensors.selected_token_ranks[filled].copy_(ranks, non_blocking=True)
        return tensors
