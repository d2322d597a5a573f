"""Sampler of vLLM's V1 model runner (CPU, and CUDA where V2 is off)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from consistent_kernels.errors import UnsupportedError
from vllm_consistent.runner.draw import draw_tokens, shared_partials
from vllm_consistent.runner.scoring import score


class ConsistentSampler(Sampler):
    """Draws a token and scores it with the contract's log-prob function, at its temperature."""

    def __init__(self, impl: str, logprobs_mode: str) -> None:
        super().__init__(logprobs_mode)
        self.impl = impl
        self.undrawn: Collection[int] = ()
        """Rows in the middle of their prompt: vLLM drops their token, so no seed is advanced."""

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """logits [T, V] fp32 -> one token a row, with log-probs where asked for."""
        if predict_bonus_token or logprobs_mode_override is not None:
            raise UnsupportedError("sampler", "speculative decoding", ["plain decoding"])
        masked = self._masked(logits, sampling_metadata)
        top = sampling_metadata.max_num_logprobs
        # One distribution is drawn from and scored, so the vocabulary is read once for both.
        is_shared = self.impl in ("llvm", "triton") and masked is logits and len(logits) > 0
        if is_shared and self.impl == "llvm" and sampling_metadata.all_random and top == 0:
            return self._drawn_and_scored(logits, sampling_metadata)
        partials = None
        if is_shared and not sampling_metadata.all_greedy:
            partials = shared_partials(logits, sampling_metadata.temperature)
        sampled = self._draw(masked, sampling_metadata, partials)
        tensors = None
        if top is not None:
            temperature = sampling_metadata.temperature
            if temperature is None:
                temperature = torch.ones(len(sampled), dtype=torch.float32, device=logits.device)
            ids, logprobs, ranks = score(logits, sampled, temperature, top, self.impl, partials)
            tensors = LogprobsTensors(ids.to(torch.int32), logprobs, ranks)
        return SamplerOutput(
            sampled_token_ids=sampled.to(torch.int32).unsqueeze(-1), logprobs_tensors=tensors
        )

    def _drawn_and_scored(self, logits: torch.Tensor, metadata: Any) -> SamplerOutput:
        """Draw and score the drawn token in one kernel, where no other candidate is asked for."""
        from consistent_kernels.token_logprobs.draw_llvm import draw_and_score

        uniform = self._uniform(logits, metadata)
        drawn = draw_and_score(logits, metadata.temperature.float(), uniform)
        ids = drawn.ids.to(torch.int32).unsqueeze(-1)
        tensors = LogprobsTensors(ids, drawn.logprob.unsqueeze(-1), drawn.rank)
        return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=tensors)

    def _draw(
        self, logits: torch.Tensor, metadata: Any, partials: torch.Tensor | None
    ) -> torch.Tensor:
        greedy = None if metadata.all_random else logits.argmax(-1)
        if metadata.all_greedy:
            return greedy
        uniform = self._uniform(logits, metadata)
        drawn = draw_tokens(logits, metadata.temperature, uniform, partials)
        if greedy is None:
            return drawn
        return torch.where(metadata.temperature > 0, drawn, greedy)

    def _masked(self, logits: torch.Tensor, metadata: Any) -> torch.Tensor:
        # Only min_tokens gets here (see sampling.py). It masks in place, and the log-prob is that
        # of the unmasked distribution, so it masks a copy.
        active = [
            processor
            for processor in metadata.logitsprocs.non_argmax_invariant
            if getattr(processor, "min_toks", None) or getattr(processor, "biases", None)
        ]
        if not active:
            return logits
        masked = logits.clone()
        for processor in active:
            masked = processor.apply(masked)
        return masked

    def _uniform(self, logits: torch.Tensor, metadata: Any) -> torch.Tensor:
        uniform = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
        for row, generator in metadata.generators.items():
            if row not in self.undrawn:
                uniform[row : row + 1].uniform_(generator=generator)
        return uniform
