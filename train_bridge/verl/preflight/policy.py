"""Rules about our own section, `true_on_policy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from train_bridge.verl.comparison import ABORT, WARN, MismatchPolicy
from train_bridge.verl.preflight.view import View, Violation, is_count

_SECTION = "true_on_policy"
_WRITTEN = "captures are written there"


def violations(view: View) -> Iterator[Violation]:
    """Yield keys that do not exist, and values that none may have."""
    known = {field.name: field.default for field in dataclasses.fields(MismatchPolicy)}
    section = view.value(_SECTION, {})
    for name in section or ():
        if name not in known:
            why = "there is no such key"
            yield Violation(
                f"{_SECTION}.{name}", view.value(f"{_SECTION}.{name}"), why, f"one of {[*known]}"
            )

    def given(name: str) -> tuple[str, Any]:
        key = f"{_SECTION}.{name}"
        return key, view.value(key, known[name])

    key, value = given("on_mismatch")
    if value not in (ABORT, WARN):
        yield Violation(key, value, "it says what a mismatch does", f"{ABORT!r} or {WARN!r}")
    key, value = given("capture_dir")
    if not isinstance(value, str) or not value.strip():
        yield Violation(key, value, _WRITTEN, "a folder")
    key, value = given("capture_samples")
    if not is_count(value):
        yield Violation(key, value, "so many samples are kept", "an integer of at least 1")
    key, value = given("contract_digest")
    if value is not None and not isinstance(value, str):
        yield Violation(
            key,
            value,
            "a digest is text",
            "what `vllm-consistent doctor` prints, in quotes; or null",
        )
