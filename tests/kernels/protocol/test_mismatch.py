"""compare_logprobs: bits decide, nothing inside the mask is dropped, statistics do not overflow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from consistent_kernels.errors import InvalidInputError, LogprobMismatchError
from consistent_kernels.protocol import compare_logprobs
from consistent_kernels.testing import flip_lowest_bit

OURS = (
    "mismatched_tokens",
    "num_tokens",
    "logprob_abs_diff_max",
    "logprob_abs_diff_mean",
    "logprob_abs_diff_std",
    "k3_kl",
    "bitwise_equal",
)


def logprobs(rows: int = 4, width: int = 7, seed: int = 0) -> torch.Tensor:
    return -torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) * 5


def test_compare_logprobs_accepts_equal_bits() -> None:
    values = logprobs()
    mask = torch.ones_like(values, dtype=torch.bool)
    mask[:, 5:] = False
    other = values.clone()
    other[:, 5:] = float("nan")  # outside the mask nothing is looked at
    report = compare_logprobs(values, other, mask)
    assert report.bitwise_equal
    assert (report.num_tokens, report.mismatched_tokens, report.first) == (20, 0, None)
    zeros = (
        report.logprob_abs_diff_max,
        report.logprob_abs_diff_mean,
        report.logprob_abs_diff_std,
        report.k3_kl,
        report.kl,
        report.probs_diff_max,
    )
    assert all(value == 0 and math.copysign(1, value) == 1 for value in zeros)
    report.raise_if_mismatched()


def test_control_compare_logprobs_sees_one_bit() -> None:
    values = logprobs()
    report = compare_logprobs(
        values, flip_lowest_bit(values, (2, 3)), token_ids=torch.arange(28).view(4, 7)
    )
    assert not report.bitwise_equal
    assert report.mismatched_tokens == 1
    assert report.first is not None
    assert (report.first.sample, report.first.position, report.first.token_id) == (2, 3, 17)
    assert int(report.first.rollout_bits, 16) ^ int(report.first.train_bits, 16) == 1
    assert report.logprob_abs_diff_max > 0
    # k3 of one ulp is about 1e-14 / 28: an fp32 exp(d) - 1 - d would be noise of 1e-7 or 0.
    assert 0 < report.k3_kl < 1e-12
    with pytest.raises(
        LogprobMismatchError, match=r"1 of 28 .* sample 2, position 3 \(token id 17"
    ):
        report.raise_if_mismatched()


def test_compare_logprobs_counts_the_sign_of_zero() -> None:
    report = compare_logprobs(torch.tensor([[0.0]]), torch.tensor([[-0.0]]))
    assert report.mismatched_tokens == 1
    assert report.logprob_abs_diff_max == 0
    assert report.first is not None
    assert report.first.train_bits == "0x80000000"


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), float("inf")])
@pytest.mark.parametrize("sides", ["rollout", "train", "both"])
def test_compare_logprobs_counts_nonfinite(value: float, sides: str) -> None:
    rollout, train = logprobs(), logprobs()
    if sides != "train":
        rollout[1, 2] = value
    if sides != "rollout":
        train[1, 2] = value
    report = compare_logprobs(rollout, train)
    assert (report.mismatched_tokens, report.nonfinite_tokens) == (1, 1)
    assert not report.bitwise_equal
    assert not math.isfinite(report.logprob_abs_diff_max)
    with pytest.raises(LogprobMismatchError, match="1 without a finite value"):
        report.raise_if_mismatched()


def test_compare_logprobs_of_lists() -> None:
    rollout = [[-1.0, -2.0], [-0.5, -0.25, -4.0], []]
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -0.25, -4.0]), torch.empty(0)]
    assert compare_logprobs(rollout, train).bitwise_equal
    padded = torch.nn.utils.rnn.pad_sequence(train, batch_first=True, padding_value=-9.0)
    mask = [[1, 1], [1, 1, 1], []]
    report = compare_logprobs(rollout, padded, mask)
    assert report.bitwise_equal
    assert report.num_tokens == 5
    assert compare_logprobs([-1.0, -2.0], np.array([-1.0, -2.0], dtype=np.float32)).bitwise_equal


@pytest.mark.parametrize("missing", [[-0.5, None, -4.0], [-0.5], None])
@pytest.mark.parametrize("swap", [False, True])
def test_compare_logprobs_counts_missing(missing: list[float] | None, swap: bool) -> None:
    whole, lacking = [[-1.0], [-0.5, -0.25, -4.0]], [[-1.0], missing]
    rollout, train = (lacking, whole) if swap else (whole, lacking)
    expected = {3: 1, 1: 2, 0: 3}[len(missing or [])]
    for mask in (None, [[1], [1, 1, 1]]):
        report = compare_logprobs(rollout, train, mask)
        assert report.num_tokens == 4
        assert (report.mismatched_tokens, report.nonfinite_tokens) == (expected, expected)
        assert report.first is not None
        assert (report.first.rollout if swap else report.first.train) is None
        assert "missing" in str(report.first)


def test_compare_logprobs_both_sides_missing_inside_the_mask() -> None:
    report = compare_logprobs([[-1.0]], [[-1.0]], [[1, 1]])
    assert (report.num_tokens, report.mismatched_tokens) == (2, 1)


@pytest.mark.parametrize("rows", [0, 2])
def test_compare_logprobs_of_no_tokens_is_no_pass(rows: int) -> None:
    values = torch.zeros(rows, 3)
    report = compare_logprobs(values, values, torch.zeros(rows, 3, dtype=torch.bool))
    assert (report.num_tokens, report.mismatched_tokens) == (0, 0)
    assert not report.bitwise_equal
    assert report.metrics()["true_on_policy/bitwise_equal"] == 0
    assert math.isnan(report.logprob_abs_diff_max)
    assert math.isnan(report.k3_kl)
    with pytest.raises(LogprobMismatchError, match="no token was compared"):
        report.raise_if_mismatched()


@pytest.mark.parametrize("difference", [1e-7, -1e-7, 1e-3, 1.0, 10.0, 88.0, 89.0, 100.0, -1e4])
def test_compare_logprobs_k3_matches_reference(difference: float) -> None:
    rollout = torch.tensor([[0.0]])
    train = torch.tensor([[difference]])
    d = float(train)
    series = d * d / 2 + d**3 / 6 + d**4 / 24
    expected = series if abs(d) <= 1e-3 else math.expm1(d) - d
    k3 = compare_logprobs(rollout, train).k3_kl
    # expm1 is good to an ulp, and its difference from d loses |d| 2^-52 to rounding.
    assert abs(k3 - expected) <= 2**-51 * max(abs(expected), abs(d))
    assert k3 > 0


def test_compare_logprobs_k3_stays_finite() -> None:
    rollout = torch.full((64, 64), -1e4)
    report = compare_logprobs(rollout, torch.zeros(64, 64))
    assert math.isfinite(report.k3_kl)
    assert report.k3_kl > 1e200
    assert report.mismatched_tokens == 64 * 64


def test_compare_logprobs_statistics_match_reference() -> None:
    rollout, train = logprobs(seed=1), logprobs(seed=2)
    mask = torch.rand(rollout.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    report = compare_logprobs(rollout, train, mask.int())
    a, b = rollout[mask].double().numpy(), train[mask].double().numpy()
    difference = np.abs(a - b)
    assert report.num_tokens == len(a)
    assert report.logprob_abs_diff_max == difference.max()
    # Sums of fewer than 32 fp64 terms in another order: 32 * 2^-53 of the sum of magnitudes.
    close = {"rel": 2**-47}
    assert report.logprob_abs_diff_mean == pytest.approx(difference.mean(), **close)
    assert report.logprob_abs_diff_std == pytest.approx(difference.std(), **close)
    assert report.k3_kl == pytest.approx((np.expm1(b - a) - (b - a)).mean(), **close)
    assert report.kl == pytest.approx((a - b).mean(), rel=2**-40)


def test_compare_logprobs_metrics_carry_verl_names() -> None:
    rollout, train = logprobs(seed=4), logprobs(seed=5)
    mask = torch.ones_like(rollout, dtype=torch.bool)
    mask[0, 4:] = False
    metrics = compare_logprobs(rollout, train, mask).metrics()
    assert [name for name in metrics if name.startswith("true_on_policy/")] == [
        f"true_on_policy/{name}" for name in OURS
    ]
    assert set(compare_logprobs(rollout, train, mask).metrics("p/")) >= {f"p/{n}" for n in OURS}
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_compare_logprobs_metrics_match_verl() -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="verl is optional")
    debug = pytest.importorskip("verl.utils.debug.metrics", reason="verl is optional")
    protocol = pytest.importorskip("verl.protocol", reason="verl is optional")
    rollout, train = logprobs(8, 32, seed=6), logprobs(8, 32, seed=7)
    mask = torch.ones(8, 32, dtype=torch.int64)
    mask[:, 20:] = 0
    metrics = compare_logprobs(rollout, train, mask).metrics()
    theirs = {
        f"rollout_corr/{name}": value
        for name, value in helper.compute_offpolicy_metrics(train, rollout, mask).items()
    }
    batch = {"rollout_log_probs": rollout, "old_log_probs": train, "response_mask": mask}
    data = protocol.DataProto.from_single_dict({**batch, "responses": mask})
    theirs |= debug.calculate_debug_metrics(data)
    shared = [name for name in metrics if not name.startswith("true_on_policy/")]
    assert len(shared) == 7
    for name in shared:
        # verl sums 160 fp32 terms: 160 * 2^-24 of values up to e^5.
        assert metrics[name] == pytest.approx(theirs[name], rel=160 * 2**-24, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compare_logprobs_rejects_rounded_values(dtype: torch.dtype) -> None:
    values = logprobs()
    with pytest.raises(InvalidInputError, match=f"train must be float32, got {dtype}"):
        compare_logprobs(values, values.to(dtype))
    with pytest.raises(InvalidInputError, match="weak check"):
        compare_logprobs(list(values.to(dtype)), values)


def test_compare_logprobs_rejects_fp64_that_is_not_fp32() -> None:
    values = logprobs()
    assert compare_logprobs(values.double(), values).bitwise_equal
    with pytest.raises(InvalidInputError, match="rollout must be fp32 values"):
        compare_logprobs([[0.1]], [[0.1]])


def test_compare_logprobs_rejects_shapes_and_masks() -> None:
    values = logprobs()
    with pytest.raises(InvalidInputError, match=r"must be of one shape, got \(4, 6\), \(4, 7\)"):
        compare_logprobs(values, values[:, :6])
    with pytest.raises(InvalidInputError, match="must be of one shape"):
        compare_logprobs(values, values, torch.ones(4, 1))
    with pytest.raises(InvalidInputError, match="number of rows must be equal on all sides"):
        compare_logprobs([[-1.0]], [[-1.0], [-2.0]])
    with pytest.raises(InvalidInputError, match="mask must be bool or 0/1"):
        compare_logprobs(values, values, torch.full((4, 7), 0.5))
    with pytest.raises(InvalidInputError, match="mask must be bool or 0/1"):
        compare_logprobs([[-1.0, -1.0]], [[-1.0, -1.0]], [[2, 1]])
    with pytest.raises(InvalidInputError, match=r"rollout must be of shape \(B, T\) or \(T,\)"):
        compare_logprobs(values[None], values[None])
    with pytest.raises(InvalidInputError, match="token_ids must be integers"):
        compare_logprobs(values, values, token_ids=values)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (None, "rollout must be log-probs, got None"),
        ({0: [-1.0]}, "a tensor or lists of numbers, got dict"),
        (-1.0, "a tensor or lists of numbers, got float"),
        ("abc", "a tensor or lists of numbers, got str"),
        ([["a"]], "a row of rollout must be numbers or None"),
    ],
)
def test_rejects_what_holds_no_log_probs(rollout: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        compare_logprobs(rollout, [[-1.0]])


def test_nested_tensors_are_rows() -> None:
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert compare_logprobs(nested, rows).num_tokens == 3
    assert compare_logprobs(nested, nested).bitwise_equal
    other = [rows[0], rows[1].nextafter(torch.tensor(0.0))]
    assert compare_logprobs(nested, other).mismatched_tokens == 1
