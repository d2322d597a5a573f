"""The demo's arguments: defaults, checks, and what a resumed run may change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from consistent_kernels.errors import ConfigurationError

BUNDLED_MODEL = "smollm2-135m-instruct"
# Fixed by the first run of a folder: other values would not continue the same experiment.
FIXED = ("model", "data", "prompts", "samples", "max_tokens", "temperature", "seed", "baseline")


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Arguments of one run, checked by `check`.

    Attributes:
        steps: optimizer steps in all, those before a resume included.
        prompts: problems per step.
        samples: responses per problem, a GRPO group.
        max_tokens: longest response, in tokens.
        temperature: sampling temperature, applied by engine and trainer alike.
        model: BUNDLED_MODEL or a Hugging Face model folder.
        data: JSONL of {"prompt", "answer"}, or None for arithmetic.
        out: folder for metrics, report and checkpoints.
        seed: fixes problems and samples.
        baseline: also run the stock pair.
        resume: continue from the checkpoint in `out`.
    """

    steps: int = 5
    prompts: int = 4
    samples: int = 4
    max_tokens: int = 40
    temperature: float = 1.0
    model: str = BUNDLED_MODEL
    data: Path | None = None
    out: Path = Path("runs/demo")
    seed: int = 0
    baseline: bool = True
    resume: bool = False

    def check(self) -> None:
        """Raise ConfigurationError listing every argument that cannot be used."""
        # Imported here: `--help` must not wait for torch.
        from consistent_kernels.protocol.temperature import (
            HIGHEST_TEMPERATURE,
            LOWEST_TEMPERATURE,
            is_shared_temperature,
        )

        violations = [
            f"--{name} must be at least {low}, got {getattr(self, name)}"
            for name, low in (("steps", 1), ("prompts", 1), ("samples", 2), ("seed", 0))
            if getattr(self, name) < low
        ]
        if self.samples == 1:
            violations.append("GRPO compares the samples of one prompt: it needs two or more")
        if self.max_tokens < 1:
            violations.append(f"--max-tokens must be at least 1, got {self.max_tokens}")
        if self.temperature == 0 or not is_shared_temperature(self.temperature):
            violations.append(
                f"--temperature must be from {LOWEST_TEMPERATURE} (vLLM samples lower ones at "
                f"that) to {HIGHEST_TEMPERATURE} (it refuses higher ones), got {self.temperature}"
            )
        if self.data is not None and not self.data.is_file():
            violations.append(f"--data must be an existing file, got {self.data}")
        if self.model != BUNDLED_MODEL and not (Path(self.model) / "config.json").is_file():
            violations.append(
                f"--model must be {BUNDLED_MODEL!r} or a folder that holds a config.json, "
                f"got {self.model}"
            )
        if violations:
            raise ConfigurationError(violations, "demo")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; paths are absolute, so that a run resumes from any folder."""
        record = dataclasses.asdict(self)
        record["data"] = str(self.data.resolve()) if self.data else None
        record["out"] = str(self.out.resolve())
        if self.model != BUNDLED_MODEL:
            record["model"] = str(Path(self.model).resolve())
        return record


_RECORDED: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "data": (str, type(None)),
    "prompts": int,
    "samples": int,
    "max_tokens": int,
    "temperature": (int, float),
    "seed": int,
    "baseline": bool,
    "steps": int,
}


def _check_recorded(recorded: object) -> None:
    """Raise ConfigurationError naming every option that run.json lacks or holds in another type."""
    known = recorded if isinstance(recorded, dict) else {}
    violations = [
        f"{name} is {'missing' if name not in known else repr(known[name])}"
        for name, kind in _RECORDED.items()
        if not isinstance(known.get(name, _RECORDED), kind)
        or (isinstance(known[name], bool) and kind is not bool)
    ]
    if violations:
        raise ConfigurationError(
            [
                f"{line}: run.json is damaged; start a new run in another --out"
                for line in violations
            ],
            "demo --resume",
        )


def merge_for_resume(
    given: DemoOptions, recorded: dict[str, Any], explicit: frozenset[str]
) -> DemoOptions:
    """Return the options of a resumed run: the recorded ones, with what may change taken as given.

    Args:
        given: this command line, defaults included.
        recorded: `to_dict()` of the run that wrote the checkpoint.
        explicit: names of the options that this command line really gave.

    Raises:
        ConfigurationError: an explicit option contradicts a fixed one, or the record is damaged;
            all are listed.
    """
    _check_recorded(recorded)
    asked = given.to_dict()
    violations = [
        f"--{name.replace('_', '-')} was {recorded[name]!r} when this run began and cannot become "
        f"{asked[name]!r}; leave it out, or start a new run in another --out"
        for name in FIXED
        if name in explicit and asked[name] != recorded[name]
    ]
    if violations:
        raise ConfigurationError(violations, "demo --resume")
    kept: dict[str, Any] = {name: recorded[name] for name in FIXED}
    kept["data"] = Path(kept["data"]) if kept["data"] else None
    steps = given.steps if "steps" in explicit else recorded["steps"]
    return dataclasses.replace(given, steps=steps, **kept)
