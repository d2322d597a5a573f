"""`vllm-consistent doctor`: exit codes, JSON, and what it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from verl_configs import ROOT, SHIPPED

from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.main import app

pytest.importorskip("verl", reason="the verl extra is not installed")

pytestmark = pytest.mark.verl

NAME = "true_on_policy_grpo_fsdp"
RECIPE = ROOT / "configs" / "recipes" / "smollm2_grpo_fsdp"


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", [NAME, "true_on_policy_grpo_megatron"])
def test_doctor_finds_nothing_in_a_shipped_configuration(name: str) -> None:
    code, text = doctor(name)
    assert code == exit_codes.OK
    assert "nothing found" in text
    assert "not a folder here" in text


@pytest.mark.parametrize("config", [RECIPE, SHIPPED[RECIPE.name]], ids=["folder", "file"])
def test_doctor_takes_a_recipe(config: Path) -> None:
    assert doctor(str(config))[0] == exit_codes.OK


def test_doctor_lists_every_finding_with_its_key() -> None:
    code, text = doctor(
        NAME,
        "actor_rollout_ref.rollout.temperature=0",
        "algorithm.rollout_correction.bypass_mode=true",
    )
    assert code == exit_codes.REFUSED
    assert "2 finding(s)" in text
    assert "actor_rollout_ref.rollout.temperature=0" in text
    assert "algorithm.rollout_correction.bypass_mode=True" in text


def test_doctor_json_holds_findings_and_versions() -> None:
    code, text = doctor(NAME, "trainer.use_v1=false", "--json")
    found = json.loads(text)
    assert code == exit_codes.REFUSED
    assert found["passes"] is False
    assert [item["key"] for item in found["violations"]] == ["trainer.use_v1"]
    assert set(found["violations"][0]) == {"key", "value", "why", "use"}
    assert found["versions"]["verl"] == "0.9.1"


def test_doctor_prints_the_digest_of_a_model_on_disk(tmp_path: Path) -> None:
    from tiny_models import save_tiny_model
    from word_tokenizer import write_tokenizer

    folder = save_tiny_model(tmp_path / "model", "qwen3")
    write_tokenizer(folder)
    model = [f"actor_rollout_ref.model.path={folder}", "data.max_prompt_length=512"]
    code, text = doctor(NAME, *model, "trainer.device=cpu", "--json")
    digest = json.loads(text)["contract_digest"]
    assert code == exit_codes.OK
    assert len(digest) == 64
    pinned = f"true_on_policy.contract_digest={'0' * 64}"
    code, text = doctor(NAME, *model, "trainer.device=cpu", pinned)
    assert code == exit_codes.REFUSED
    assert digest in text


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe", b"- 1"], ids=["half", "binary", "list"])
def test_doctor_rejects_a_file_that_is_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    code, text = doctor(str(tmp_path / "x.yaml"))
    assert code == exit_codes.USAGE
    assert "must compose" in text


@pytest.mark.parametrize(
    "arguments",
    [("no_such_configuration",), ("/no/such/file.yaml",), (NAME, "no.such.key=1"), (NAME, "=")],
)
def test_doctor_rejects_what_it_cannot_compose(arguments: tuple[str, ...]) -> None:
    code, text = doctor(*arguments)
    assert code == exit_codes.USAGE
    assert "doctor:" in text
