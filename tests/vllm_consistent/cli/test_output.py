"""The output folder: refused before anything is written, one run at a time, streams kept apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from vllm_consistent.cli.demo import output
from vllm_consistent.cli.demo.errors import OutputFolderError
from vllm_consistent.cli.demo.output import OutputFolder


def test_a_new_or_empty_folder_is_fine(tmp_path: Path) -> None:
    OutputFolder(tmp_path).check_before_start(resume=False)
    OutputFolder(tmp_path / "new").check_before_start(resume=False)
    assert list(tmp_path.iterdir()) == []


def test_rejects_a_folder_with_anything_in_it(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(OutputFolderError, match="not empty; add --resume"):
        OutputFolder(tmp_path).check_before_start(resume=False)
    assert (tmp_path / "precious.txt").read_text() == "x"


def test_rejects_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputFolderError, match="must be a folder"):
        OutputFolder(tmp_path / "file").check_before_start(resume=False)


@pytest.mark.parametrize("folder", ["absent", "."])
def test_resume_rejects_a_folder_without_a_run(tmp_path: Path, folder: str) -> None:
    with pytest.raises(OutputFolderError, match="holds no run"):
        OutputFolder(tmp_path / folder).check_before_start(resume=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_resume_rejects_a_broken_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OutputFolderError, match=r"run\.json cannot be read"):
        OutputFolder(tmp_path).read_run()


def test_rejects_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputFolderError, match="is not writable"):
        OutputFolder(tmp_path / "file" / "out").open(0)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes to read-only folders too")
def test_rejects_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputFolderError, match="is not writable"):
            OutputFolder(tmp_path).open(0)
    finally:
        tmp_path.chmod(0o755)


def test_rejects_a_read_only_file_system() -> None:
    with pytest.raises(OutputFolderError, match="is not writable"):
        OutputFolder(Path("/proc/demo")).open(0)


def test_rejects_a_second_run_in_the_same_folder(tmp_path: Path) -> None:
    first = OutputFolder(tmp_path)
    first.open(0)
    with pytest.raises(OutputFolderError, match="another run"):
        OutputFolder(tmp_path).open(0)
    first.close()
    OutputFolder(tmp_path).open(0)


def test_rejects_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage(10**9))
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(OutputFolderError, match=r"need 3\.2 GB .* 1\.0 GB are free"):
            OutputFolder(folder).open(270_000_000)
    # Once there is room, the same command must not find the folder in use.
    assert list(tmp_path.iterdir()) == []
    OutputFolder(tmp_path).check_before_start(resume=False)


def test_a_refused_resume_keeps_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = OutputFolder(tmp_path)
    first.open(0)
    first.run.write_text("{}")
    first.close()
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage(0))
    with pytest.raises(OutputFolderError, match="are free"):
        OutputFolder(tmp_path).open(270_000_000)
    assert first.run.read_text() == "{}"
    assert first.logs.is_dir()


_CAPTURE = """
import os, sys
from pathlib import Path
from vllm_consistent.cli.demo.output import messages_to, private_copy
result = private_copy(sys.stdout)
print("before")
with messages_to(Path(sys.argv[1])):
    print("python noise")
    print("error noise", file=sys.stderr)
    os.write(1, b"native noise\\n")
    result.write("result\\n")
    result.flush()
print("after")
"""


def test_engine_messages_stay_out_of_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", _CAPTURE, log], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["before", "result", "after"]
    assert done.stderr == ""
    assert sorted(log.read_text().splitlines()) == ["error noise", "native noise", "python noise"]
