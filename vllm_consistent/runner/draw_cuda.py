"""The random draw of the V1 runner on CUDA: vLLM's Gumbel kernel, which its V2 runner draws with.

argmax(logits / temperature - log(-log(u))) with one u in (0, 1) for each token of the vocabulary,
keyed on the row's seed: one pass over the logits, where a cumulative sum takes six.
"""

from __future__ import annotations

import functools

import torch


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor
) -> torch.Tensor:
    """Sample one token a row from softmax(logits / temperature).

    A row's draw depends on that row and its seed alone.

    Args:
        logits: [T, V] fp32; -inf is never drawn. Not modified.
        temperature: [T] fp32; rows at 0 take their largest logit.
        seeds: [T] int64.

    Returns:
        [T] int64, in [0, V) also for a row of NaN: its log-prob is NaN, and the next step's
        embedding must exist.

    Source: vllm/v1/worker/gpu/sample/gumbel.py.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows, vocab = logits.shape
    own, positions = _constants(rows, logits.device)
    drawn = gumbel_sample(logits, own, temperature, seeds, positions, apply_temperature=True)
    return drawn.clamp_(max=vocab - 1)


@functools.lru_cache(maxsize=512)
def _constants(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row i has seed and temperature i, and position 0: its seed is new in each step."""
    own = torch.arange(rows, dtype=torch.int32, device=device)
    return own, torch.zeros(rows, dtype=torch.int64, device=device)
