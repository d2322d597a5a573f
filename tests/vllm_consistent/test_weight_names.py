"""Names of served weights: experts stacked as transformers has them, one by one as files do."""

from __future__ import annotations

import torch

from vllm_consistent.weights.names import (
    HeldExperts,
    checkpoint_parts,
    expected_shapes,
    hf_views,
)

LEAVES = ("gate", "up")


def test_checkpoint_parts_are_views_that_cover_the_stacks() -> None:
    views = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.arange(24.0).view(2, 4, 3),
        "model.layers.0.mlp.experts.down_proj": torch.arange(12.0).view(2, 3, 2),
        "model.layers.0.mlp.gate.weight": torch.zeros(2, 3),
    }
    parts = checkpoint_parts(views, {})
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


def test_scales_of_experts_have_the_names_of_published_ones() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    scales = torch.arange(12.0).view(2, 2, 3)
    parts = checkpoint_parts({name: scales}, {})[name]
    gate, up = (f"model.layers.0.mlp.experts.1.{side}_proj.weight_scale_inv" for side in LEAVES)
    assert torch.equal(parts[gate], scales[1, :1])
    assert torch.equal(parts[up], scales[1, 1:])
    assert len(parts) == 4


def test_scales_of_fused_weights_split_by_blocks() -> None:
    layer = torch.nn.Module()
    layer.output_partition_sizes = [256, 128, 128]
    layer.weight = torch.nn.Parameter(torch.zeros(512, 128), requires_grad=False)
    scale = torch.arange(4.0)[:, None]
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"qkv_proj": layer})})
    views = hf_views(model)
    assert views["attn.q_proj.weight"].shape == (256, 128)
    assert views["attn.q_proj.weight_scale_inv"].flatten().tolist() == [0, 1]
    assert views["attn.v_proj.weight_scale_inv"].flatten().tolist() == [3]


def test_a_share_of_the_experts_keeps_its_names_and_takes_all() -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    views = {name: torch.zeros(2, 3, 2), "norm.weight": torch.zeros(3)}
    held = {name: HeldExperts(slice(2, 4), 5)}
    parts = checkpoint_parts(views, held)[name]
    assert list(parts) == [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (2, 3)]
    shapes = expected_shapes(views, held)
    assert shapes[name] == (5, 3, 2)
    assert shapes["norm.weight"] == (3,)
    single = {shape for key, shape in shapes.items() if key not in views}
    assert single == {(3, 2)}
    assert len(shapes) == 2 + 5
