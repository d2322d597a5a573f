"""Engine = trainer on the CPU where two data parallel ranks of the engine share the experts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import expert_parallel_engine as engine
import pytest
from tiny_models import save_tiny_model

pytestmark = pytest.mark.engine


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; both run at once."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")
    port = str(_free_port())
    path = os.pathsep.join(item for item in sys.path if item)
    processes = [
        subprocess.Popen(
            [sys.executable, engine.__file__, str(checkpoint), str(folder), str(rank), port],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"stderr{rank}").open("w"),
        )
        for rank in range(engine.RANKS)
    ]
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = "\n".join((folder / f"stderr{r}").read_text()[-2000:] for r in range(engine.RANKS))
    assert codes == [0] * engine.RANKS, said
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(engine.RANKS)]


def test_train_equals_infer_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    # Ranks have other requests, of other lengths: one of them runs dummy batches at the end.
    assert [found["start"]["tokens"] for found in ranks] == [12, 27]
    for found in ranks:
        for when in ("start", "update"):
            assert found[when]["mean"] > -3, "flat logits hide mismatches"
            assert found[when]["trainer"] == 0, (when, found)
            assert found[when]["rescored"] == 0, (when, found)


def test_each_rank_proves_its_share_of_an_update(ranks: list[dict[str, Any]]) -> None:
    assert [found["held"] for found in ranks] == [[[0, 8]], [[8, 16]]]
    for found in ranks:
        assert found["version"] == 1
        assert "layers.0.mlp.experts.down_proj" in found["lost"]


def test_control_an_update_that_was_not_pushed_shows(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["control"]["trainer"] > 0
        assert found["control"]["rescored"] == 0
