"""The engine's attention refuses what the contract does not say."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from consistent_kernels.errors import ContractMismatchError
from vllm_consistent.attention import backend


class OneContract:
    model: ClassVar = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "sliding_window": None}

    def implementation(self, op: str) -> str:
        return "reference"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "current_contract", lambda layer: OneContract())

    def make(heads: int = 4, kv_heads: int = 2, window: int | None = None) -> Any:
        return backend.ConsistentAttentionImpl(
            heads, 64, 0.125, kv_heads, None, window, kv_cache_dtype="auto"
        )

    return make


def test_layers_of_the_contract_are_built(build: Any) -> None:
    assert build().params.sliding_window is None


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ({"window": 16}, "sliding_window=16 in vLLM, None in the contract"),
        ({"heads": 8, "kv_heads": 4}, "num_heads=8 in vLLM, 4 in the contract; num_kv_heads=4"),
    ],
)
def test_rejects_a_layer_that_the_contract_does_not_describe(
    build: Any, layer: dict[str, int], text: str
) -> None:
    with pytest.raises(ContractMismatchError, match=text):
        build(**layer)
