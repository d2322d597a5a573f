"""The comparison of a step and what is left on disk when it fails."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from verl_step import KEYS, flipped, step

from consistent_kernels.errors import ConfigurationError, InvalidInputError
from train_bridge.verl.capture import read_capture, write_capture
from train_bridge.verl.comparison import MismatchPolicy, capture_of, compare_step, react
from vllm_consistent.cli.main import app


def test_comparison_of_equal_log_probs_passes() -> None:
    found = compare_step(KEYS, step(), [False] * 3)
    assert found.report.bitwise_equal
    assert found.mismatching() == []
    assert found.metrics()["true_on_policy/mismatched_tokens"] == 0
    assert found.metrics()["true_on_policy/num_tokens"] == 9
    assert all(name.startswith("true_on_policy/") for name in found.metrics())


def test_control_comparison_finds_one_bit() -> None:
    fields = step()
    flipped(fields, 2, 1)
    found = compare_step(KEYS, fields, [False] * 3)
    assert found.report.mismatched_tokens == 1
    assert found.mismatching() == [2]
    first = found.report.first
    assert (first.sample, first.position, first.token_id) == (2, 1, 16)


def test_comparison_ignores_masked_tokens_and_padding_samples() -> None:
    fields = step()
    flipped(fields, 0, 3)
    fields["response_mask"].unbind()[0][3] = 0
    flipped(fields, 1, 0)
    found = compare_step(KEYS, fields, [False, True, False])
    assert found.report.bitwise_equal
    assert found.keys == ["a_0_0", "b_0_0"]
    assert found.report.num_tokens == 6


def capture(fields: dict[str, torch.Tensor], limit: int = 8) -> Any:
    found = compare_step(KEYS, fields, [False] * 3)
    return found, capture_of(
        found,
        12,
        limit,
        sampling={"temperature": 0.7, "top_p": 1.0},
        weights={"version": 5, "total": "abcdef" * 8},
        contract={"name": "dense_bf16_v1", "digest": "0123" * 16},
    )


def bits(value: torch.Tensor) -> str:
    return "0x" + struct.pack(">f", float(value)).hex()


def test_reaction_names_step_sample_position_bits_and_capture(tmp_path: Path) -> None:
    fields = step()
    flipped(fields, 1, 1)
    found, kept = capture(fields)
    text = str(react(found, MismatchPolicy(capture_dir=str(tmp_path)), kept))
    rollout = fields["rollout_log_probs"].unbind()[1][1]
    old = fields["old_log_probs"].unbind()[1][1]
    for part in (
        "step 12",
        "sample 1, position 1",
        "a_1_0",
        bits(rollout),
        bits(old),
        "version 5",
        "abcdefabcdefabcd",
        str(tmp_path / "step_000012"),
        "on_mismatch=warn",
    ):
        assert part in text


def test_capture_comes_back_as_written(tmp_path: Path) -> None:
    fields = step()
    flipped(fields, 0, 0)
    flipped(fields, 2, 2)
    found, kept = capture(fields)
    react(found, MismatchPolicy(capture_dir=str(tmp_path)), kept)
    read = read_capture(tmp_path / "step_000012")
    assert (read.step, read.sampling["temperature"]) == (12, 0.7)
    assert read.weights["version"] == 5
    assert [sample.index for sample in read.samples] == [0, 2]
    for sample in read.samples:
        assert sample.key == KEYS[sample.index]
        assert sample.report().mismatched_tokens == 1
        for name in ("input_ids", "position_ids", "rollout_log_probs", "old_log_probs"):
            assert torch.equal(getattr(sample, name), fields[name].unbind()[sample.index])


def test_capture_holds_at_most_the_asked_samples() -> None:
    fields = step()
    for sample in range(3):
        flipped(fields, sample, 0)
    assert len(capture(fields, limit=2)[1].samples) == 2


def test_capture_command_shows_it(tmp_path: Path) -> None:
    fields = step()
    flipped(fields, 1, 0)
    found, kept = capture(fields)
    react(found, MismatchPolicy(capture_dir=str(tmp_path)), kept)
    folder = str(tmp_path / "step_000012")
    shown = CliRunner().invoke(app, ["capture", folder])
    assert shown.exit_code == 0
    for part in ("step 12: 1 of 9", "dense_bf16_v1", "version 5", "temperature=0.7", "a_1_0"):
        assert part in shown.output
    found = json.loads(CliRunner().invoke(app, ["capture", folder, "--json"]).output)
    assert found["samples"][0]["mismatched_tokens"] == 1


def test_capture_rejects_another_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="capture"):
        read_capture(tmp_path)
    assert CliRunner().invoke(app, ["capture", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("capture.json", b"{"),
        ("capture.json", b"{}"),
        ("capture.json", b"\xff\xfe"),
        ("capture.json", b'{"report": {"mismatched_tokens": 1, "num_tokens": 9}, "samples": []}'),
        ("tensors.safetensors", b""),
        ("tensors.safetensors", b"garbage" * 9),
    ],
)
def test_capture_rejects_a_damaged_folder(tmp_path: Path, file: str, content: bytes) -> None:
    fields = step()
    flipped(fields, 1, 0)
    found, kept = capture(fields)
    react(found, MismatchPolicy(capture_dir=str(tmp_path)), kept)
    folder = tmp_path / "step_000012"
    (folder / file).write_bytes(content)
    shown = CliRunner().invoke(app, ["capture", str(folder)])
    assert shown.exit_code == 2
    assert "FOLDER must be a whole capture" in shown.output


@pytest.mark.parametrize("name", ["sampling", "weights", "contract", "report"])
@pytest.mark.parametrize("value", [None, [1], "text"])
def test_capture_rejects_a_head_of_other_types(tmp_path: Path, name: str, value: Any) -> None:
    fields = step()
    flipped(fields, 1, 0)
    found, kept = capture(fields)
    react(found, MismatchPolicy(capture_dir=str(tmp_path)), kept)
    file = tmp_path / "step_000012" / "capture.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    shown = CliRunner().invoke(app, ["capture", str(file.parent)])
    assert shown.exit_code == 2
    assert "FOLDER must be a whole capture" in shown.output


def test_reaction_names_the_mismatch_where_no_capture_can_be_written(tmp_path: Path) -> None:
    fields = step()
    flipped(fields, 1, 1)
    found, kept = capture(fields)
    (tmp_path / "file").touch()
    text = str(react(found, MismatchPolicy(capture_dir=str(tmp_path / "file")), kept))
    assert "sample 1, position 1" in text
    assert "No capture" in text


def test_policy_rejects_another_reaction() -> None:
    with pytest.raises(ConfigurationError, match="on_mismatch"):
        MismatchPolicy(on_mismatch="ignore")


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def with_row(name: str, sample: int, row: torch.Tensor) -> dict[str, torch.Tensor]:
    fields = step()
    rows = list(fields[name].unbind())
    rows[sample] = row
    return fields | {name: jagged(rows)}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_comparison_takes_no_equal_bits_for_a_log_prob(value: float) -> None:
    fields = step()
    for name in ("rollout_log_probs", "old_log_probs"):
        fields[name].unbind()[0][1] = value
    report = compare_step(KEYS, fields, [False] * 3).report
    assert (report.mismatched_tokens, report.nonfinite_tokens) == (1, 1)


def test_comparison_tells_minus_zero_from_zero() -> None:
    fields = step()
    fields["rollout_log_probs"].unbind()[0][1] = 0.0
    fields["old_log_probs"].unbind()[0][1] = -0.0
    report = compare_step(KEYS, fields, [False] * 3).report
    assert report.mismatched_tokens == 1
    assert (report.first.rollout_bits, report.first.train_bits) == ("0x00000000", "0x80000000")


def test_a_missing_rollout_log_prob_is_a_mismatch_that_can_be_inspected(tmp_path: Path) -> None:
    fields = step()
    kept = fields["rollout_log_probs"].unbind()[1][:1]
    fields = with_row("rollout_log_probs", 1, kept)
    found = compare_step(KEYS, fields, [False] * 3)
    assert found.report.first.rollout_bits == "missing"
    capture = capture_of(found, 1, 8, sampling={}, weights={}, contract={})
    (sample,) = read_capture(write_capture(tmp_path / "c", capture)).samples
    assert sample.report().nonfinite_tokens == 1


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rollout_log_probs", torch.full((4,), -0.5)),
        ("old_log_probs", torch.full((1,), -0.5)),
        ("response_mask", torch.ones(1, dtype=torch.int64)),
        ("response_mask", torch.ones(3, dtype=torch.int64)),
        ("responses", torch.ones(3, dtype=torch.int64)),
    ],
)
def test_comparison_rejects_a_row_that_ends_elsewhere(name: str, row: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"a_1_0.*[23] tokens"):
        compare_step(KEYS, with_row(name, 1, row), [False] * 3)


def test_comparison_rejects_a_missing_field_and_a_missing_sample() -> None:
    fields = step()
    short = jagged(list(fields["rollout_log_probs"].unbind())[:2])
    with pytest.raises(InvalidInputError, match="rollout_log_probs must be 3 samples, got 2"):
        compare_step(KEYS, fields | {"rollout_log_probs": short}, [False] * 3)
    del fields["rollout_log_probs"]
    with pytest.raises(InvalidInputError, match="calculate_log_probs=true"):
        compare_step(KEYS, fields, [False] * 3)


def test_a_step_without_sampled_tokens_is_no_pass(tmp_path: Path) -> None:
    fields = step()
    masks = jagged([torch.zeros_like(mask) for mask in fields["response_mask"].unbind()])
    found = compare_step(KEYS, fields | {"response_mask": masks}, [False] * 3)
    assert not found.report.bitwise_equal
    capture = capture_of(found, 1, 8, sampling={}, weights={}, contract={})
    assert "no token was compared" in str(
        react(found, MismatchPolicy(capture_dir=str(tmp_path)), capture)
    )
