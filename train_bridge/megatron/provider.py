"""Specs that build megatron-core layers from our modules."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
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
from train_bridge.megatron.moe import VllmGroupedMLP, VllmMoELayer, VllmTopKRouter
from train_bridge.megatron.refusals import config_violations, moe_pattern


class VllmSpecProvider(BackendSpecProvider):
    """Our modules where the contract has an op, the fallback's elsewhere.

    Elsewhere means LayerNorm. `get_gpt_layer_vllm_spec` refuses a configuration that would need it,
    so a model bridged through it runs nothing of the fallback.

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

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> type:
        """Return the experts; the same with and without grouped GEMMs."""
        del moe_use_grouped_gemm
        return VllmGroupedMLP

    def router(self) -> type:
        """Return the router, which megatron-core's protocol does not ask for."""
        return VllmTopKRouter

    def activation_func(self) -> type:
        """Return silu(gate) * up."""
        return VllmSiluAndMul


def get_gpt_layer_vllm_spec(
    config: TransformerConfig,
    *,
    provider: VllmSpecProvider | None = None,
    experts: bool | None = None,
) -> ModuleSpec:
    """Return the spec of one layer; Megatron-Bridge's `transformer_layer_spec` takes it.

    Args:
        config: of the model (Megatron-Bridge passes its provider, which is one).
        provider: with another fallback; `VllmSpecProvider()` by default.
        experts: whether the layer is a mixture of experts; what all layers are by default.

    Raises:
        ConfigurationError: everything that no program serves, at once; or layers of both kinds
            and no `experts`.
    """
    violations = config_violations(config)
    kinds = set(moe_pattern(config))
    if experts is None and len(kinds) > 1:
        violations.append("layers of two kinds (moe_layer_freq): use get_gpt_block_vllm_spec")
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
    layer = TransformerLayerSubmodules(
        self_attention=ModuleSpec(
            module=VllmSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=add_residual,
        mlp_bda=add_residual,
    )
    if kinds == {True} if experts is None else experts:
        # The router and the experts both read the norm, so it is no linear's.
        layer.pre_mlp_layernorm = backend.layer_norm(rms_norm=True)
        layer.mlp = partial(VllmMoELayer, submodules=_moe_submodules(backend))
    else:
        dense = MLPSubmodules(
            linear_fc1=backend.column_parallel_layer_norm_linear(),
            linear_fc2=backend.row_parallel_linear(),
        )
        layer.mlp = partial(VllmMLP.as_mlp_submodule, submodules=dense)
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _moe_submodules(backend: VllmSpecProvider) -> MoESubmodules:
    return MoESubmodules(experts=backend.grouped_mlp_modules(True), router=backend.router())


def get_gpt_block_vllm_spec(
    config: TransformerConfig,
    *,
    provider: VllmSpecProvider | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of all layers with our final norm; raises as `get_gpt_layer_vllm_spec`."""
    backend = provider or VllmSpecProvider()
    # Refuses pipeline stages, so that the pattern is that of all layers.
    kinds = {
        experts: get_gpt_layer_vllm_spec(config, provider=backend, experts=experts)
        for experts in set(moe_pattern(config))
    }
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[kinds[experts] for experts in moe_pattern(config)[:count]],
        layer_norm=backend.layer_norm(rms_norm=True),
    )
