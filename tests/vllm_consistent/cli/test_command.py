"""The command line: usage errors end with 2 before anything is started or written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.demo import command
from vllm_consistent.cli.demo.data import JsonlProblems
from vllm_consistent.cli.demo.options import DemoOptions
from vllm_consistent.cli.main import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_help_names_every_option_and_exit_code() -> None:
    text = invoke("--help").output
    for option in (
        "steps", "prompts", "samples", "max-tokens", "temperature", "model", "data", "out",
        "json", "seed", "no-baseline", "resume",
    ):  # fmt: skip
        assert f"--{option}" in text
    assert "130" in text
    assert "bit patterns" in text


def test_help_does_not_import_torch_or_vllm() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from vllm_consistent.cli.main import app\n"
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", 0], "--steps must be at least 1, got 0"),
        (["--samples", 1], "--samples must be at least 2, got 1"),
        (["--temperature", 0], "--temperature must be from 0.01"),
        (["--model", "/absent"], "--model must be"),
        (["--data", "/absent"], "--data must be an existing file"),
        (["--steps", "many"], "integer"),
        (["--unknown"], "No such option"),
    ],
)
def test_rejects_a_bad_argument(tmp_path: Path, arguments: list[object], message: str) -> None:
    out = tmp_path / "out"
    result = invoke("--out", out, *arguments)
    assert result.exit_code == exit_codes.USAGE
    assert message in " ".join(result.output.split())
    assert not out.exists()


def test_rejects_broken_data_with_line_numbers(tmp_path: Path, tiny_checkpoint: Path) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text('{"prompt": "1 + 1?", "answer": 2}\n{"prompt": "1 + 1?"\n')
    out = tmp_path / "out"
    result = invoke("--out", out, "--model", tiny_checkpoint, "--data", data)
    assert result.exit_code == exit_codes.USAGE
    assert "line 2: not JSON" in result.output
    assert not out.exists()


def test_rejects_a_response_longer_than_the_model(tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = tmp_path / "out"
    result = invoke("--out", out, "--model", tiny_checkpoint, "--max-tokens", 2048)
    assert result.exit_code == exit_codes.USAGE
    assert "at most the model's context of 2048 tokens" in result.output
    assert not out.exists()


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer*.json"])
def test_rejects_a_model_folder_that_lacks_a_part(
    tmp_path: Path, tiny_checkpoint: Path, missing: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    for path in folder.glob(missing):
        path.unlink()
    result = invoke("--out", tmp_path / "out", "--model", folder)
    assert result.exit_code == exit_codes.USAGE
    assert "without" in result.output


def test_rejects_nan_weights_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    result = invoke("--out", tmp_path / "out", "--model", folder)
    assert result.exit_code == exit_codes.USAGE
    assert "model.norm.weight" in result.output
    assert not (tmp_path / "out").exists()


def test_rejects_damaged_weights(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    result = invoke("--out", tmp_path / "out", "--model", folder)
    assert result.exit_code == exit_codes.USAGE
    assert "readable weights" in result.output


def test_rejects_an_unknown_architecture(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (folder / "config.json").write_text(json.dumps(config))
    result = invoke("--out", tmp_path / "out", "--model", folder)
    assert result.exit_code == exit_codes.USAGE
    assert "GPT2LMHeadModel" in result.output
    assert "LlamaForCausalLM" in result.output
    assert not (tmp_path / "out").exists()


def test_rejects_a_used_folder_without_resume(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    result = invoke("--out", tmp_path)
    assert result.exit_code == exit_codes.USAGE
    assert "add --resume" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_rejects_a_folder_that_cannot_be_written(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("--out", tmp_path / "file" / "out", "--model", tiny_checkpoint)
    assert result.exit_code == exit_codes.USAGE
    assert "is not writable" in result.output


def test_resume_rejects_a_folder_without_a_run(tmp_path: Path) -> None:
    result = invoke("--resume", "--out", tmp_path)
    assert result.exit_code == exit_codes.USAGE
    assert "holds no run" in result.output


def test_resume_rejects_other_options(tmp_path: Path) -> None:
    recorded = DemoOptions(samples=8, out=tmp_path).to_dict()
    (tmp_path / "run.json").write_text(json.dumps({"options": recorded}))
    result = invoke("--resume", "--out", tmp_path, "--samples", 4)
    assert result.exit_code == exit_codes.USAGE
    assert "--samples was 8" in result.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None}, "prompts is None: run.json is damaged"),
        ({"seed": True}, "seed is True"),
        ({"model": 3, "steps": "5"}, "refused for 2 reason"),
    ],
)
def test_resume_rejects_a_damaged_record(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    recorded = DemoOptions(out=tmp_path).to_dict() | changes
    (tmp_path / "run.json").write_text(json.dumps({"options": recorded}))
    result = invoke("--resume", "--out", tmp_path)
    assert result.exit_code == exit_codes.USAGE
    assert message in " ".join(result.output.split())


def test_resume_rejects_changed_problems(tmp_path: Path, tiny_checkpoint: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text('{"prompt": "1 + 1?", "answer": 2}\n')
    out = tmp_path / "out"
    out.mkdir()
    options = DemoOptions(model=str(tiny_checkpoint), data=data, out=out).to_dict()
    record = {"options": options, "problems": JsonlProblems(data).describe()}
    (out / "run.json").write_text(json.dumps(record))
    data.write_text('{"prompt": "1 + 2?", "answer": 3}\n')
    result = invoke("--resume", "--out", out)
    assert result.exit_code == exit_codes.USAGE
    assert "--data must be as when the run began (sums.jsonl: 1 problems" in result.output


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "a folder with a readable config.json"),
        ("config.json", "[]", "no object in it"),
        ("config.json", '{"model_type": "nonsense"}', "a folder that AutoConfig reads"),
        ("tokenizer.json", "{", "a folder that AutoTokenizer reads"),
    ],
)
def test_rejects_a_model_folder_with_a_damaged_file(
    tmp_path: Path, tiny_checkpoint: Path, file: str, text: str, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / file).write_text(text)
    result = invoke("--out", tmp_path / "out", "--model", folder)
    assert result.exit_code == exit_codes.USAGE, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_default_folder_is_new_and_resume_finds_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.default_out(resume=False).parent == Path("runs")
    for name in ("demo-20260101-000000", "demo-20260102-000000"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    assert command.default_out(resume=True).name == "demo-20260102-000000"


def test_interruption_before_the_start_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert invoke("--out", tmp_path / "out").exit_code == exit_codes.INTERRUPTED


def test_unexpected_error_is_not_taken_for_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise RuntimeError("surprise")

    monkeypatch.setattr(command, "_run", broken)
    result = invoke("--out", tmp_path / "out")
    assert result.exit_code == exit_codes.FAILED
    assert "surprise" in result.output


def test_explicit_options_are_told_from_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[frozenset[str]] = []

    def remember(_: DemoOptions, explicit: frozenset[str], **__: object) -> int:
        seen.append(explicit)
        return exit_codes.OK

    monkeypatch.setattr(command, "_run", remember)
    for arguments in ([], ["--samples", "4", "--no-baseline"]):
        assert invoke(*arguments).exit_code == exit_codes.OK
    assert seen == [frozenset(), frozenset({"samples", "baseline"})]
