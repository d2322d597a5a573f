"""Arguments: all violations in one error, and what a resumed run may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistent_kernels.errors import ConfigurationError
from vllm_consistent.cli.demo.options import BUNDLED_MODEL, DemoOptions, merge_for_resume


def test_defaults_are_valid() -> None:
    DemoOptions().check()


def test_all_violations_come_in_one_error(tmp_path: Path) -> None:
    options = DemoOptions(
        steps=0, prompts=0, samples=1, max_tokens=0, temperature=0.0, seed=-1,
        model=str(tmp_path), data=tmp_path / "absent.jsonl",
    )  # fmt: skip
    with pytest.raises(ConfigurationError) as caught:
        options.check()
    text = str(caught.value)
    for name in ("steps", "prompts", "samples", "max-tokens", "temperature", "seed", "model"):
        assert f"--{name} must be" in text
    assert "--data must be an existing file" in text
    assert "two or more" in text


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0, 0.005, 2.5])
def test_rejects_temperature(temperature: float) -> None:
    with pytest.raises(ConfigurationError, match="--temperature"):
        DemoOptions(temperature=temperature).check()


def test_resume_takes_recorded_values_and_new_steps(tmp_path: Path) -> None:
    recorded = DemoOptions(steps=2, samples=8, temperature=0.7, baseline=False, out=tmp_path)
    given = DemoOptions(steps=4, out=tmp_path, resume=True)
    merged = merge_for_resume(given, recorded.to_dict(), frozenset({"steps", "out", "resume"}))
    assert (merged.steps, merged.samples, merged.temperature) == (4, 8, 0.7)
    assert merged.baseline is False
    assert merged.resume is True
    assert merged.model == BUNDLED_MODEL


def test_resume_without_steps_keeps_the_recorded_number(tmp_path: Path) -> None:
    recorded = DemoOptions(steps=9, out=tmp_path).to_dict()
    assert merge_for_resume(DemoOptions(), recorded, frozenset()).steps == 9


def test_resume_rejects_every_contradiction_at_once(tmp_path: Path) -> None:
    recorded = DemoOptions(samples=8, seed=1).to_dict()
    given = DemoOptions(samples=4, seed=2, max_tokens=8)
    explicit = frozenset({"samples", "seed"})
    with pytest.raises(ConfigurationError) as caught:
        merge_for_resume(given, recorded, explicit)
    assert "--samples was 8" in str(caught.value)
    assert "--seed was 1" in str(caught.value)
    assert "max-tokens" not in str(caught.value)


def test_resume_accepts_an_explicit_equal_value_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").touch()
    recorded = DemoOptions(data=tmp_path / "data.jsonl").to_dict()
    monkeypatch.chdir(tmp_path)
    given = DemoOptions(data=Path("data.jsonl"))
    assert merge_for_resume(given, recorded, frozenset({"data"})).data == tmp_path / "data.jsonl"
