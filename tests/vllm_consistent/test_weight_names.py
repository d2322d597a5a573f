"""Names of served weights: experts stacked as transformers has them, one by one as files do."""

from __future__ import annotations

import torch

from vllm_consistent.weights.names import checkpoint_parts


def test_checkpoint_parts_are_views_that_cover_the_stacks() -> None:
    views = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.arange(24.0).view(2, 4, 3),
        "model.layers.0.mlp.experts.down_proj": torch.arange(12.0).view(2, 3, 2),
        "model.layers.0.mlp.gate.weight": torch.zeros(2, 3),
    }
    parts = checkpoint_parts(views)
    assert list(parts) == list(views)[:2]
    gate_up = parts["model.layers.0.mlp.experts.gate_up_proj"]
    assert set(gate_up) == {
        f"model.layers.0.mlp.experts.{expert}.{side}_proj.weight"
        for expert in (0, 1)
        for side in ("gate", "up")
    }
    stacked = views["model.layers.0.mlp.experts.gate_up_proj"]
    up = gate_up["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert torch.equal(up, stacked[1, 2:])
    up.zero_()
    assert not bool(stacked[1, 2:].any()), "a part is a view into what is served"
    down = parts["model.layers.0.mlp.experts.down_proj"]
    assert sum(part.numel() for part in (gate_up | down).values()) == 24 + 12
