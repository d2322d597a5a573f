"""The stock pair's process: asked and answered over pipes, and named when it dies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_consistent.cli.demo import stock
from vllm_consistent.cli.demo.errors import RunError
from vllm_consistent.cli.demo.speed import Rates

_WORKER = f"""#!{sys.executable}
import json, pathlib, sys
sys.stderr.write("loading\\n")
pathlib.Path(sys.argv[-1]).write_text(json.dumps({{"steps": [], "start_seconds": 1.5}}))
print("{{}}", flush=True)
for number, _ in enumerate(sys.stdin):
    if number == 2:
        sys.exit("out of memory")
    print(json.dumps({{"rollout": 10.0 + number, "decode": None}}), flush=True)
"""


def pair(folder: Path, monkeypatch: pytest.MonkeyPatch, worker: str) -> stock.StockPair:
    program = folder / "worker"
    program.write_text(worker)
    program.chmod(0o755)
    monkeypatch.setattr(stock.sys, "executable", str(program))
    monkeypatch.setattr(stock.torch.cuda, "is_available", lambda: False)
    arguments: dict[str, Any] = {"samples": 2, "max_tokens": 8, "temperature": 1.0, "work": {}}
    return stock.StockPair(
        model=Path("/model"), engine={}, steps=[], folder=folder / "logs", **arguments
    )


def test_stock_process_answers_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = pair(tmp_path, monkeypatch, _WORKER)
    assert live.result == stock.StockResult({}, 1.5)
    assert [live.time_rollout(), live.time_rollout()] == [Rates(10.0, None), Rates(11.0, None)]
    with pytest.raises(RunError, match=r"(?s)ended with code 1;.*out of memory.*--no-baseline"):
        live.time_rollout()
    live.close()
    again = pair(tmp_path, monkeypatch, _WORKER)
    again.close()
    assert again._process.poll() is not None


def test_stock_process_that_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"(?s)ended with code 3;.*no such model"):
        pair(tmp_path, monkeypatch, "#!/bin/sh\necho no such model >&2\nexit 3\n")
