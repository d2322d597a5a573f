"""The engine's kernels under megatron-core's GPTModel (dense or experts; TP 1, PP 1, EP 1).

    spec = get_gpt_block_vllm_spec(config)        # or get_gpt_layer_vllm_spec
    model = GPTModel(config, spec, ...)
    bridge_gpt_model(model, hf_config)            # Megatron-Bridge: pre_wrap_hook(hf_config)

Then `train_bridge.token_logprobs`, `push_weights`, `weight_version` and `consistency_report` work
as on a bridged Hugging Face model.
"""

from train_bridge.megatron.conversion import from_hf_state, hf_named
from train_bridge.megatron.megatron_bridge import register_auto_mapping
from train_bridge.megatron.model import bridge_gpt_model, pre_wrap_hook
from train_bridge.megatron.provider import (
    VllmSpecProvider,
    get_gpt_block_vllm_spec,
    get_gpt_layer_vllm_spec,
)

__all__ = [
    "VllmSpecProvider",
    "bridge_gpt_model",
    "from_hf_state",
    "get_gpt_block_vllm_spec",
    "get_gpt_layer_vllm_spec",
    "hf_named",
    "pre_wrap_hook",
    "register_auto_mapping",
]
