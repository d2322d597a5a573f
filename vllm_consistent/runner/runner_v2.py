"""Sampler and prompt scoring of vLLM's V2 model runner (the default for dense models on CUDA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import (
    PromptLogprobsWorker,
    get_prompt_logprobs_token_ids,
)
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from consistent_kernels.errors import UnsupportedError
from vllm_consistent.runner.scoring import PROMPT_ROWS, score


def adopt(runner: Any, impl: str) -> None:
    """Replace sampler and prompt scorer of a V2 runner whose model has just been loaded."""
    if type(runner.sampler) is not Sampler:
        raise UnsupportedError("sampler", type(runner.sampler).__name__, [Sampler.__name__])
    # The instance keeps its request states; only its arithmetic changes.
    runner.sampler.__class__ = ConsistentSamplerV2
    runner.sampler.impl = impl
    runner.prompt_logprobs_worker = ConsistentPromptLogprobsWorker(
        runner.max_num_reqs, runner.sampler, impl
    )


class ConsistentSamplerV2(Sampler):
    """vLLM's draw (Gumbel noise keyed on seed and position), our log-probs."""

    impl: str

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """logits [T, V] fp32 -> one token a row, with log-probs where asked for."""
        mapping, mapping_np = input_batch.expanded_idx_mapping, input_batch.idx_mapping_np
        if logits.shape[0] != mapping_np.shape[0]:
            raise UnsupportedError("sampler", "speculative decoding", ["plain decoding"])
        top = self.sampling_states.max_num_logprobs(mapping_np)
        sampled = self._draw(logits, input_batch, return_logprobs=top != NO_LOGPROBS)
        tensors = None
        if top != NO_LOGPROBS:
            temperature = self.sampling_states.temperature.gpu[mapping]
            scored = score(logits, sampled.to(torch.int64), temperature, int(top), self.impl)
            tensors = LogprobsTensors(*scored)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=sampled.view(-1, 1),
            logprobs_tensors=tensors,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _draw(
        self, logits: torch.Tensor, input_batch: Any, *, return_logprobs: bool
    ) -> torch.Tensor:
        """Return vLLM's draw [T]; `logits` keep their values."""
        mapping, mapping_np = input_batch.expanded_idx_mapping, input_batch.idx_mapping_np
        positions = input_batch.positions[input_batch.logits_indices]
        if self.logit_bias_state.use_logit_bias[mapping_np].any():  # min_tokens
            ids = input_batch.input_ids[input_batch.logits_indices]
            sampled, _ = self.sample(
                logits,
                mapping,
                mapping_np,
                positions,
                ids,
                input_batch.expanded_local_pos,
                return_logprobs=return_logprobs,
            )
            return sampled
        # What else restricts a draw is refused: no processed copy of [T, V] is needed.
        states = self.sampling_states
        return gumbel_sample(
            logits,
            mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
            apply_temperature=True,
            use_fp64=self.use_fp64_gumbel,
        )


class ConsistentPromptLogprobsWorker(PromptLogprobsWorker):
    """Scores prompt tokens at their request's temperature (stock: always at 1)."""

    def __init__(self, max_num_reqs: int, sampler: Sampler, impl: str) -> None:
        super().__init__(max_num_reqs)
        self.sampler = sampler
        self.impl = impl

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        input_batch: Any,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        """Return the log-probs of every prompt that this step completes."""
        mapping = input_batch.idx_mapping_np
        lens = prompt_lens[mapping]
        computed = input_batch.num_computed_prefill_tokens_np
        # A request resumed after preemption scored its prompt before (its prefill is longer).
        wanted = (
            self.uses_prompt_logprobs[mapping]
            & (computed < lens)
            & (lens >= input_batch.prefill_len_np)
        )
        if not np.any(wanted):
            return {}
        targets = get_prompt_logprobs_token_ids(
            input_batch.num_tokens,
            input_batch.query_start_loc,
            input_batch.idx_mapping,
            num_computed_tokens,
            all_token_ids,
        ).to(torch.int64)
        chunked = computed + input_batch.num_scheduled_tokens < lens
        starts = input_batch.query_start_loc_np
        finished: dict[str, LogprobsTensors] = {}
        for i, name in enumerate(input_batch.req_ids):
            if not wanted[i]:
                continue
            # The last prompt position scores the first sampled token, which is the sampler's.
            rows = slice(int(starts[i]), int(starts[i + 1]) - (0 if chunked[i] else 1))
            pieces = self.in_progress_prompt_logprobs[name]
            pieces.extend(
                self._score(logits_fn, hidden_states[rows], targets[rows], int(mapping[i]))
            )
            if chunked[i] or not pieces:
                continue
            finished[name] = LogprobsTensors(
                *(torch.cat(column) for column in zip(*[p[:3] for p in pieces], strict=True))
            )
            pieces.clear()
        return finished

    def _score(
        self,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        targets: torch.Tensor,
        state: int,
    ) -> list[LogprobsTensors]:
        temperature = self.sampler.sampling_states.temperature.gpu[state : state + 1]
        top = int(self.num_prompt_logprobs[state])
        pieces = []
        for start in range(0, len(targets), PROMPT_ROWS):
            ids = targets[start : start + PROMPT_ROWS]
            logits = logits_fn(hidden[start : start + PROMPT_ROWS])
            width = logits.shape[1] if top < 0 else top
            scored = score(logits, ids, temperature.expand(len(ids)), width, self.impl)
            pieces.append(LogprobsTensors(*scored))
        return pieces
