"""What of a model's weights a checkpoint lacks, experts stacked or one by one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_consistent.weights.checkpoint import missing_weights

VIEWS = {
    "model.norm.weight": torch.ones(4),
    "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 6, 4),
}
ONE_BY_ONE = {
    f"model.layers.0.mlp.experts.{expert}.{leaf}.weight": torch.ones(3, 4)
    for expert in range(2)
    for leaf in ("gate_proj", "up_proj")
}


def test_every_name_counts_in_whichever_file_it_is(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(VIEWS.items()):
        save_file({name: tensor}, tmp_path / f"{number}.safetensors")
    assert missing_weights(tmp_path, VIEWS) == []
    (tmp_path / "0.safetensors").unlink()
    assert missing_weights(tmp_path, VIEWS) == ["model.norm.weight"]


def test_experts_may_come_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(ONE_BY_ONE | {"model.norm.weight": torch.ones(4)}, file)
    assert missing_weights(tmp_path, VIEWS) == []
    save_file({"model.norm.weight": torch.ones(4)}, file)
    assert missing_weights(tmp_path, VIEWS) == ["model.layers.0.mlp.experts.gate_up_proj"]


def test_a_folder_without_safetensors_is_not_judged(tmp_path: Path) -> None:
    assert missing_weights(tmp_path, VIEWS) == []
