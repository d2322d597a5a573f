"""The bridged model's own relations, before it is timed: run to run, layout, with gradients."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from benchmarks.train.step import Batch
from consistent_kernels.testing import integer_view
from train_bridge import token_logprobs


@dataclasses.dataclass(frozen=True)
class Parity:
    """What the check found.

    Attributes:
        compared: tokens.
        mismatched: tokens that differ in any bit in any of the runs.
        runs: differing tokens of each run, by name.
        mean_logprob: of the tokens (random ones, so it says little).
        mean_entropy: of the distributions: the negative of the mean log-prob that tokens sampled
            from them would have.
    """

    compared: int
    mismatched: int
    runs: dict[str, int]
    mean_logprob: float
    mean_entropy: float


def check(model: nn.Module, batch: Batch) -> Parity:
    """Score the batch in several layouts and compare log-probs and entropies with the first.

    The tokens are random, so their log-probs are far below 0 and coarse; the entropy (near 1 for
    these models) shows the last bits of the logsumexp.
    """
    ids = batch.ids
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).expand(rows, -1)

    def two(**layout: object) -> torch.Tensor:
        scores = token_logprobs(model, **layout)
        columns = (scores.log_probs, scores.entropy)
        return torch.stack([column.view(rows, length)[:, 1:] for column in columns]).detach()

    with torch.no_grad():
        whole = two(input_ids=ids)
        others = {
            "a second run": two(input_ids=ids),
            "packed": two(input_ids=ids.reshape(1, -1), position_ids=positions.reshape(1, -1)),
            "one sequence at a time": two(input_ids=ids, micro_batch_size=1),
        }
    # One sequence: gradients need the memory of a training step.
    first = token_logprobs(model, ids[:1])
    columns = torch.stack([first.log_probs[:, 1:], first.entropy[:, 1:]]).detach()
    others["with gradients"] = torch.cat([columns, whole[:, 1:]], dim=1)
    del first, columns
    differing = {name: _differs(whole, other) for name, other in others.items()}
    either = torch.stack(list(differing.values())).any(0)
    return Parity(
        compared=either.numel(),
        mismatched=int(either.sum()),
        runs={name: int(where.sum()) for name, where in differing.items()},
        mean_logprob=float(whole[0].double().mean()),
        mean_entropy=float(whole[1].double().mean()),
    )


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (integer_view(a) != integer_view(b)).any(0)
