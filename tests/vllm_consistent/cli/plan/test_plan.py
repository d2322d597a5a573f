"""`vllm-consistent plan`: numbers computed by hand, what does not fit, and the shipped recipes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from consistent_kernels.errors import ConfigurationError, InvalidInputError, UnsupportedError
from vllm_consistent.cli.main import app
from vllm_consistent.cli.plan.estimate import (
    GIB,
    Plan,
    kv_token_bytes,
    layer_activations,
    make_plan,
)
from vllm_consistent.cli.plan.recipe import Recipe, read_recipe
from vllm_consistent.cli.plan.shapes import KNOWN, find_shape, shape_of

RECIPES = Path(__file__).resolve().parents[4] / "configs" / "recipes"
QWEN, SMOL = KNOWN
QWEN_PARAMETERS = 8_190_735_360
"""Of the published checkpoint; 36 layers of 192,946,432, two tables of 622,329,856, 4096."""
SMOL_PARAMETERS = 134_515_008

RECIPE = Recipe(
    model=QWEN,
    gpus=8,
    shard_gpus=8,
    master_bytes=4,
    reference=False,
    reference_bytes=4,
    param_offload=False,
    optimizer_offload=False,
    reference_offload=False,
    gradient_checkpointing=True,
    micro_batch_tokens=16384,
    prompts=128,
    samples=8,
    max_prompt=1024,
    max_response=7168,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    gpu_memory_utilization=0.6,
)
GPU = 140 * GIB
RESERVE = 5 * GIB


def plan(**changes: object) -> Plan:
    recipe = dataclasses.replace(RECIPE, **changes)
    return make_plan(recipe, find_shape(recipe.model), GPU, RESERVE)


def sizes(made: Plan, phase: str) -> dict[str, int]:
    return {line.name: line.bytes for line in getattr(made, phase).lines}


def test_parameters_are_those_of_the_checkpoints() -> None:
    assert find_shape(QWEN).layer_parameters == 192_946_432
    assert find_shape(QWEN).parameters == QWEN_PARAMETERS
    assert find_shape(SMOL).layer_parameters == 3_540_096
    assert find_shape(SMOL).parameters == SMOL_PARAMETERS


def test_parameters_count_as_transformers_builds_them() -> None:
    """All dense families, against the modules themselves."""
    from tiny_models import tiny_model

    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family)
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        assert shape_of(config, family).parameters == model.num_parameters()


def test_training_by_hand() -> None:
    """Qwen3-8B, 16384 tokens on a GPU, fp32 masters over 8 GPUs."""
    lines = sizes(plan(), "training")
    share = QWEN_PARAMETERS // 8  # 1,023,841,920
    assert lines["masters"] == 4 * share == 4_095_367_680
    assert lines["gradients"] == 4_095_367_680
    assert lines["optimizer"] == 8_190_735_360
    # 2 (2 x 192,946,432 + 622,329,856)
    assert lines["gathered weights"] == 2_016_445_440
    # A layer: 2 (4 x 4096 + 80 x 128 + 40 x 128 + 3 x 12288) + 4 x 32 = 137,344 a token;
    # layer inputs 2 x 2 x 4096 x 36 = 589,824 a token.
    assert layer_activations(find_shape(QWEN)) == 137_344
    assert lines["activations"] == 16384 * (589_824 + 137_344) == 11_913_920_512
    # The head: 12 x 512 x 151,936 + 4 x 622,329,856 = 3,422,814,208; a layer's backward is
    # 6 x 16384 x 12288 + 4 x 4096 x 12288 = 1,409,286,144.
    assert lines["log-probs and head"] == 3_422_814_208
    assert "gradients of one layer" not in lines
    assert plan().training.bytes == sum(lines.values())


def test_rollout_by_hand() -> None:
    lines = sizes(plan(), "rollout")
    assert lines["engine weights"] == 2 * QWEN_PARAMETERS == 16_381_470_720
    # 2 x 8192 (4 x 4096 + 3 x 12288 + 80 x 128) + 12 x 256 x 151,936
    assert lines["engine activations"] == 1_040_187_392 + 466_747_392
    cache = int(0.6 * GPU) - 16_381_470_720 - 1_506_934_784
    assert lines["KV cache"] == cache
    # 4 x 36 x 8 x 128
    assert kv_token_bytes(find_shape(QWEN)) == 147_456
    assert plan().kv_tokens == cache // 147_456 == 490_355
    assert plan().full_length_sequences == 59
    # Masters and optimizer stay.
    assert lines["masters"] + lines["optimizer"] == 12_286_103_040


def test_weight_update_by_hand() -> None:
    received, copied = plan().sync
    # 32,762,941,440 x 7 / 8
    assert received.bytes == 28_667_573_760
    assert copied.bytes == 16_381_470_720


def test_megatron_by_hand() -> None:
    """Whole bf16 weights and fp32 gradients on each GPU; masters and moments over 8."""
    made = plan(megatron=True, master_bytes=2)
    lines = sizes(made, "training")
    assert lines["weights"] == 2 * QWEN_PARAMETERS
    assert lines["gradients"] == 4 * QWEN_PARAMETERS == 32_762_941_440
    assert lines["masters and optimizer"] == 12 * QWEN_PARAMETERS // 8 == 12_286_103_040
    # 2 x 36 x 4096 x 128 x 48
    assert lines["q, k, v in the engine's order"] == 1_811_939_328
    assert lines["activations"] == 16384 * (294_912 + 137_344)
    resident = sizes(made, "rollout")
    assert resident["gradients"] == 32_762_941_440
    assert [line.bytes for line in made.sync] == [14_333_786_880, 16_381_470_720]
    freed = sizes(plan(megatron=True, param_offload=True, optimizer_offload=True), "rollout")
    assert not {"weights", "gradients", "masters and optimizer"} & freed.keys()


def test_one_gpu_by_hand() -> None:
    """SmolLM2: nothing is gathered or received, masters are whole."""
    made = plan(model=SMOL, gpus=1, shard_gpus=1)
    lines = sizes(made, "training")
    assert lines["masters"] == 538_060_032
    assert lines["optimizer"] == 1_076_120_064
    assert lines["gathered weights"] == 0
    assert [line.bytes for line in made.sync] == [0, 269_030_016]
    # 4 x 30 x 3 x 64
    assert made.kv_token_bytes == 23_040
    assert made.fits


def test_without_checkpointing_every_layer_is_kept() -> None:
    lines = sizes(plan(gradient_checkpointing=False), "training")
    assert lines["activations"] == 16384 * 36 * 137_344


def test_offload_and_reference_policy() -> None:
    offloaded = sizes(plan(param_offload=True, optimizer_offload=True), "rollout")
    assert "masters" not in offloaded
    assert "optimizer" not in offloaded
    kept = plan(reference=True)
    assert sizes(kept, "rollout")["reference policy"] == 4_095_367_680
    assert kept.training.bytes == plan().training.bytes + 4_095_367_680


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"micro_batch_tokens": 300_000}, "ppo_max_token_len_per_gpu"),
        ({"gpu_memory_utilization": 0.95}, "rollout needs"),
        ({"gpu_memory_utilization": 0.12}, "KV cache holds"),
        ({"gpu_memory_utilization": 0.05}, "KV cache holds 0 tokens"),
        ({"micro_batch_tokens": 4096}, "exceeds a micro-batch"),
        ({"max_model_len": 4096}, "more than rollout.max_model_len"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], word: str) -> None:
    made = plan(**changes)
    assert not made.fits
    assert any(word in problem for problem in made.problems)


def test_control_the_recipe_itself_fits() -> None:
    assert plan().problems == ()


def test_model_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[SMOL]))
    assert find_shape(str(tmp_path)) == find_shape(SMOL)


def test_rejects_models_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="Qwen/Qwen3-8B"):
        find_shape("someone/something")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInputError, match="must be JSON"):
        find_shape(str(tmp_path))
    with pytest.raises(UnsupportedError, match="MambaForCausalLM"):
        shape_of({"architectures": ["MambaForCausalLM"]}, "x")
    with pytest.raises(InvalidInputError, match="hidden_size"):
        shape_of({"architectures": ["LlamaForCausalLM"]}, "x")


def configuration() -> dict[str, object]:
    """The keys of verl that are read."""
    fsdp = {"fsdp_size": -1, "model_dtype": "fp32", "param_offload": False}
    return {
        "data": {"train_batch_size": 16, "max_prompt_length": 100, "max_response_length": 200},
        "algorithm": {"use_kl_in_reward": False},
        "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
        "actor_rollout_ref": {
            "model": {"path": SMOL, "enable_gradient_checkpointing": True},
            "actor": {
                "strategy": "fsdp2",
                "use_dynamic_bsz": False,
                "ppo_micro_batch_size_per_gpu": 3,
                "ppo_max_token_len_per_gpu": 16384,
                "use_kl_loss": True,
                "fsdp_config": fsdp | {"optimizer_offload": True},
            },
            "ref": {"fsdp_config": fsdp | {"model_dtype": "bf16"}},
            "rollout": {
                "n": 4,
                "tensor_model_parallel_size": 1,
                "max_model_len": None,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 512,
                "gpu_memory_utilization": 0.4,
            },
        },
    }


def test_recipe_is_read_from_verls_keys() -> None:
    recipe = read_recipe(OmegaConf.create(configuration()))
    assert recipe.gpus == recipe.shard_gpus == 8
    assert recipe.micro_batch_tokens == 3 * 300
    assert recipe.max_model_len == 300
    assert (recipe.reference, recipe.reference_bytes, recipe.master_bytes) == (True, 2, 4)
    assert (recipe.param_offload, recipe.optimizer_offload) == (False, True)
    assert recipe.sequences_per_replica == 8
    assert recipe.tokens_per_step == 16 * 4 * 300


def test_recipe_rejects_everything_at_once() -> None:
    config = OmegaConf.create(configuration())
    config.actor_rollout_ref.actor.strategy = "veomni"
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = 3
    config.actor_rollout_ref.ref.fsdp_config.model_dtype = "fp8"
    with pytest.raises(ConfigurationError) as caught:
        read_recipe(config)
    assert len(caught.value.violations) == 4


def test_recipe_is_read_from_megatrons_keys() -> None:
    config = OmegaConf.create(configuration())
    role = config.actor_rollout_ref
    role.actor.strategy = "megatron"
    engine = {
        "use_distributed_optimizer": True,
        "param_offload": True,
        "optimizer_offload": False,
        "override_transformer_config": {"recompute_granularity": "full"},
    }
    role.actor.megatron, role.ref.megatron = engine, engine
    recipe = read_recipe(config)
    assert recipe.megatron
    assert recipe.gradient_checkpointing
    assert (recipe.shard_gpus, recipe.master_bytes, recipe.reference_bytes) == (8, 2, 2)
    assert (recipe.param_offload, recipe.optimizer_offload) == (True, False)
    role.actor.megatron.use_distributed_optimizer = False
    assert read_recipe(config).shard_gpus == 1


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *args])
    return result.exit_code, result.output


@pytest.mark.verl
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("smollm2_grpo_fsdp", "h100"),
        ("qwen3_8b_grpo_fsdp", "h100"),
        ("qwen3_8b_grpo_fsdp", "h200"),
        ("qwen3_8b_grpo_fsdp_gb200", "gb200"),
    ],
)
def test_shipped_recipes_fit(name: str, gpu: str) -> None:
    pytest.importorskip("verl", reason="needs the verl extra")
    code, text = run(str(RECIPES / name), "--gpu", gpu, "--json")
    data = json.loads(text)
    assert code == 0, data["problems"]
    assert data["fits"]
    assert data["training"]["bytes"] < data["gpu_bytes"]
    assert data["step"]["sequences"] == 8 * (64 if name.startswith("smollm2") else 128)


@pytest.mark.verl
def test_shipped_megatron_configuration_is_estimated() -> None:
    pytest.importorskip("verl", reason="needs the verl extra")
    code, text = run(
        "true_on_policy_grpo_megatron",
        f"actor_rollout_ref.model.path={QWEN}",
        "--gpu-gib",
        "160",
        "--json",
    )
    data = json.loads(text)
    assert code == 0, data["problems"]
    assert data["recipe"]["megatron"]
    named = [line["name"] for line in data["training"]["lines"]]
    assert named[:3] == ["weights", "gradients", "masters and optimizer"]


@pytest.mark.verl
def test_table_and_exit_code_of_what_does_not_fit() -> None:
    pytest.importorskip("verl", reason="needs the verl extra")
    code, text = run(str(RECIPES / "qwen3_8b_grpo_fsdp"), "--gpu-gib", "24")
    assert code == 1
    assert "does not fit: training needs" in text
    assert "4 P / N" in text


def test_command_rejects_a_missing_recipe(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the verl extra")
    code, text = run(str(tmp_path))
    assert code == 2
    assert f"{tmp_path.name}.yaml" in text
    (tmp_path / "x.yaml").write_text("defaults: [nothing]\n")
    code, text = run(str(tmp_path / "x.yaml"))
    assert code == 2
    assert "must compose" in text


@pytest.mark.verl
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "must compose"),
        (b"\xff\xfe", "must compose"),
        (b"a: 1", "must be a verl configuration (built on ppo_trainer)"),
        (b"x: ${nope}", "must be a verl configuration (built on ppo_trainer)"),
    ],
)
def test_command_rejects_a_file_that_is_no_recipe(
    tmp_path: Path, content: bytes, message: str
) -> None:
    pytest.importorskip("verl", reason="needs the verl extra")
    (tmp_path / "x.yaml").write_bytes(content)
    code, text = run(str(tmp_path / "x.yaml"))
    assert code == 2
    assert message in text


def test_recipe_rejects_numbers_that_are_none() -> None:
    config = OmegaConf.create(configuration())
    config.actor_rollout_ref.rollout.n = 0
    config.data.train_batch_size = None
    config.trainer.nnodes = "two"
    with pytest.raises(ConfigurationError) as caught:
        read_recipe(config)
    assert len(caught.value.violations) == 3
    assert "actor_rollout_ref.rollout.n must be an integer of at least 1, got 0" in str(
        caught.value
    )


@pytest.mark.parametrize("option", ["--gpu-gib", "--reserve-gib"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_command_rejects_a_size_that_is_no_number(option: str, value: str) -> None:
    code, text = run(str(RECIPES / "qwen3_8b_grpo_fsdp"), option, value)
    assert code == 2
    assert option in text
