"""Bridged block-FP8 models: masters, quantized once a version, exported as files hold them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp2_rank import shard, two_steps
from safetensors.torch import load_file
from tiny_models import save_tiny_model, tiny_model

from consistent_kernels import counters
from consistent_kernels.errors import ConfigurationError, StaleWeightsError
from consistent_kernels.protocol import state_digest
from consistent_kernels.quantization import dequantize_blocks
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, consistency_report, token_logprobs, weight_version
from train_bridge.hf import bridge_state
from train_bridge.masters import load_masters
from train_bridge.weights import check_prepared, exported_weights, weight_receipt

FAMILIES = ("qwen3_fp8", "qwen3_moe_fp8")
IDS = torch.randint(3, 1280, (2, 19), generator=torch.Generator().manual_seed(1))
NAME = "model.layers.1.mlp.gate_proj.weight"
OUT_PROJ = "model.layers.1.self_attn.o_proj.weight"


def scores(model: torch.nn.Module) -> torch.Tensor:
    return token_logprobs(model, IDS).log_probs


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def test_masters_export_the_checkpoint_they_came_from(checkpoint: Path) -> None:
    published = load_file(checkpoint / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        model = bridge_model(load_masters(checkpoint, dtype))
        assert {p.dtype for p in model.parameters()} == {dtype}
        exported = dict(exported_weights(model))
        shared = published.keys() & exported.keys()
        assert len(shared) > 20
        for name in shared:
            assert_bitwise_equal(exported[name], published[name], name)
        for name, values in exported.items():
            assert (f"{name}_scale_inv" in exported) == (values.dtype == torch.float8_e4m3fn)


def test_contract_report_and_gradients(checkpoint: Path) -> None:
    counters.reset()  # they count for the whole process, other tests included
    model = bridge_model(load_masters(checkpoint))
    contract = bridge_state(model).contract
    kind = "moe" if bridge_state(model).facts.moe else "dense"
    assert contract.name == f"{kind}_block_fp8_v1"
    scores(model).sum().backward()
    assert consistency_report(model).problems(served=True) == []
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_gradients_are_straight_through_at_the_quantized_values(checkpoint: Path) -> None:
    model = bridge_model(load_masters(checkpoint))
    with torch.no_grad():
        # Masters that no FP8 number hits: the same quantized values, so the same gradient.
        shifted = bridge_model(load_masters(checkpoint))
        weight = shifted.get_parameter(OUT_PROJ)
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        largest = blocks.abs().amax((1, 3), keepdim=True)
        blocks.mul_(torch.where(blocks.abs() < 0.9 * largest, 1.01, 1.0))
    assert not torch.equal(weight, model.get_parameter(OUT_PROJ))
    assert weight_receipt(shifted).digest.total == weight_receipt(model).digest.total
    for each in (model, shifted):
        scores(each).sum().backward()
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), shifted.named_parameters(), strict=True
    ):
        assert_bitwise_equal(theirs.grad, ours.grad, name)


def test_saved_masters_resume_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    model = bridge_model(load_masters(checkpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scores(model).mean().neg().backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    resumed = bridge_model(load_masters(tmp_path))
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), resumed.named_parameters(), strict=True
    ):
        assert_bitwise_equal(theirs, ours, name)
    assert bridge_state(resumed).contract.digest == bridge_state(model).contract.digest
    assert_bitwise_equal(scores(resumed), scores(model))


def test_a_contract_quantizes_a_bf16_model(checkpoint: Path) -> None:
    quantized = bridge_model(load_masters(checkpoint))
    contract = bridge_state(quantized).contract
    family = "qwen3_moe_fp8" if bridge_state(quantized).facts.moe else "qwen3_fp8"
    plain = bridge_model(tiny_model(family), contract)
    assert bridge_state(plain).contract.digest == contract.digest
    assert weight_receipt(plain).digest.total == weight_receipt(quantized).digest.total
    assert_bitwise_equal(scores(plain), scores(quantized))
    bf16 = bridge_model(tiny_model(family))
    assert bridge_state(bf16).contract.name.endswith("_bf16_v1")
    assert not torch.equal(scores(bf16), scores(quantized)), "control: what is not quantized"


def test_quantized_weights_follow_every_version(checkpoint: Path) -> None:
    model = bridge_model(load_masters(checkpoint))
    before = scores(model)
    kept = bridge_state(model).quantized_weight(NAME, model.get_parameter(NAME))
    assert bridge_state(model).quantized_weight(NAME, model.get_parameter(NAME))[0] is kept[0]
    model.get_parameter(NAME).data.mul_(1.5)
    assert_bitwise_equal(scores(model), before, "control: no counter shows it")
    with pytest.raises(StaleWeightsError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight"):
        check_prepared(model)
    weight_version(model).bump()
    check_prepared(model)
    assert not torch.equal(scores(model), before)
    loss = scores(model).sum()
    weight_version(model).bump()
    with pytest.raises(StaleWeightsError, match="Run the forward again"):
        loss.backward()


def test_sharded_masters_equal_plain_ones(checkpoint: Path, tmp_path: Path) -> None:
    plain = bridge_model(load_masters(checkpoint)).train()
    expected, receipt = scores(plain).detach(), weight_receipt(plain)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = shard(copy.deepcopy(plain), mixed=True).train()
        assert weight_receipt(sharded).digest == receipt.digest
        seen = two_steps(sharded, IDS, torch.ones(2))
        assert_bitwise_equal(seen[0], expected)
        assert not torch.equal(seen[2], seen[0])
        full = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
        plain.load_state_dict(full)
        assert_bitwise_equal(
            scores(plain).detach(), token_logprobs(sharded, IDS).log_probs.detach()
        )
        assert weight_receipt(sharded).digest == weight_receipt(plain).digest
    finally:
        dist.destroy_process_group()


def test_digest_counts_every_bit_of_a_scale() -> None:
    scale = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) + 0.5
    other = scale.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(2.0))
    as_scale = [state_digest([("w_scale_inv", s)]).total for s in (scale, other)]
    assert as_scale[0] != as_scale[1]
    as_weight = [state_digest([("w", s)]).total for s in (scale, other)]
    assert as_weight[0] == as_weight[1], "control: of a bf16 weight, the cast counts"
    broken = state_digest([("w_scale_inv", torch.tensor([[1.0, float("nan")]]))])
    assert broken.nonfinite == ("w_scale_inv",)


def test_dequantized_masters_are_what_the_forward_multiplies(checkpoint: Path) -> None:
    exported = dict(exported_weights(bridge_model(load_masters(checkpoint))))
    name = "model.layers.1.mlp.down_proj.weight"
    values = dequantize_blocks(exported[name], exported[f"{name}_scale_inv"])
    assert_bitwise_equal(load_masters(checkpoint).get_parameter(name).detach(), values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 192}, r"multiples of 128, got hidden_size=192"),
        ({"moe_intermediate_size": 96}, r"got moe_intermediate_size=96"),
    ],
)
def test_ragged_widths_are_refused(change: dict[str, int], text: str) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_model("qwen3_moe_fp8").config
    for key, value in change.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config)
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (0, 2)]
    model.config.served_quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": gates,
    }
    with pytest.raises(ConfigurationError, match=text):
        bridge_model(model)
