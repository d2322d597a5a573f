"""Our own section of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl", reason="the verl extra is not installed")

pytestmark = pytest.mark.verl


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_mismatch", "ignore"),
        ("on_mismatch", None),
        ("on_missmatch", "warn"),
        ("capture_dir", None),
        ("capture_samples", 0),
        ("capture_samples", "many"),
        ("contract_digest", 5),
    ],
)
def test_a_wrong_value_is_named(
    name: str, value: Any, broken_keys: Callable[..., list[str]]
) -> None:
    assert broken_keys({f"true_on_policy.{name}": value}) == [f"true_on_policy.{name}"]


def test_right_values_are_accepted(broken_keys: Callable[..., list[str]]) -> None:
    section = {"on_mismatch": "warn", "capture_samples": 1, "contract_digest": None}
    assert broken_keys({f"true_on_policy.{name}": value for name, value in section.items()}) == []
