"""Without the switch the installed plugin changes nothing: stock vLLM's classes and bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

PROBE = Path(__file__).with_name("stock_probe.py")


@pytest.mark.parametrize("switch", [None, "0"])
def test_register_is_a_no_op_without_the_switch(
    monkeypatch: pytest.MonkeyPatch, switch: str | None
) -> None:
    from vllm_consistent import env, plugin, registration

    monkeypatch.delenv(env.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(env.SWITCH, switch)
    monkeypatch.setattr(registration, "_HOOKED", [])
    monkeypatch.setattr(plugin, "_hook", lambda: pytest.fail("hooked while off"))
    plugin.register()
    assert not registration.is_registered()


def test_off_is_stock_vllm(checkpoints: Callable[[str], Path]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_CONSISTENT"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    # Stock vLLM compiles its ranking of log-probs for half a minute; both states go without.
    environment["TORCHDYNAMO_DISABLE"] = "1"
    done = subprocess.run(
        [sys.executable, str(PROBE), str(checkpoints("qwen3"))],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["loaded"], "the entry point was not even loaded"
    assert result["same"], (result["without"], result["off"])
    stock = result["off"]
    assert not any("vllm_consistent" in name for name in stock["classes"])
    assert stock["worker"] == "CPUWorker"
    assert stock["sampler"] == "Sampler"
    # A launcher that asks an engine without the plugin gets no report, which it must refuse.
    assert stock["no_report"] in ("AttributeError", "NotImplementedError")
    assert stock["additional_config"] == {}
