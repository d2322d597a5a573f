"""Engine against trainer for a mixture of experts: `parity`, and the choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import ParityRelations, prompts
from transformers import PreTrainedModel

from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import token_logprobs


class MoeParityRelations(ParityRelations):
    """For a CPU, where every call of the router passes through Python."""

    flipped = "model.layers.0.mlp.gate.weight"

    def test_routing_is_equal_without_replay(
        self, engine: Any, trainer: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from train_bridge import moe as trainer_side
        from vllm_consistent.layers import fused_moe as engine_side

        routed: dict[str, list[torch.Tensor]] = {"engine": [], "trainer": []}
        of_engine, of_trainer = engine_side.router, trainer_side._router

        def on_engine(*args: Any, **kwargs: Any) -> Any:
            result = of_engine(*args, **kwargs)
            routed["engine"].append(result[0])
            return result

        def on_trainer(*args: Any) -> Any:
            result = of_trainer(*args)
            routed["trainer"].append(result[0])
            return result

        sequence = prompts(9, (129,))[0]
        monkeypatch.setattr(engine_side, "router", on_engine)
        monkeypatch.setattr(trainer_side, "_router", on_trainer)
        engine.score([sequence])
        token_logprobs(trainer, torch.tensor([sequence]))
        assert len(routed["trainer"]) == 2, "two of three layers have experts"
        for ours, theirs in zip(routed["engine"], routed["trainer"], strict=True):
            assert_bitwise_equal(ours, theirs)
            assert len(ours.unique()) > 8, "many experts take part"
