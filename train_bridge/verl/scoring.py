"""One of verl's micro-batches as a packed batch, and our scores as verl's jagged tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.model import extract_multi_modal_inputs

from consistent_kernels.errors import UnsupportedError
from train_bridge.modules import Scoring
from train_bridge.packing import PackedBatch


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """What the bridged forward takes of a micro-batch: call `model(batch=..., scoring=...)`.

    Attributes:
        batch: packed.
        scoring: the tokens to score.
        offsets: verl's borders of the samples.
    """

    batch: PackedBatch
    scoring: Scoring
    offsets: torch.Tensor

    def outputs(self, columns: tuple[torch.Tensor, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return log_probs (and entropy) as verl's jagged tensors: entry t is about token t + 1."""

        def jagged(column: torch.Tensor) -> torch.Tensor:
            full = column.new_zeros(self.batch.num_tokens)
            full = full.index_copy(0, self.scoring.rows, column)
            return torch.nested.nested_tensor_from_jagged(full, self.offsets)

        log_probs, entropy = columns
        found = {"log_probs": jagged(log_probs)}
        if self.scoring.entropy:
            found["entropy"] = jagged(entropy)
        return found


def score_request(
    model: Any, micro_batch: TensorDict, vocab: int, banned: Sequence[int] | None
) -> ScoreRequest:
    """Return what to score of a micro-batch.

    Only response tokens are scored where the batch says which these are; others are 0.

    Args:
        model: bridged.
        micro_batch: verl's, jagged.
        vocab: ids from here on cannot be sampled: `len(tokenizer)`, as verl tells its rollout.
        banned: further ids that verl's rollout masks.

    Raises:
        UnsupportedError: the batch asks for what never exists here, or is not of text alone.
    """
    _refuse(micro_batch)
    input_ids, position_ids = micro_batch["input_ids"], micro_batch["position_ids"]
    offsets = input_ids.offsets()
    packed = model.pack(
        input_ids.values().unsqueeze(0), None, position_ids.values().unsqueeze(0), offsets
    )
    ids = packed.next_ids()
    rows = ((ids >= 0) & _before_response(micro_batch, offsets)).nonzero().squeeze(1)
    scoring = Scoring(
        rows=rows,
        ids=ids.index_select(0, rows),
        temperature=_temperature(micro_batch["temperature"], offsets, rows),
        valid_vocab=vocab,
        banned=None if not banned else torch.tensor(banned, device=ids.device),
        entropy=bool(tu.get_non_tensor_data(micro_batch, "calculate_entropy", False)),
    )
    return ScoreRequest(packed, scoring, offsets)


def _temperature(
    temperature: float | torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
) -> float | torch.Tensor:
    """One number, or verl's [B] tensor spread over the scored rows, fp32 as the engine divides."""
    if not isinstance(temperature, torch.Tensor):
        return float(temperature)
    heat = temperature.to(rows.device, torch.float32)
    return heat.repeat_interleave(offsets.diff())[rows]


def _before_response(micro_batch: TensorDict, offsets: torch.Tensor) -> torch.Tensor:
    """[T] bool: tokens whose next one lies in a response; all where responses are not jagged."""
    tokens = torch.ones(int(offsets[-1]), dtype=torch.bool, device=offsets.device)
    responses = micro_batch.get("responses", None)
    if responses is None or not responses.is_nested:
        return tokens
    lengths = offsets.diff()
    until = offsets[1:].repeat_interleave(lengths)
    count = responses.offsets().diff().to(offsets.device).repeat_interleave(lengths)
    return torch.arange(tokens.numel(), device=offsets.device) >= until - count - 1


def _refuse(micro_batch: TensorDict) -> None:
    for key in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"):
        if tu.get_non_tensor_data(micro_batch, key, False):
            raise UnsupportedError("training engine", key, ["log_probs", "entropy"])
    if extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", [])):
        raise UnsupportedError("training engine", "images, video or audio", ["text"])
