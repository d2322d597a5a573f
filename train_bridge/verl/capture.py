"""A mismatch on disk: what is needed to score the same tokens again and to see where bits part.

A capture is a folder with `capture.json` (step, report, sampling parameters, contract and weight
digests, one entry a sample) and `tensors.safetensors` (per sample: input_ids, position_ids,
response_mask, rollout_log_probs, old_log_probs). `vllm-consistent capture FOLDER` prints it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.protocol import MismatchReport, compare_logprobs

_JSON, _TENSORS = "capture.json", "tensors.safetensors"


@dataclasses.dataclass(frozen=True)
class CapturedSample:
    """One sample; the response is the last `len(response_mask)` tokens of `input_ids`.

    Attributes:
        key: verl's name of the sample.
        index: its place in the step's batch.
        input_ids, position_ids: [L] int64.
        response_mask: [R], 1 on tokens that the policy sampled.
        rollout_log_probs, old_log_probs: [R] fp32.
    """

    key: str
    index: int
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    old_log_probs: torch.Tensor

    def report(self) -> MismatchReport:
        """Compare this sample's two log-probs again."""
        ids = self.input_ids[self.input_ids.numel() - self.response_mask.numel() :]
        # As rows, which may differ in length: where the engine gave too few log-probs, say.
        columns = (self.rollout_log_probs, self.old_log_probs, self.response_mask, ids)
        rollout, old, mask, token_ids = ([column] for column in columns)
        return compare_logprobs(rollout, old, mask, token_ids=token_ids)


_FIELDS = (
    "input_ids",
    "position_ids",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
)


@dataclasses.dataclass(frozen=True)
class Capture:
    """A step's mismatching samples.

    Attributes:
        step: verl's global step.
        report: `MismatchReport.to_dict()` of the whole step.
        sampling: temperature, top_p, top_k and the like.
        weights: receipt of the trainer's weights: version, total digest, digest by parameter.
        contract: name and digest of the trainer's contract.
        samples: mismatching ones, as many as were kept.
    """

    step: int
    report: Mapping[str, Any]
    sampling: Mapping[str, Any]
    weights: Mapping[str, Any]
    contract: Mapping[str, Any]
    samples: Sequence[CapturedSample]


def write_capture(folder: Path, capture: Capture) -> Path:
    """Write `capture` into `folder` (made if absent) and return the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}/{name}": getattr(sample, name).detach().cpu().contiguous()
        for number, sample in enumerate(capture.samples)
        for name in _FIELDS
    }
    save_file(tensors, folder / _TENSORS)
    head = {
        field.name: getattr(capture, field.name)
        for field in dataclasses.fields(Capture)
        if field.name != "samples"
    }
    head["samples"] = [{"key": s.key, "index": s.index} for s in capture.samples]
    (folder / _JSON).write_text(json.dumps(head, indent=1, default=str))
    return folder


def read_capture(folder: Path) -> Capture:
    """Read what `write_capture` wrote.

    Raises:
        InvalidInputError: the folder holds no capture, or a damaged one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / _JSON).is_file() or not (folder / _TENSORS).is_file():
        raise invalid("capture", "FOLDER", f"a folder with {_JSON} and {_TENSORS}", folder)
    try:
        head = json.loads((folder / _JSON).read_text())
        tensors = load_file(folder / _TENSORS)
        head["report"]["mismatched_tokens"], head["report"]["num_tokens"]
        for name in ("sampling", "weights", "contract"):
            if not isinstance(head[name], dict):
                raise TypeError(f"{name} is no mapping")
        samples = [
            CapturedSample(**entry, **{name: tensors[f"{number}/{name}"] for name in _FIELDS})
            for number, entry in enumerate(head.pop("samples"))
        ]
        return Capture(**head, samples=samples)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise invalid(
            "capture",
            "FOLDER",
            "a whole capture",
            f"{folder}, which cannot be read ({type(error).__name__}: {error})",
            "The run may have been stopped while it wrote; take the capture of another step",
        ) from error
