"""The random checkpoints: peaked, repeatable, complete or absent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.rollout import models
from benchmarks.rollout.models import MODELS, TINY_MODELS, checkpoint, random_checkpoint
from benchmarks.rollout.prompts import RandomPrompts
from train_bridge.masters import load_masters

SHAPES = {name: shape for name, shape in TINY_MODELS.items() if shape is not None}


@pytest.mark.parametrize("name", SHAPES)
def test_random_checkpoint_is_peaked_whole_and_repeatable(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    folder = random_checkpoint(shape, tmp_path / "a")
    model = load_masters(folder, torch.float32)
    assert model.config.tie_word_embeddings == shape.tie_word_embeddings
    ids = torch.randint(16, shape.vocab_size, (4, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.std().item() == pytest.approx(10.0, rel=0.25)
    scores = logits.log_softmax(-1)
    mean = (scores.exp() * scores).sum(-1).mean().item()
    assert -3 < mean < -0.3, "neither flat nor one certain token"
    # A tied head must not simply give the last token again.
    assert (logits.argmax(-1) == ids).float().mean().item() < 0.2
    again = random_checkpoint(shape, tmp_path / "b")
    for file in folder.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_a_checkpoint_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    assert random_checkpoint(SHAPES["smollm2"], tmp_path / "done") == tmp_path / "done"
    assert list((tmp_path / "done").iterdir()) == []


def test_an_interrupted_checkpoint_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(shape: object, folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        random_checkpoint(SHAPES["smollm2"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_says_what_memory_is_planned_with(tmp_path: Path) -> None:
    found = checkpoint("qwen3_8b", tmp_path, shapes=TINY_MODELS)
    shape = SHAPES["qwen3_8b"]
    assert found.kv_bytes == 2 * 2 * shape.num_hidden_layers * 2 * shape.head_dim
    assert found.prompts == RandomPrompts(shape.vocab_size)
    index = json.loads((found.path / "model.safetensors.index.json").read_text())
    assert found.weight_bytes >= index["metadata"]["total_size"]


def test_shapes_are_those_of_the_published_models() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in AutoModelForCausalLM.from_config(s.config()).parameters())
            for name, s in MODELS.items()
            if s is not None
        }
    # The model cards: 8.2B, and 0.6B of which 0.44B are no embeddings.
    assert counts["qwen3_8b"] / 1e9 == pytest.approx(8.19, abs=0.01)
    assert counts["qwen3_0_6b"] / 1e9 == pytest.approx(0.596, abs=0.001)
    # 30.5B with 48 layers: 48 / 8 of the layers here, and the two embeddings of 0.31B.
    embeddings = 2 * 151_936 * 2048
    assert (counts["qwen3_30b_a3b"] - embeddings) * 6 + embeddings == pytest.approx(
        30.5e9, rel=2e-3
    )
    assert math.isclose(MODELS["qwen3_8b"].config().rope_parameters["rope_theta"], 1e6)


def test_experts_stand_one_by_one_as_published(tmp_path: Path) -> None:
    found = checkpoint("qwen3_30b_a3b", tmp_path, shapes=TINY_MODELS)
    names = json.loads((found.path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    written = dict(models.random_weights(TINY_MODELS["qwen3_30b_a3b"]))
    layer = model.model.layers[1].mlp.experts
    up = written["model.layers.1.mlp.experts.7.up_proj.weight"]
    assert torch.equal(layer.gate_up_proj[7, 64:], up)


def test_a_block_fp8_checkpoint_is_as_qwen_publishes_them(tmp_path: Path) -> None:
    found = checkpoint("qwen3_30b_a3b_fp8", tmp_path, shapes=TINY_MODELS)
    config = json.loads((found.path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert "model.layers.1.mlp.gate" in config["modules_to_not_convert"]
    written = dict(models.random_weights(TINY_MODELS["qwen3_30b_a3b_fp8"]))
    for name in ("model.layers.1.mlp.experts.7.up_proj", "model.layers.0.self_attn.q_proj"):
        assert written[f"{name}.weight"].dtype == torch.float8_e4m3fn
        assert written[f"{name}.weight_scale_inv"].dtype == torch.float32
    for name in ("model.layers.1.mlp.gate", "lm_head", "model.norm"):
        assert written[f"{name}.weight"].dtype == torch.bfloat16
    model = load_masters(found.path, torch.bfloat16)
    assert model.config.served_quantization == config
