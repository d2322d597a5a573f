"""Engine = trainer on CUDA for Qwen3-MoE, with vLLM's default CUDA graphs."""

import pytest
import torch
from parity import ParityRelations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestQwen3MoeFullAndPiecewise(ParityRelations):
    """Full graphs for decode, piecewise for mixed batches; the layout of rows is made in them."""

    family, device = "qwen3_moe", "cuda"
    flipped = "model.layers.0.mlp.gate.weight"
    engine_args = {  # noqa: RUF012
        "compilation_config": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": [1, 2, 8, 16],
        }
    }
