"""Engine = trainer on CUDA, for head dims 64 and 128, eager, compiled and with every graph mode."""

import pytest
import torch
from parity import ParityRelations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def graphs(mode: str) -> dict:
    """Engine arguments that select a CUDA graph mode of a compiled engine."""
    return {
        "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 8, 16]}
    }


class TestLlamaEager(ParityRelations):
    """Head dim 64."""

    family, device = "llama", "cuda"
    engine_args = {"enforce_eager": True}  # noqa: RUF012


class TestLlamaFullAndPiecewise(ParityRelations):
    """vLLM's default: full graphs for decode, piecewise for mixed batches."""

    family, device = "llama", "cuda"
    engine_args = graphs("FULL_AND_PIECEWISE")


class TestQwen2Piecewise(ParityRelations):
    """Biases; compiled, piecewise graphs."""

    family, device = "qwen2", "cuda"
    engine_args = graphs("PIECEWISE")


class TestQwen3Full(ParityRelations):
    """Head dim 128; one full graph for every batch."""

    family, device = "qwen3", "cuda"
    engine_args = graphs("FULL")


class TestQwen3FullDecodeOnly(ParityRelations):
    """Head dim 128; full graphs for decode, compiled without graphs otherwise."""

    family, device = "qwen3", "cuda"
    engine_args = graphs("FULL_DECODE_ONLY")


class TestQwen3CompiledWithoutGraphs(ParityRelations):
    """Head dim 128; compiled, no graphs."""

    family, device = "qwen3", "cuda"
    engine_args = graphs("NONE")
