"""Rollout and recomputed log-probs of one step, compared before the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from consistent_kernels.errors import ConfigurationError, LogprobMismatchError, invalid
from consistent_kernels.protocol import MismatchReport, compare_logprobs
from train_bridge.verl.capture import Capture, CapturedSample, write_capture

PREFIX = "true_on_policy/"
FIELDS = (
    "input_ids",
    "position_ids",
    "response_mask",
    "responses",
    "rollout_log_probs",
    "old_log_probs",
)
"""What a step's comparison reads of verl's batch."""

ABORT, WARN = "abort", "warn"


@dataclasses.dataclass(frozen=True)
class MismatchPolicy:
    """The `true_on_policy` section of the configuration.

    Attributes:
        on_mismatch: "abort" stops the run before the update; "warn" goes on.
        capture_dir: where captures are written.
        capture_samples: at most how many samples one holds.
        contract_digest: what the contract's digest must be, or None.
    """

    on_mismatch: str = ABORT
    capture_dir: str = "captures"
    capture_samples: int = 8
    contract_digest: str | None = None

    def __post_init__(self) -> None:
        if self.on_mismatch not in (ABORT, WARN):
            raise ConfigurationError(
                [f"on_mismatch={self.on_mismatch!r} is neither {ABORT!r} nor {WARN!r}"],
                "true_on_policy",
            )


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """One step's samples, as rows, and what comparing them found.

    Attributes:
        keys: verl's names of the samples.
        rows: rows by field of `FIELDS`, each of its own length.
        report: over the tokens that the policy sampled.
    """

    keys: Sequence[str]
    rows: Mapping[str, Sequence[torch.Tensor]]
    report: MismatchReport

    def metrics(self) -> dict[str, float]:
        """Return our metrics; verl logs its own."""
        found = self.report.metrics(PREFIX)
        return {name: value for name, value in found.items() if name.startswith(PREFIX)}

    def mismatching(self) -> list[int]:
        """Return the samples that hold a mismatch, in order."""
        return [
            number
            for number in range(len(self.keys))
            if bool(self.rows["response_mask"][number].any())
            and not _compare(self.rows, [number]).bitwise_equal
        ]


def compare_step(
    keys: Sequence[str], fields: Mapping[str, torch.Tensor], padding: Sequence[bool]
) -> StepComparison:
    """Compare a step's rollout log-probs with the trainer's.

    Args:
        keys: verl's names of the samples.
        fields: jagged (or dense) tensors by name, `FIELDS` of them.
        padding: samples that verl repeated to fill a batch; they are left out.

    Raises:
        InvalidInputError: a field is missing, holds another number of samples, or has a length
            that is not the response's. Too few rollout log-probs are a mismatch instead.
    """
    kept = [number for number, is_padding in enumerate(padding) if not is_padding]
    rows = {}
    for name in FIELDS:
        if name not in fields:
            raise invalid(
                "compare_step",
                name,
                "in verl's batch",
                f"only {sorted(fields.keys())}",
                "Set actor_rollout_ref.rollout.calculate_log_probs=true",
            )
        every = fields[name].unbind()
        if len(every) != len(keys):
            raise invalid("compare_step", name, f"{len(keys)} samples", f"{len(every)}")
        rows[name] = [every[number] for number in kept]
    for place, number in enumerate(kept):
        _check_boundary(keys[number], {name: rows[name][place] for name in FIELDS})
    found = _compare(rows, range(len(kept)))
    return StepComparison([keys[number] for number in kept], rows, found)


def _check_boundary(key: str, row: Mapping[str, torch.Tensor]) -> None:
    """A mask or log-probs of another length than the response would compare other tokens."""
    lengths = {name: row[name].shape[-1] for name in FIELDS}
    response = lengths["responses"]
    equal = all(lengths[name] == response for name in ("response_mask", "old_log_probs"))
    if not equal or lengths["rollout_log_probs"] > response or lengths["input_ids"] < response:
        raise invalid(
            "compare_step",
            f"fields of sample {key}",
            f"as long as its response, {response} tokens",
            lengths,
            "Prompt and response meet at another token; look at the agent loop",
        )


def _compare(
    rows: Mapping[str, Sequence[torch.Tensor]], numbers: Sequence[int] | range
) -> MismatchReport:
    chosen = {name: [rows[name][number] for number in numbers] for name in FIELDS}
    return compare_logprobs(
        chosen["rollout_log_probs"],
        chosen["old_log_probs"],
        chosen["response_mask"],
        token_ids=chosen["responses"],
    )


def capture_of(
    comparison: StepComparison,
    step: int,
    limit: int,
    *,
    sampling: Mapping[str, Any],
    weights: Mapping[str, Any],
    contract: Mapping[str, Any],
) -> Capture:
    """Return the step's mismatching samples with what is needed to replay them."""
    names = ("input_ids", "position_ids", "response_mask", "rollout_log_probs", "old_log_probs")
    samples = [
        CapturedSample(
            key=comparison.keys[number],
            index=number,
            **{name: comparison.rows[name][number] for name in names},
        )
        for number in comparison.mismatching()[:limit]
    ]
    return Capture(step, comparison.report.to_dict(), sampling, weights, contract, samples)


def react(
    comparison: StepComparison, policy: MismatchPolicy, capture: Capture
) -> LogprobMismatchError:
    """Write the capture and return the error that says everything; the caller raises or logs it.

    A capture that cannot be written (a full disk) does not hide the mismatch: the error says so.
    """
    folder = Path(policy.capture_dir) / f"step_{capture.step:06d}"
    try:
        write_capture(folder, capture)
        left = f"Capture: {folder}; read it with `vllm-consistent capture {folder}`"
    except (OSError, SafetensorError) as error:
        left = f"No capture: {folder} could not be written ({error})"
    first = comparison.report.first
    key = "" if first is None else f" (sample {first.sample} is {comparison.keys[first.sample]})"
    try:
        comparison.report.raise_if_mismatched()
    except LogprobMismatchError as error:
        return LogprobMismatchError(
            f"step {capture.step}: {error}{key}. Weights {capture.weights.get('total', '')[:16]} "
            f"version {capture.weights.get('version')}, contract "
            f"{str(capture.contract.get('digest'))[:16]}. {left}. "
            f"true_on_policy.on_mismatch={WARN} goes on instead"
        )
    raise AssertionError("react is called on a mismatch")
