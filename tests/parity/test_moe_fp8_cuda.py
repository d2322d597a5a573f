"""Engine = trainer on CUDA for block-FP8 Qwen3-MoE, with vLLM's default CUDA graphs."""

from typing import Any

import pytest
import torch
from parity import ParityRelations
from transformers import PreTrainedModel

from train_bridge.weights import weight_receipt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestQwen3MoeFp8FullAndPiecewise(ParityRelations):
    """Full graphs for decode, piecewise for mixed batches; few rows a step, so few kernels."""

    family, device = "qwen3_moe_fp8", "cuda"
    flipped = "model.layers.0.mlp.gate.weight"
    engine_args = {  # noqa: RUF012
        "max_num_batched_tokens": 512,
        "compilation_config": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": [1, 2, 8, 16],
        },
    }

    def test_masters_are_quantized_by_the_engine_alike(
        self, engine: Any, trainer: PreTrainedModel
    ) -> None:
        masters = {name: p.detach().bfloat16() for name, p in trainer.named_parameters()}
        engine.update_weights(masters)
        served = engine.llm.collective_rpc("weight_receipt")[0]["total"]
        assert served == weight_receipt(trainer).digest.total
