"""The process of the bridged trainer: scores samples with the same weights on the same device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.rollout.process import serve
from benchmarks.rollout.samples import Sample


class Trainer:
    """Answers `Process.call`; one bridged Hugging Face model in this process."""

    def load(self, model: str) -> None:
        """Read the weights into memory of the CPU, where they wait."""
        from train_bridge.masters import load_masters

        self.model = load_masters(model, torch.bfloat16)

    def bridge(self, device: str, contract: dict[str, Any]) -> None:
        """Move the model to the device and bridge it, onto the engine's contract."""
        from consistent_kernels.contract import contract_from_dict
        from train_bridge import bridge_model

        self.model = bridge_model(self.model.to(device), contract_from_dict(contract))
        self.device = device

    def score(self, samples: list[Sample], packed_tokens: int) -> list[np.ndarray]:
        """Log-probs of the sampled tokens, packed; [len(token_ids)] fp32 for each sample."""
        scores: list[np.ndarray] = []
        with torch.no_grad():
            for batch in _packs(samples, packed_tokens):
                scores += self._score(batch)
        return scores

    def _score(self, samples: list[Sample]) -> list[np.ndarray]:
        from train_bridge import token_logprobs

        ids, positions, response = [], [], []
        for sample in samples:
            ids += sample.sequence
            positions += range(len(sample.sequence))
            response += [0] * len(sample.prompt_ids) + [1] * len(sample.token_ids)
        row = torch.tensor([ids, positions, response], device=self.device)
        mask = row[2:]
        scores = token_logprobs(
            self.model,
            row[:1],
            position_ids=row[1:2],
            response_mask=mask,
            temperature=1.0,
            entropy=False,
        )
        flat = scores.log_probs[mask.bool()].cpu().numpy()
        ends = list(itertools.accumulate(len(sample.token_ids) for sample in samples))
        return np.split(flat, ends[:-1])


def _packs(samples: list[Sample], limit: int) -> Iterator[list[Sample]]:
    """Cut into runs of at most `limit` tokens; a longer sample goes alone."""
    pack: list[Sample] = []
    used = 0
    for sample in samples:
        size = len(sample.prompt_ids) + len(sample.token_ids)
        if pack and used + size > limit:
            yield pack
            pack, used = [], 0
        pack.append(sample)
        used += size
    if pack:
        yield pack


if __name__ == "__main__":
    serve(Trainer())
