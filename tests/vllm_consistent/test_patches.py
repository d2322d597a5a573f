"""The ledger: reason and lines for each patch, a signature check, once only, and removable."""

from __future__ import annotations

import dataclasses
import types

import pytest

from consistent_kernels.errors import ConfigurationError, UnsupportedError
from vllm_consistent.patches import configuration_error, ledger, request_check

PATCHES = (configuration_error.PATCH, request_check.PATCH)


class Owner:
    def method(self, a: int, b: int = 2) -> int:
        return a + b


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> ledger.Patch:
    module = types.ModuleType("fake_vllm_module")
    module.Owner = type("Owner", (Owner,), {"method": Owner.method})
    monkeypatch.setitem(__import__("sys").modules, "fake_vllm_module", module)
    monkeypatch.setattr(ledger, "_STOCK", {})
    return ledger.Patch(
        module="fake_vllm_module",
        owner="Owner",
        attribute="method",
        signature=("self", "a", "b"),
        reason="a test",
        lines="nowhere",
        removal="never",
        wrap=lambda stock: lambda self, a, b=2: 10 * stock(self, a, b),
    )


def call() -> int:
    return __import__("sys").modules["fake_vllm_module"].Owner().method(1)


def test_applies_once_and_is_removable(patch: ledger.Patch) -> None:
    ledger.apply(patch)
    ledger.apply(patch)
    assert call() == 30
    assert ledger.applied() == {"fake_vllm_module.Owner.method": "a test"}
    ledger.remove_all()
    assert call() == 3
    assert ledger.applied() == {}


def test_rejects_another_signature(patch: ledger.Patch) -> None:
    other = dataclasses.replace(patch, signature=("self", "a"))
    with pytest.raises(UnsupportedError, match=r"patch of fake_vllm_module\.Owner\.method"):
        ledger.apply(other)
    assert call() == 3


@pytest.mark.parametrize("entry", PATCHES, ids=lambda entry: entry.attribute)
def test_every_patch_says_why_where_and_until_when(entry: ledger.Patch) -> None:
    assert entry.reason
    assert entry.removal
    assert entry.lines.startswith("vllm/")


def test_a_wrapped_refusal_is_unwrapped() -> None:
    from pydantic import ConfigDict
    from pydantic.dataclasses import dataclass

    @dataclass(config=ConfigDict(arbitrary_types_allowed=True))
    class Config:
        x: int

        def __post_init__(self) -> None:
            raise ConfigurationError(["one", "two"])

    with pytest.raises(ValueError, match="one") as caught:
        Config(1)
    refusal = configuration_error.refusal_in(caught.value)
    assert isinstance(refusal, ConfigurationError)
    assert refusal.violations == ("one", "two")
    assert configuration_error.refusal_in(ValueError("other")) is None
