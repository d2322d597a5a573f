"""Every rule of the preflight, broken once; shipped configurations break none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from verl_configs import SHIPPED

pytest.importorskip("verl", reason="the verl extra is not installed")

from consistent_kernels.errors import ConfigurationError
from train_bridge.verl.preflight import check, engine_options, installation, keys, violations
from train_bridge.verl.preflight.checkpoint import contract_digest
from train_bridge.verl.preflight.view import Fixed, View

pytestmark = pytest.mark.verl

Keys = Callable[..., list[str]]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configuration_passes(name: str) -> None:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(SHIPPED[name].parent), version_base=None):
        assert [str(found) for found in violations(compose(name))] == []


OVERRIDES = {
    "actor_rollout_ref.rollout.n=3": ("actor_rollout_ref.rollout.n", 3),
    "data.train_batch_size=24": ("actor_rollout_ref.actor.ppo_mini_batch_size", 24),
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=1": (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
        1,
    ),
    "reward=reward": ("reward.num_workers", 8),
}


@pytest.mark.parametrize("name", ["true_on_policy_grpo_fsdp", "true_on_policy_grpo_megatron"])
@pytest.mark.parametrize("override", OVERRIDES)
def test_verl_overrides_work(override: str, name: str) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(SHIPPED[name].parent), version_base=None):
        config = compose(name, overrides=[override])
    key, value = OVERRIDES[override]
    assert OmegaConf.select(config, key) == value
    assert violations(config) == []


def test_megatron_by_verls_own_switch_is_named() -> None:
    from hydra import compose, initialize_config_dir

    name = "true_on_policy_grpo_fsdp"
    with initialize_config_dir(str(SHIPPED[name].parent), version_base=None):
        (found,) = violations(compose(name, overrides=["model_engine=megatron"]))
    assert found.key == "model_engine"
    assert "true_on_policy_grpo_megatron" in found.use


def test_preflight_lists_all_violations_in_one_error(base: Any) -> None:
    config = copy.deepcopy(base)
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    config.actor_rollout_ref.actor.ppo_epochs = 4
    config.actor_rollout_ref.model.lora_rank = 8
    with pytest.raises(ConfigurationError) as caught:
        check(config)
    text = str(caught.value)
    assert "3 reason(s)" in text
    for part in (
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2: its collectives",
        "actor_rollout_ref.actor.ppo_epochs=4",
        "use 1",
        "actor_rollout_ref.model.lora_rank=8",
    ):
        assert part in text


RULES = (*keys.ALL, *engine_options.OPTIONS)


def wrong_value(rule: Fixed) -> Any:
    first = rule.allowed[0]
    if isinstance(first, bool):
        return not first
    return 3 if isinstance(first, int | float) else "something_else"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_preflight_names_a_key_with_a_wrong_value(rule: Fixed, broken_keys: Keys) -> None:
    assert rule.key in broken_keys({rule.key: wrong_value(rule)})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_preflight_accepts_every_allowed_value(rule: Fixed, broken_keys: Keys) -> None:
    assert all(rule.key not in broken_keys({rule.key: value}) for value in rule.allowed)


ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ACTOR_TARGET = "actor_rollout_ref.actor.fsdp_config._target_"
REF_TARGET = "actor_rollout_ref.ref.fsdp_config._target_"
SWITCH = "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CONSISTENT"
STOCK = "verl.workers.config.FSDPEngineConfig"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 32),
        ("data.gen_batch_size", 16),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", None),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "128"),
        ("data.train_batch_size", None),
        (f"{ROLLOUT}.n", 0),
        (f"{ROLLOUT}.n", None),
        (f"{ROLLOUT}.temperature", None),
        (f"{ROLLOUT}.temperature", "0.7"),
        (f"{ROLLOUT}.temperature", 0),
        (f"{ROLLOUT}.temperature", 0.005),
        (f"{ROLLOUT}.temperature", 2.5),
        (f"{ROLLOUT}.temperature", float("inf")),
        (f"{ROLLOUT}.seed", "soon"),
        (f"{ROLLOUT}.max_model_len", 100),
        (f"{ROLLOUT}.seed", None),
        ("data.max_prompt_length", None),
        ("actor_rollout_ref.actor.strategy", "fsdp"),
        ("actor_rollout_ref.actor.fsdp_config.strategy", "fsdp"),
        ("actor_rollout_ref.actor.fsdp_config.deterministic_gradients", "maybe"),
        ("actor_rollout_ref.ref.strategy", "fsdp"),
        ("actor_rollout_ref.ref.fsdp_config.strategy", "fsdp"),
        ("model_engine", "veomni"),
        ("algorithm.adv_estimator", "remax"),
        (ACTOR_TARGET, STOCK),
        (REF_TARGET, STOCK),
        (SWITCH, "0"),
        (f"{VLLM}.worker_extension_cls", "other.Extension"),
        (f"{VLLM}.worker_cls", "other.Worker"),
        (f"{SWITCH}_PROGRAM", "slow"),
        ("actor_rollout_ref.model.override_config.rope_theta", 5000),
        ("actor_rollout_ref.model.override_config.model_config.rope_theta", 5000),
        ("actor_rollout_ref.model.tokenizer_path", "elsewhere"),
        ("actor_rollout_ref.model.hf_config_path", "elsewhere"),
    ],
)
def test_preflight_names_a_broken_relation(key: str, value: Any, broken_keys: Keys) -> None:
    assert broken_keys({key: value}) == [key]


@pytest.mark.parametrize(
    "key",
    [
        f"{ROLLOUT}.tensor_model_parallel_size",
        f"{ROLLOUT}.calculate_log_probs",
        f"{ROLLOUT}.dtype",
        f"{ROLLOUT}.top_p",
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.actor.fsdp_config.dtype",
        "trainer.v1.trainer_mode",
    ],
)
def test_preflight_takes_null_for_a_value(key: str, base: Any, broken_keys: Keys) -> None:
    """verl's own defaults do not stand in for null: null replaces them."""
    assert broken_keys({key: None}) == [key]


@pytest.mark.parametrize(
    "key",
    [
        f"{ROLLOUT}.tensor_model_parallel_size",
        f"{ROLLOUT}.calculate_log_probs",
        "trainer.v1.trainer_mode",
    ],
)
def test_preflight_names_an_absent_key_whose_default_is_wrong(key: str, base: Any) -> None:
    from omegaconf import OmegaConf, open_dict

    config = copy.deepcopy(base)
    parent, name = key.rsplit(".", 1)
    with open_dict(config):
        del OmegaConf.select(config, parent)[name]
    assert [found.key for found in violations(config)] == [key]


def test_preflight_names_an_interpolation_that_leads_nowhere(broken_keys: Keys) -> None:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    assert broken_keys({key: "${no.such.key}"}) == [key]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ROLLOUT}.enforce_eager", True),
        (f"{ROLLOUT}.enable_chunked_prefill", False),
        (f"{ROLLOUT}.free_cache_engine", False),
        (f"{ROLLOUT}.load_format", "auto"),
        (f"{ROLLOUT}.val_kwargs.temperature", 0),
        ("actor_rollout_ref.actor.clip_ratio_high", 0.5),
        ("actor_rollout_ref.actor.entropy_coeff", 0.01),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "cosine"),
        ("actor_rollout_ref.actor.fsdp_config.reshard_after_forward", False),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", None),
        ("actor_rollout_ref.model.use_remove_padding", False),
        ("algorithm.rollout_correction.rollout_is", "token"),
        ("algorithm.rollout_correction.bypass_mode", None),
        ("algorithm.filter_groups.enable", True),
        ("data.truncation", "left"),
        ("true_on_policy", None),
    ],
)
def test_preflight_leaves_what_is_harmless_alone(key: str, value: Any, broken_keys: Keys) -> None:
    assert broken_keys({key: value}) == []


def test_preflight_takes_verls_own_fetching_of_filtered_groups(broken_keys: Keys) -> None:
    single = {"data.gen_batch_size": 1}
    assert broken_keys({**single, "algorithm.filter_groups.enable": True}) == []
    assert broken_keys(single) == ["data.gen_batch_size"]


def test_preflight_wants_one_program_on_both_sides(broken_keys: Keys) -> None:
    actor, ref = (f"actor_rollout_ref.{part}.fsdp_config.program" for part in ("actor", "ref"))
    engine = f"{SWITCH}_PROGRAM"
    assert broken_keys({engine: "triton"}) == [actor, ref]
    assert broken_keys({actor: "triton"}) == [actor, ref]
    assert broken_keys({actor: "triton", engine: "triton"}) == []
    assert broken_keys({engine: "fastest"}) == []


ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
MCORE_OPTIONS = f"{ACTOR}.override_transformer_config"


@pytest.mark.parametrize(
    "rule", [r for r in keys.ENGINES if ".megatron." in r.key], ids=lambda rule: rule.key
)
def test_preflight_names_a_key_of_the_megatron_engine(
    rule: Fixed, megatron_base: Any, broken_keys: Keys
) -> None:
    found = broken_keys({rule.key: wrong_value(rule)}, of=megatron_base)
    # The reference's keys follow the actor's where verl makes them, and so does the rollout's qat.
    assert rule.key in found
    follow = {rule.key.replace(ACTOR, REF), rule.key.replace(ACTOR, ROLLOUT)}
    assert set(found) <= {rule.key, *follow}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}._target_", "verl.workers.config.McoreEngineConfig"),
        (f"{REF}._target_", "train_bridge.verl.engine_config.ConsistentFSDPEngineConfig"),
        (f"{ACTOR}.override_mcore_model_config.moe_config.freeze_moe_router", True),
        ("actor_rollout_ref.actor.optim.optimizer", "muon"),
        (f"{MCORE_OPTIONS}.hidden_dropout", 0.1),
        (f"{MCORE_OPTIONS}.moe_aux_loss_coeff", 1e-3),
    ],
)
def test_preflight_names_a_broken_relation_of_the_megatron_engine(
    key: str, value: Any, megatron_base: Any, broken_keys: Keys
) -> None:
    named = broken_keys({key: value}, of=megatron_base)
    assert any(key.startswith(found) for found in named)
    assert {found.replace(REF, ACTOR) for found in named} == {named[0].replace(REF, ACTOR)}


def test_preflight_names_recomputation_of_core_attention(
    megatron_base: Any, broken_keys: Keys
) -> None:
    granularity = {f"{MCORE_OPTIONS}.recompute_granularity": "selective"}
    modules = f"{MCORE_OPTIONS}.recompute_modules"
    wrong = broken_keys({**granularity, modules: ["core_attn", "moe"]}, of=megatron_base)
    assert wrong == [modules, modules.replace(ACTOR, REF)]
    assert broken_keys({**granularity, modules: ["moe"]}, of=megatron_base) == []


def test_preflight_names_megatron_core(
    megatron_base: Any, broken_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installation.installed_versions() | {"megatron-core": None}
    monkeypatch.setattr(installation, "installed_versions", lambda: found)
    assert broken_keys(of=megatron_base) == ["package megatron-core"]
    assert broken_keys() == [], "FSDP2 does not need it"


def test_preflight_leaves_an_unused_reference_alone(broken_keys: Keys) -> None:
    assert broken_keys({REF_TARGET: STOCK, "actor_rollout_ref.actor.use_kl_loss": False}) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_BATCH_INVARIANT", "1"), ("VERL_ENGINE_VENDOR", "other"), ("VLLM_PLUGINS", "other")],
)
def test_preflight_names_a_variable(
    variable: str, value: str, broken_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert broken_keys() == [variable]


ENV_VARS = SWITCH.removesuffix(".VLLM_CONSISTENT")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_BATCH_INVARIANT", "1"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "1"),
        ("VERL_ENGINE_VENDOR", "other"),
        ("VLLM_PLUGINS", "other"),
        ("NCCL_DEBUG_LEVEL", 1),
    ],
)
def test_preflight_names_a_variable_of_rays_workers(
    variable: str, value: Any, broken_keys: Keys
) -> None:
    assert broken_keys({f"{ENV_VARS}.{variable}": value}) == [f"{ENV_VARS}.{variable}"]


def test_preflight_wants_the_switch_as_a_string(base: Any) -> None:
    """Hydra reads VLLM_CONSISTENT=1 as a number, which Ray refuses when the run starts."""
    config = copy.deepcopy(base)
    config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CONSISTENT = 1
    (found,) = violations(config)
    assert (found.key, found.use) == (SWITCH, "'\"1\"'")


def test_preflight_accepts_the_plugin_by_name(
    broken_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,consistent")
    assert broken_keys() == []


def test_preflight_names_a_missing_plugin(
    broken_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    assert broken_keys() == ["entry point vllm.general_plugins"]


@pytest.mark.parametrize("package", installation.VERSIONS)
@pytest.mark.parametrize("version", [None, "9.9.9"])
def test_preflight_names_a_package(
    package: str, version: str | None, broken_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installation.installed_versions() | {package: version}
    monkeypatch.setattr(installation, "installed_versions", lambda: found)
    assert broken_keys() == [f"package {package}"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from tiny_models import save_tiny_model
    from word_tokenizer import write_tokenizer

    folder = save_tiny_model(tmp_path / "model", "qwen3")
    write_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


PATH = "actor_rollout_ref.model.path"


def small(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        PATH: str(folder),
        "trainer.device": "cpu",
        "data.max_prompt_length": 512,
        **more,
    }


def test_preflight_reads_the_checkpoint(checkpoint: Path, broken_keys: Keys) -> None:
    assert broken_keys(small(checkpoint)) == []


def test_preflight_names_lengths_beyond_the_positions(checkpoint: Path, broken_keys: Keys) -> None:
    key = "data.max_response_length"
    assert broken_keys(small(checkpoint) | {key: 4096}) == [key]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"architectures": ["GPT2LMHeadModel"]},
        {"vocab_size": 640},
        {"served_quantization": {"quant_method": "fp8"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_preflight_names_the_model(
    change: dict[str, Any], checkpoint: Path, broken_keys: Keys
) -> None:
    edit_config(checkpoint, **change)
    assert set(broken_keys(small(checkpoint))) == {PATH}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.max_prompt_length", "long"),
        ("data.max_response_length", 0),
        ("data.max_response_length", True),
        ("actor_rollout_ref.rollout.max_model_len", "long"),
    ],
)
def test_preflight_names_a_length_that_is_none(
    key: str, value: Any, checkpoint: Path, broken_keys: Keys
) -> None:
    assert broken_keys(small(checkpoint) | {key: value}) == [key]


def test_preflight_counts_scaled_positions(checkpoint: Path, broken_keys: Keys) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 2048
    edit_config(checkpoint, rope_parameters=yarn)
    key = "data.max_response_length"
    assert broken_keys(small(checkpoint) | {key: 4096}) == []
    assert broken_keys(small(checkpoint) | {key: 8192}) == [key]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_preflight_names_a_damaged_file(file: str, checkpoint: Path, broken_keys: Keys) -> None:
    (checkpoint / file).write_text("{")
    assert broken_keys(small(checkpoint)) == [PATH]


def test_preflight_names_a_missing_tokenizer(checkpoint: Path, broken_keys: Keys) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert broken_keys(small(checkpoint)) == [PATH]


def test_preflight_compares_a_pinned_digest(checkpoint: Path, broken_keys: Keys) -> None:
    from omegaconf import OmegaConf

    key = "true_on_policy.contract_digest"
    assert broken_keys(small(checkpoint) | {key: "0123abcd"}) == [key]
    model = {"model": {"path": str(checkpoint)}}
    view = View(OmegaConf.create({"trainer": {"device": "cpu"}, "actor_rollout_ref": model}))
    assert broken_keys(small(checkpoint) | {key: contract_digest(view)}) == []
