"""Rollout and trainer log-probs of the same tokens, compared bit for bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from consistent_kernels.errors import LogprobMismatchError, invalid
from consistent_kernels.protocol.ragged import Rows, as_rows, dense_mask, dense_values, width_of

_LARGEST_LOG_RATIO = 600.0
"""k3 counts a larger log ratio as this one (r = 4e260): exp overflows fp64 at 709. No difference
is hidden: the token stays a mismatch and its k3 is astronomically large."""

Logprobs = torch.Tensor | Sequence[Any]


@dataclasses.dataclass(frozen=True)
class TokenMismatch:
    """One token whose two log-probs differ.

    Attributes:
        sample, position: where, in the order given.
        token_id: where token ids were given.
        rollout, train: values; None where a side has none.
        rollout_bits, train_bits: fp32 bit patterns as hex; "missing" where a side has none.
    """

    sample: int
    position: int
    token_id: int | None
    rollout: float | None
    train: float | None
    rollout_bits: str
    train_bits: str

    def __str__(self) -> str:
        token = "" if self.token_id is None else f" (token id {self.token_id})"
        return (
            f"sample {self.sample}, position {self.position}{token}: rollout {self.rollout!r} "
            f"({self.rollout_bits}) != train {self.train!r} ({self.train_bits})"
        )


@dataclasses.dataclass(frozen=True)
class MismatchReport:
    """What `compare_logprobs` found over the tokens inside the mask.

    Differences are fp64. They are NaN or infinite where a token has no finite log-prob on some
    side, and NaN where no token was compared: neither is ever dropped.

    Attributes:
        num_tokens: tokens inside the mask.
        mismatched_tokens: tokens whose bits differ, or without a finite log-prob on both sides.
        nonfinite_tokens: those of them that lack one (None, NaN, infinite, too short a list).
        logprob_abs_diff_max, logprob_abs_diff_mean, logprob_abs_diff_std: of |rollout - train|;
            the standard deviation is that of the population.
        kl: mean of rollout - train.
        k3_kl: mean of r - 1 - log r, log r = train - rollout.
        probs_diff_max, probs_diff_mean, probs_diff_std, probs_pearson_corr: of exp(log-prob), as
            verl defines its training/rollout_probs_diff_* metrics.
        first: the first mismatch by sample, then position.
    """

    num_tokens: int
    mismatched_tokens: int
    nonfinite_tokens: int
    logprob_abs_diff_max: float
    logprob_abs_diff_mean: float
    logprob_abs_diff_std: float
    kl: float
    k3_kl: float
    probs_diff_max: float
    probs_diff_mean: float
    probs_diff_std: float
    probs_pearson_corr: float
    first: TokenMismatch | None

    @property
    def bitwise_equal(self) -> bool:
        """Whether at least one token was compared and every compared token agrees in all bits.

        A comparison of no tokens shows nothing, so it is not a pass.
        """
        return self.num_tokens > 0 and self.mismatched_tokens == 0

    def metrics(self, prefix: str = "true_on_policy/") -> dict[str, float]:
        """Return a flat dict for a trainer's logger.

        Our names carry `prefix`. verl's own names (rollout_corr/*, training/rollout_*) follow its
        definitions, so a dashboard built for it keeps working. verl's metrics on probabilities can
        read 0 while log-probs differ, and rollout_corr/kl is a signed mean: gate on ours.
        """
        return {
            f"{prefix}mismatched_tokens": self.mismatched_tokens,
            f"{prefix}num_tokens": self.num_tokens,
            f"{prefix}logprob_abs_diff_max": self.logprob_abs_diff_max,
            f"{prefix}logprob_abs_diff_mean": self.logprob_abs_diff_mean,
            f"{prefix}logprob_abs_diff_std": self.logprob_abs_diff_std,
            f"{prefix}k3_kl": self.k3_kl,
            f"{prefix}bitwise_equal": float(self.bitwise_equal),
            "rollout_corr/kl": self.kl,
            "rollout_corr/k3_kl": self.k3_kl,
            "training/rollout_probs_diff_valid": int(self.num_tokens > 0),
            "training/rollout_probs_diff_max": self.probs_diff_max,
            "training/rollout_probs_diff_mean": self.probs_diff_mean,
            "training/rollout_probs_diff_std": self.probs_diff_std,
            "training/rollout_actor_probs_pearson_corr": self.probs_pearson_corr,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, `bitwise_equal` included."""
        return dataclasses.asdict(self) | {"bitwise_equal": self.bitwise_equal}

    def raise_if_mismatched(self) -> None:
        """Raise LogprobMismatchError unless `bitwise_equal`."""
        if self.bitwise_equal:
            return
        if self.num_tokens == 0:
            raise LogprobMismatchError(
                "no token was compared: the mask is empty, which shows nothing. Pass the response "
                "mask of sampled tokens"
            )
        raise LogprobMismatchError(
            f"{self.mismatched_tokens} of {self.num_tokens} log-probs differ "
            f"({self.nonfinite_tokens} without a finite value); max |difference| "
            f"{self.logprob_abs_diff_max:.9g}, k3 {self.k3_kl:.9g}; first at {self.first}. Compare "
            "weight versions and contract digests first, then replay this sample layer by layer"
        )


def _hex(bits: int) -> str:
    return f"0x{bits & 0xFFFFFFFF:08x}"


def _first_mismatch(
    differs: torch.Tensor, rollout: Rows, train: Rows, token_ids: torch.Tensor | None
) -> TokenMismatch:
    sample, position = divmod(int(differs.flatten().int().argmax()), differs.shape[1])

    def side(rows: Rows) -> tuple[float | None, str]:
        if not rows.present[sample, position]:
            return None, "missing"
        value = rows.values[sample, position]
        return float(value), _hex(int(value.view(torch.int32)))

    (left, left_bits), (right, right_bits) = side(rollout), side(train)
    token_id = None if token_ids is None else int(token_ids[sample, position])
    return TokenMismatch(sample, position, token_id, left, right, left_bits, right_bits)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    # expm1(d) - d: for |d| near 1e-7, exp(d) - 1 - d would be all rounding error.
    capped = log_ratio.clamp(max=_LARGEST_LOG_RATIO)
    return capped.expm1() - capped


def _statistics(rollout: torch.Tensor, train: torch.Tensor) -> dict[str, float]:
    """Statistics of the masked tokens, [n] fp32 each."""
    count = max(rollout.numel(), 1)
    log_ratio = train.double() - rollout.double()
    difference = log_ratio.abs()
    probs_rollout, probs_train = rollout.exp(), train.exp()
    probs_difference = (probs_train - probs_rollout).abs()
    empty = rollout.numel() == 0
    pearson = probs_diff_std = math.nan
    if rollout.numel() > 1:  # torch warns on one element, for which both are undefined
        pearson = float(torch.corrcoef(torch.stack([probs_train, probs_rollout]))[0, 1])
        probs_diff_std = float(probs_difference.std())
    return {
        "logprob_abs_diff_max": math.nan if empty else float(difference.max()),
        "logprob_abs_diff_mean": float(difference.mean()),
        "logprob_abs_diff_std": math.nan if empty else float(difference.std(correction=0)),
        "kl": float(-log_ratio.mean()) + 0.0,
        # Dividing first keeps the sum of many capped ratios finite.
        "k3_kl": math.nan if empty else float((_k3(log_ratio) / count).sum()),
        "probs_diff_max": math.nan if empty else float(probs_difference.max()),
        "probs_diff_mean": float(probs_difference.mean()),
        "probs_diff_std": probs_diff_std,
        "probs_pearson_corr": pearson,
    }


def compare_logprobs(
    rollout: Logprobs,
    train: Logprobs,
    mask: Logprobs | None = None,
    *,
    token_ids: Logprobs | None = None,
) -> MismatchReport:
    """Compare the rollout's log-probs with the trainer's on fp32 bit patterns.

    A token inside the mask without a log-prob (None, NaN, a row that ends before it) or with an
    infinite one is a mismatch, on whichever side it is, and even when both sides agree on it.

    Args:
        rollout, train: [B, T] or [T] fp32 tensors, or lists of rows that may differ in length
            (floats, None or 1-D tensors; what an engine returns). Values must be fp32 values:
            bf16 and fp16 are refused, since equality after that rounding shows little.
        mask: of sampled tokens, bool or 0/1, the same forms. By default every position that
            either side has.
        token_ids: of the same form, for the report only.

    Returns:
        MismatchReport. With no token inside the mask `bitwise_equal` is False.

    Raises:
        InvalidInputError: shapes or number of rows differ, another dtype, a mask that is not 0/1.
    """
    rollout, train, mask, token_ids = (as_rows(x) for x in (rollout, train, mask, token_ids))
    for name, side in (("rollout", rollout), ("train", train)):
        if side is None:
            raise invalid("compare_logprobs", name, "log-probs", None)
    given = [x for x in (rollout, train, mask, token_ids) if x is not None]
    shapes = {tuple(x.shape) for x in given if isinstance(x, torch.Tensor)}
    if len(shapes) > 1:
        raise invalid(
            "compare_logprobs",
            "rollout, train, mask and token_ids",
            "of one shape",
            ", ".join(str(shape) for shape in sorted(shapes)),
        )
    width = max(width_of(x) for x in given)
    left = dense_values("rollout", rollout, width)
    right = dense_values("train", train, width).to(left.values.device)
    inside = dense_mask(mask, width, default=left.present | right.present)
    inside = inside.to(left.values.device)
    ids = None if token_ids is None else dense_values("token_ids", token_ids, width).values
    rows = {"rollout": left.values, "train": right.values, "mask": inside}
    if ids is not None:
        rows["token_ids"] = ids
    if len({x.shape[0] for x in rows.values()}) > 1:
        counts = ", ".join(f"{name} {x.shape[0]}" for name, x in rows.items())
        raise invalid("compare_logprobs", "number of rows", "equal on all sides", counts)
    finite = left.values.isfinite() & right.values.isfinite()
    differs = (left.values.view(torch.int32) != right.values.view(torch.int32)) | ~finite
    differs &= inside
    mismatched = int(differs.sum())
    return MismatchReport(
        num_tokens=int(inside.sum()),
        mismatched_tokens=mismatched,
        nonfinite_tokens=int((~finite & inside).sum()),
        **_statistics(left.values[inside], right.values[inside]),
        first=_first_mismatch(differs, left, right, ids) if mismatched else None,
    )
