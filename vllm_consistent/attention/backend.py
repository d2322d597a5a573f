"""What both backends share: page layout, limits, metadata without host synchronisation."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from consistent_kernels.attention import (
    AttentionParameters,
    attention_paged,
    plan_attention,
    write_kv,
)
from consistent_kernels.errors import ContractMismatchError, InvalidInputError, UnsupportedError
from consistent_kernels.model_facts import HEAD_DIMS
from vllm_consistent.contracts import current_contract


@dataclasses.dataclass
class ConsistentAttentionMetadata:
    """One step's batch, shared by all layers.

    Attributes:
        num_actual_tokens: rows without graph padding.
        query_start_loc: [B + 1] int32.
        seq_lens: [B] int32, keys of each request including this step's.
        block_table: [B, blocks].
        slot_mapping: [T], -1 for a padded row.
        max_query_len, max_seq_len: upper bounds known on the host.
        plan: the CPU program's plan of this step, made by the first layer for all of them.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plan: Any = None


class ConsistentMetadataBuilder(AttentionMetadataBuilder[ConsistentAttentionMetadata]):
    """Passes vLLM's tensors on; computes nothing that depends on values on the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.longest = 0
        """Keys of the longest sequence of the step whose metadata was built last, at most."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ConsistentAttentionMetadata:
        """Return the metadata of one step."""
        common = common_attn_metadata
        self.longest = common.max_seq_len
        return ConsistentAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )


class ConsistentAttentionImpl(AttentionImpl):
    """Writes this step's keys and values into the pages, then attends; one op for all phases."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        extras = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "sinks": sinks,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
        }
        asked = {name: value for name, value in extras.items() if value is not None}
        if asked:
            raise UnsupportedError("attention", asked, ["plain causal decoder attention"])
        contract = current_contract("attention")
        facts = contract.model
        # The trainer takes these from the contract, vLLM from its own reading of the model.
        differs = [
            f"{name}={found} in vLLM, {facts[name]} in the contract"
            for name, found in (
                ("num_heads", num_heads),
                ("num_kv_heads", num_kv_heads),
                ("head_dim", head_size),
                ("sliding_window", sliding_window),
            )
            if found != facts[name]
        ]
        if differs:
            raise ContractMismatchError(
                f"attention: {'; '.join(differs)}. Refuse such a model in "
                "consistent_kernels.model_facts"
            )
        self.impl = contract.implementation("attention")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.params = AttentionParameters(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_size,
            scale=self.scale,
            sliding_window=sliding_window,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ConsistentAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, Hq, D], key and value [T, Hk, D], kv_cache [blocks, 2, block, Hk, D]."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("attention", "quantized output", ["bfloat16 output"])
        if attn_metadata is None:
            # Profiling run: no pages exist yet. Defined values keep NaN out of what follows.
            return output.zero_()
        meta = attn_metadata
        tokens = meta.num_actual_tokens
        k_cache, v_cache = kv_cache.unbind(1)
        write_kv(
            key[:tokens],
            value[:tokens],
            k_cache,
            v_cache,
            meta.slot_mapping[:tokens],
            impl=self.impl,
        )
        if meta.plan is None and self.impl in ("reference", "llvm"):
            meta.plan = plan_attention(
                meta.query_start_loc,
                params=self.params,
                num_tokens=tokens,
                impl=self.impl,
                seq_lens=meta.seq_lens,
                block_table=meta.block_table,
                k_cache=k_cache,
            )
        attention_paged(
            query[:tokens],
            k_cache,
            v_cache,
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            params=self.params,
            impl=self.impl,
            max_query_len=meta.max_query_len,
            max_seq_len=meta.max_seq_len,
            plan=meta.plan,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
        )
        return output


class ConsistentAttentionBackend(AttentionBackend):
    """Base of both backends: same pages, same op."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    page_multiple: ClassVar[int] = 16

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Pages of any multiple of 16 keys; on a CPU of 8."""
        return [MultipleOf(cls.page_multiple)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """The head dims of the contract."""
        return list(HEAD_DIMS)

    @staticmethod
    def get_impl_cls() -> type[ConsistentAttentionImpl]:
        """One implementation class; the contract names the kernel."""
        return ConsistentAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ConsistentMetadataBuilder]:
        """The shared builder."""
        return ConsistentMetadataBuilder

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """[block, keys or values, position, head, dim]: vLLM packs and pads by blocks."""
        if block_size % cls.page_multiple:
            raise InvalidInputError(
                f"attention: block_size must be a multiple of {cls.page_multiple}, got {block_size}"
            )
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Never: it merges a shared prefix in another order."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True for every batch, phase and page layout."""
        return True
