"""With the real Megatron-Bridge, where it and Transformer Engine are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")
pytest.importorskip(
    "megatron.bridge",
    reason="needs Megatron-Bridge and Transformer Engine",
    exc_type=ImportError,
)

from megatron_cpu import cuda_on_cpu
from tiny_gpt import all_moe_config, named
from transformers import Qwen3MoeForCausalLM

from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, token_logprobs, weight_version
from train_bridge.megatron import get_gpt_block_vllm_spec, pre_wrap_hook, register_auto_mapping

pytestmark = pytest.mark.megatron


def moe_model() -> torch.nn.Module:
    """Every layer with experts: Megatron-Bridge maps no dense layer of Qwen3-MoE."""
    config = all_moe_config()
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).bfloat16()


def provided(bridge: Any, hf_config: Any) -> list[torch.nn.Module]:
    """Build the model as Megatron-Bridge does, on the CPU, from our spec."""
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = get_gpt_block_vllm_spec
    provider.register_pre_wrap_hook(pre_wrap_hook(hf_config))
    options = {
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "moe_permute_fusion": False,
        "moe_aux_loss_coeff": 0.0,
        "batch_p2p_comm": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    for name, value in options.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider.provide_distributed_model(
        wrap_with_ddp=False, bf16=True, fp16=False, use_cpu_initialization=True
    )


def separate(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one, as Megatron-Bridge names them."""
    found = {}
    for name, tensor in state.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for index, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                found[f"{prefix}.{index}.gate_proj.weight"] = gate
                found[f"{prefix}.{index}.up_proj.weight"] = up
        elif part == "down_proj":
            found |= {f"{prefix}.{i}.down_proj.weight": rows for i, rows in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Megatron-Bridge names the device "cuda" too."""
    with cuda_on_cpu():
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_loads_scores_and_exports(family: str, make_stock: Callable, tmp_path: Path) -> None:
    from megatron.bridge import AutoBridge
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    stock = named(make_stock("qwen3") if family == "qwen3" else moe_model())
    stock.save_pretrained(tmp_path)
    register_auto_mapping()
    bridge = AutoBridge.from_hf_pretrained(str(tmp_path))
    models = provided(bridge, stock.config)
    bridge.load_hf_weights(models, str(tmp_path))
    weight_version(models[0]).bump()
    exported = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(models)}
    expected = separate(stock.state_dict())
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise_equal(exported[name], tensor, name)
    ids = torch.randint(3, 1000, (2, 40))
    batch = (ids, torch.ones_like(ids))
    with torch.no_grad():
        ours = token_logprobs(models[0], *batch, temperature=0.7).log_probs
        theirs = token_logprobs(bridge_model(stock), *batch, temperature=0.7).log_probs
    assert_bitwise_equal(ours, theirs)
