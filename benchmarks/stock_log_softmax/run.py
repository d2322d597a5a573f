"""Why stock vLLM's sampled and re-scored log-probs differ on equal logits (V2 model runner).

One set of bf16 logits goes through vLLM's own `compute_token_logprobs` as its callers do it: as
bf16 (prompt scoring), as fp32 (sampler, processed log-probs), for one id a row and for several.
Each pair of callers is compared on fp32 bit patterns.

Usage (CUDA, vLLM 0.25.1):  python -m benchmarks.stock_log_softmax.run --out results.json
"""

from __future__ import annotations

import itertools
import sys

import torch

from benchmarks.common import answer

ROWS, VOCAB, CHUNK = 16_384, 151_936, 1_024


def peaked_bf16_logits(rows: int, seed: int) -> torch.Tensor:
    """[rows, VOCAB] bf16 with one dominant entry a row, so that log-probs are near 0."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(rows, VOCAB, device="cuda", generator=generator) * 2.0
    winner = torch.randint(VOCAB, (rows, 1), device="cuda", generator=generator)
    return logits.scatter_add_(
        1, winner, torch.full_like(winner, 16, dtype=torch.float32)
    ).bfloat16()


def main() -> int:
    args = answer.parser(__doc__).parse_args()
    found = answer.start(__doc__, args)
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    callers = {
        "bf16, 1 id": (torch.bfloat16, 1),
        "fp32, 1 id": (torch.float32, 1),
        "bf16, 2 ids": (torch.bfloat16, 2),
        "fp32, 2 ids": (torch.float32, 2),
        "bf16, 6 ids": (torch.bfloat16, 6),
    }
    collected: dict[str, list[torch.Tensor]] = {name: [] for name in callers}
    for chunk in range(ROWS // CHUNK):
        logits = peaked_bf16_logits(CHUNK, seed=chunk)
        ids = logits.float().topk(6).indices
        for name, (dtype, width) in callers.items():
            result = compute_token_logprobs(logits.to(dtype), ids[:, :width].contiguous())
            collected[name].append(result[:, 0].cpu())
    whole = {name: torch.cat(parts) for name, parts in collected.items()}
    pairs = []
    for a, b in itertools.combinations(callers, 2):
        differing = whole[a].view(torch.int32) != whole[b].view(torch.int32)
        pairs.append(
            {
                "first": a,
                "second": b,
                "differing": int(differing.sum()),
                "compared": ROWS,
                "max_abs_difference": float((whole[a] - whole[b]).abs().max()),
            }
        )
    found |= {"mean_logprob": float(whole["fp32, 1 id"].mean()), "pairs": pairs}
    answer.publish(found, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
