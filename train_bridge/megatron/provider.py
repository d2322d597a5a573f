"""Specs that build megatron-core layers from our modules."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from consistent_kernels.errors import ConfigurationError
from train_bridge.megatron.layers import (
    VllmColumnParallelLinear,
    VllmCoreAttention,
    VllmLayerNormColumnParallelLinear,
    VllmMLP,
    VllmRMSNorm,
    VllmRowParallelLinear,
    VllmSelfAttention,
    VllmSiluAndMul,
    add_residual,
)
from train_bridge.megatron.refusals import config_violations


class VllmSpecProvider(BackendSpecProvider):
    """Our modules where the contract has an op, the fallback's elsewhere.

    Elsewhere means: LayerNorm, and grouped experts. `get_gpt_layer_vllm_spec` refuses a
    configuration that would need one, so a model bridged through it runs nothing of the fallback.

    Args:
        fallback: `LocalSpecProvider()` by default; `TESpecProvider()` where installed.
    """

    def __init__(self, fallback: BackendSpecProvider | None = None) -> None:
        self.fallback = fallback or LocalSpecProvider()

    def column_parallel_linear(self) -> type:
        """Return the column parallel linear."""
        return VllmColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return the row parallel linear."""
        return VllmRowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """A norm lives in the linear after it: the names that Megatron-Bridge maps."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the linear with a norm before it."""
        return VllmLayerNormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        """Return RMSNorm; LayerNorm is the fallback's."""
        if rms_norm:
            return VllmRMSNorm
        return self.fallback.layer_norm(rms_norm, for_qk, has_residual)

    def core_attention(self) -> type:
        """Return attention over given q, k, v."""
        return VllmCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Return the fallback's experts."""
        return self.fallback.grouped_mlp_modules(moe_use_grouped_gemm)

    def activation_func(self) -> type:
        """Return silu(gate) * up."""
        return VllmSiluAndMul


def get_gpt_layer_vllm_spec(
    config: TransformerConfig, *, provider: VllmSpecProvider | None = None
) -> ModuleSpec:
    """Return the spec of one dense layer; Megatron-Bridge's `transformer_layer_spec` takes it.

    Args:
        config: of the model (Megatron-Bridge passes its provider, which is one).
        provider: with another fallback; `VllmSpecProvider()` by default.

    Raises:
        ConfigurationError: everything that no program serves, at once.
    """
    violations = config_violations(config)
    if violations:
        raise ConfigurationError(violations, "megatron configuration")
    backend = provider or VllmSpecProvider()
    norm = backend.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_layer_norm_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=backend.column_parallel_layer_norm_linear(),
        linear_fc2=backend.row_parallel_linear(),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=VllmSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=add_residual,
            mlp=partial(VllmMLP.as_mlp_submodule, submodules=mlp),
            mlp_bda=add_residual,
        ),
    )


def get_gpt_block_vllm_spec(
    config: TransformerConfig,
    *,
    provider: VllmSpecProvider | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of all layers with our final norm; raises as `get_gpt_layer_vllm_spec`."""
    layer = get_gpt_layer_vllm_spec(config, provider=provider)
    backend = provider or VllmSpecProvider()
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage, pp_rank),
        layer_norm=backend.layer_norm(rms_norm=True),
    )
