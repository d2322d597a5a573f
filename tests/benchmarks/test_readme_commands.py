"""The commands that the documentation names for the benchmarks start as they are written there."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.common.record import ROOT
from benchmarks.rollout.works import WORKS

DOCUMENTS = (
    "README.md",
    "benchmarks/README.md",
    "docs/performance.md",
    "docs/numerics.md",
)
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*python (?:-m )?benchmarks[./][^`\n]*")

# Runs each command's file as Python would, with --help alone: sys.path[0] as `python FILE` and
# `python -m MODULE` set it, and none of the modules that an earlier command found.
_CHILD = """
import contextlib, io, json, os, runpy, sys
ours = ("benchmarks", "attention_cases")
base = sys.path[1:]
for words in json.load(sys.stdin):
    for name in [n for n in sys.modules if n.split(".")[0] in ours]:
        del sys.modules[name]
    at = words.index("python")
    variables = dict(word.split("=", 1) for word in words[:at])
    paths = [path for path in variables.get("PYTHONPATH", "").split(":") if path]
    words = words[at + 1 :]
    module = words[1] if words[0] == "-m" else None
    place = os.getcwd() if module else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [place, *map(os.path.abspath, paths), *base]
    sys.argv = [module or words[0], "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    print(json.dumps([code, said.getvalue()]))
"""


def commands() -> dict[str, list[str]]:
    """Every command to its words, each once."""
    found = {}
    for name in DOCUMENTS:
        text = (ROOT / name).read_text().replace("\\\n", " ")
        for match in _COMMAND.finditer(text):
            found[match.group(0).strip()] = shlex.split(match.group(0), comments=True)
    return found


def started(given: list[list[str]]) -> list[tuple[object, str]]:
    """(exit code or error, what was printed) of each command with --help as its only option."""
    # `kernels` is what an installation puts on the path; the repository's root is not.
    rest = [p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "tests/support")]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*rest, str(ROOT / "kernels")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_documented_commands_start_and_know_their_options() -> None:
    found = commands()
    assert len(found) >= 10
    # One start for each file and path, whatever the options.
    targets = {tuple(words[: words.index("python") + 3]): words for words in found.values()}
    answers = dict(zip(targets, started(list(targets.values())), strict=True))
    for command, words in found.items():
        code, said = answers[tuple(words[: words.index("python") + 3])]
        assert code == 0, f"{command}: {code}"
        text = re.sub(r"\s+", " ", said)
        given = {word for word in words if word.startswith("--")}
        for option in given:
            assert option in text, f"{command}: no {option}"
        usage = re.sub(r"\[[^]]*\]", "", text.split("options:")[0]) if "usage:" in text else ""
        assert set(re.findall(r"--[a-z-]+", usage)) <= given, f"{command} lacks an option: {usage}"


def test_control_a_command_that_cannot_start_shows() -> None:
    (answer,) = started([["python", "benchmarks/decode_key_splits/run.py"]])
    assert answer[0] == "ModuleNotFoundError: No module named 'benchmarks'"


def test_documented_works_exist() -> None:
    known = {work.key for work in WORKS} | {work.model for work in WORKS}
    named = {
        word
        for words in commands().values()
        for option, word in itertools.pairwise(words)
        if option == "--work"
    }
    assert named
    assert named <= known
