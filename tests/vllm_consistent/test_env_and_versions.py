"""The switch and the supported range."""

from __future__ import annotations

import pytest

from consistent_kernels.errors import ConfigurationError, UnsupportedError
from vllm_consistent import env
from vllm_consistent.versions import check_vllm_version


@pytest.mark.parametrize(
    ("value", "on"),
    [(None, False), ("", False), ("0", False), ("false", False), ("1", True), (" True ", True)],
)
def test_switch_reads(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv(env.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(env.SWITCH, value)
    assert env.enabled() is on


@pytest.mark.parametrize("value", ["yes", "2", "on"])
def test_switch_rejects_a_misspelt_value(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.SWITCH, value)
    with pytest.raises(ConfigurationError, match=f"VLLM_CONSISTENT='{value}' is neither on"):
        env.enabled()


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cpu"])
def test_supported_version_passes(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.25.0", "0.25.10", "0.26.0", "0.32.0", "0.25.1rc1"])
def test_rejects_a_version_outside_the_range(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"vLLM .* is not supported; supported: 0\.25\.1"):
        check_vllm_version(version)


def test_register_raises_for_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from vllm_consistent import plugin, registration

    monkeypatch.setenv(env.SWITCH, "1")
    monkeypatch.setattr(registration, "_HOOKED", [])
    monkeypatch.setattr(vllm, "__version__", "0.26.0")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.26\.0"):
        plugin.register()
    assert not registration.is_registered()
