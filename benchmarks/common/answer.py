"""The answer to a one-off question: one JSON object that says where it comes from."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.record import provenance


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of `--out` and `--commit`.

    Args:
        doc: the script's docstring; its first line is the question.
    """
    made = argparse.ArgumentParser(description=question(doc))
    made.add_argument("--out", type=Path, help="write the JSON here as well as to stdout")
    made.add_argument("--commit", help="hash of the sources, where this is no git checkout")
    return made


def question(doc: str) -> str:
    """Return the first line of a script's docstring."""
    return doc.splitlines()[0]


def start(doc: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return question, hardware, versions and commit, before anything is measured.

    Raises:
        ConfigurationError: no `--commit` was given and the tree is not a git checkout.
    """
    return {"question": question(doc)} | provenance(args.commit).to_dict()


def save(answer: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the answer to `--out`, where it was given."""
    if args.out:
        args.out.write_text(json.dumps(answer, indent=1) + "\n")


def publish(answer: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the answer to stdout, and to `--out` where it was given."""
    sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    save(answer, args)
