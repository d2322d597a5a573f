"""Engine = trainer on the CPU for block-FP8 Qwen3-MoE and Qwen3: FP8 here, masters there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_parity import MoeParityRelations
from parity import ParityRelations, rollout, sampled_scores, train_step, trainer_scores
from transformers import PreTrainedModel

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, compare_logprobs, push_weights
from train_bridge.masters import load_masters
from train_bridge.weights import exported_weights, weight_receipt

pytestmark = pytest.mark.engine


class TestQwen3MoeFp8OnCpu(MoeParityRelations):
    """16 experts, 4 a token; one dense layer among them; a checkpoint as Qwen publishes it."""

    family = "qwen3_moe_fp8"

    def test_contract_is_the_fp8_one(self, engine: Any) -> None:
        report = engine.consistency_report()
        assert report["contract"]["name"] == "moe_block_fp8_v1"
        assert {"fp8_gemm", "fp8_experts", "quantize_rows"} <= report["calls"].keys()
        assert "experts" not in report["contract"]["programs"]

    def test_checkpoint_and_its_masters_are_one_set_of_weights(
        self, engine: Any, trainer: PreTrainedModel, checkpoint: Path
    ) -> None:
        # As loaded from the file: masters of what our function quantized come back to its bits.
        from safetensors.torch import load_file

        push_weights(trainer, engine.llm)
        pushed = engine.llm.collective_rpc("weight_receipt")[0]["total"]
        engine.update_weights(load_file(checkpoint / "model.safetensors"))
        assert engine.llm.collective_rpc("weight_receipt")[0]["total"] == pushed

    def test_masters_are_quantized_by_the_engine_alike(
        self, engine: Any, trainer: PreTrainedModel
    ) -> None:
        train_step(trainer, torch.optim.AdamW(trainer.parameters(), lr=1e-3), rollout(engine, 31))
        masters = {name: p.detach().bfloat16() for name, p in trainer.named_parameters()}
        engine.update_weights(masters)
        served = engine.llm.collective_rpc("weight_receipt")[0]["total"]
        assert served == weight_receipt(trainer).digest.total
        samples = rollout(engine, 32)
        scores = trainer_scores(trainer, samples)
        assert_bitwise_equal(scores.detach(), sampled_scores(samples), "masters sent")

    def test_reload_by_vllm_serves_the_checkpoint_again(
        self, engine: Any, trainer: PreTrainedModel
    ) -> None:
        engine.update_weights({n: p.detach() * 1.5 for n, p in trainer.named_parameters()})
        total = weight_receipt(trainer).digest.total
        assert engine.llm.collective_rpc("weight_receipt")[0]["total"] != total
        engine.llm.collective_rpc("reload_weights")
        engine.reset_prefix_cache()
        assert engine.llm.collective_rpc("weight_receipt")[0]["total"] == total
        samples = rollout(engine, 35)
        scores = trainer_scores(trainer, samples)
        assert_bitwise_equal(scores.detach(), sampled_scores(samples), "reloaded")

    def test_scales_without_values_are_refused(self, engine: Any, trainer: PreTrainedModel) -> None:
        name = "model.layers.1.self_attn.k_proj.weight"
        weights = dict(exported_weights(trainer))
        weights[name] = trainer.get_parameter(name).detach()
        with pytest.raises(InvalidInputError, match="or the master alone"):
            engine.update_weights(weights)

    def test_control_other_scales_diverge(self, engine: Any, trainer: PreTrainedModel) -> None:
        weights = dict(exported_weights(trainer))
        name = "model.layers.0.self_attn.v_proj.weight_scale_inv"
        weights[name] = torch.nextafter(weights[name], torch.tensor(1.0))
        engine.update_weights(weights)
        served = engine.llm.collective_rpc("weight_receipt")[0]["total"]
        assert served != weight_receipt(trainer).digest.total, "the lowest bit of a scale counts"
        weights[name] = weights[name] * 1.01
        engine.update_weights(weights)
        samples = rollout(engine, 33)
        sampled, train = sampled_scores(samples), trainer_scores(trainer, samples)
        assert not compare_logprobs(sampled, train, torch.ones_like(sampled)).bitwise_equal

    def test_control_bf16_trainer_diverges(self, engine: Any, checkpoint: Path) -> None:
        samples = rollout(engine, 34)
        model = load_masters(checkpoint, torch.bfloat16)
        del model.config.served_quantization
        train = trainer_scores(bridge_model(model), samples)
        sampled = sampled_scores(samples)
        report = compare_logprobs(sampled, train, torch.ones_like(sampled))
        assert report.mismatched_tokens > 0.9 * report.num_tokens


class TestQwen3Fp8OnCpu(ParityRelations):
    """Dense, power-of-two scales; what layouts of a batch and controls show is shown above."""

    family = "qwen3_fp8"
    test_trainer_layouts_equal_the_engine = None
    test_update_from_equal_weights_changes_no_bit = None
    test_control_stock_forward_diverges = None
    test_control_temperature_on_one_side_diverges = None
    test_control_one_flipped_bit_diverges = None
    test_control_unpushed_update_diverges = None
    test_lost_parameter_is_refused = None

    def test_contract_is_the_fp8_one(self, engine: Any) -> None:
        assert engine.contract.name == "dense_block_fp8_v1"
        assert engine.contract.model["quantization.scale_format"] == "ue8m0"

    def test_every_scale_that_travels_is_a_power_of_two(self, trainer: PreTrainedModel) -> None:
        scales = [t for name, t in exported_weights(trainer) if name.endswith("_scale_inv")]
        assert len(scales) == 7 * trainer.config.num_hidden_layers
        assert all(bool((scale.frexp().mantissa == 0.5).all()) for scale in scales)
