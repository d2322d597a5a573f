"""Engine = trainer on the CPU, for each dense family."""

import pytest
from parity import ParityRelations

pytestmark = pytest.mark.engine


class TestLlamaOnCpu(ParityRelations):
    """GQA with an odd group, tied embeddings."""

    family = "llama"


class TestQwen2OnCpu(ParityRelations):
    """Biases on q, k, v; tied embeddings."""

    family = "qwen2"


class TestQwen3OnCpu(ParityRelations):
    """q/k norms, head dim 128, an untied head."""

    family = "qwen3"
