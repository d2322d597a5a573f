"""What verl's engines with our forward refuse before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="the verl extra is not installed")

pytestmark = pytest.mark.verl

MODEL = {
    "lora_rank": 0,
    "lora_adapter_path": None,
    "lora": {},
    "use_fused_kernels": False,
    "use_liger": False,
    "mtp": SimpleNamespace(enable=False),
    "tokenizer": object(),
}
ENGINE = {
    "pad_to_length": False,
    "qat": SimpleNamespace(enable=False),
    "ulysses_sequence_parallel_size": 1,
    "router_replay": SimpleNamespace(mode="disabled"),
    "dynamic_context_parallel": False,
    "use_megatron_fsdp": False,
    "override_mcore_model_config": {},
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
SHARED = {
    "lora_rank": 8,
    "use_fused_kernels": True,
    "pad_to_length": True,
    "qat": SimpleNamespace(enable=True),
    "tokenizer": None,
}
OWN = {
    "fsdp": {"use_liger": True, "ulysses_sequence_parallel_size": 2},
    "megatron": {
        "lora": {"rank": 8},
        "mtp": SimpleNamespace(enable=True),
        "router_replay": SimpleNamespace(mode="R2"),
        "use_megatron_fsdp": True,
        "override_mcore_model_config": {"a": 1},
        "context_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def engine_class(backend: str) -> Any:
    if backend == "fsdp":
        from train_bridge.verl.engine import ConsistentFSDPEngineWithLMHead

        return ConsistentFSDPEngineWithLMHead
    pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")
    from train_bridge.verl.megatron_engine import ConsistentMegatronEngineWithLMHead

    return ConsistentMegatronEngineWithLMHead


def configs(changed: dict[str, Any]) -> tuple[SimpleNamespace, SimpleNamespace]:
    model, engine = (
        SimpleNamespace(**(base | {key: value for key, value in changed.items() if key in base}))
        for base in (MODEL, ENGINE)
    )
    return model, engine


@pytest.mark.parametrize("backend", OWN)
def test_verl_engine_rejects_each_setting_in_one_error(backend: str) -> None:
    from consistent_kernels.errors import ConfigurationError

    engine = engine_class(backend)
    assert engine.unsupported(*configs({})) == []
    changed = SHARED | OWN[backend]
    for key, value in changed.items():
        assert len(engine.unsupported(*configs({key: value}))) == 1, key
    with pytest.raises(ConfigurationError) as error:
        engine(*configs(changed))
    assert all(line in str(error.value) for line in engine.unsupported(*configs(changed)))
    assert len(engine.unsupported(*configs(changed))) == len(changed)
