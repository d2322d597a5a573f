"""Engine against trainer on CUDA under vLLM's V1 model runner. A process of its own: the runner is
chosen by the environment.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parity import ParityRelations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _v1_runner() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        yield


class TestLlamaV1Runner(ParityRelations):
    """Compiled, full and piecewise graphs."""

    family, device = "llama", "cuda"
    engine_args = {  # noqa: RUF012
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 8, 16]},
    }

    def test_runner_is_v1(self, live_engine: object) -> None:
        assert live_engine.consistency_report()["runner"] == "V1"
