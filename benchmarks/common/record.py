"""Where a result comes from: hardware, versions and commit, the same fields in every row."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

from consistent_kernels.errors import ConfigurationError
from vllm_consistent.cli.demo.hardware import hardware, versions

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What every row carries.

    Attributes:
        hardware: the GPU's name, or processor and number of cores.
        versions: of every distribution that decides bits.
        commit: hash of the tree that ran, "-dirty" appended where it held changes.
    """

    hardware: str
    versions: dict[str, str]
    commit: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in a row."""
        return dataclasses.asdict(self)


def provenance(commit: str | None = None) -> Provenance:
    """Record this machine, these versions and `commit`, or the checkout's own commit.

    Raises:
        ConfigurationError: no commit was given and the tree is not a git checkout.
    """
    facts = hardware()
    name = facts.get("gpu") or f"{facts['processor']}, {facts['cores']} cores"
    return Provenance(name, versions(), commit or _head())


def _head() -> str:
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigurationError(
            [f"{ROOT} is not a git checkout: give --commit, a result must name its sources"],
            "benchmark",
        ) from error
    # A result file changes while the benchmark writes rows into it.
    changed = [line for line in changes.splitlines() if "benchmarks/results/" not in line]
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()
