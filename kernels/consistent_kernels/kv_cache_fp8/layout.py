"""Byte layouts of the FP8 caches, as vLLM 0.25.1 and FlashMLA read them."""

from __future__ import annotations

import dataclasses

BLOCK_ALIGNMENT = 16
"""Bytes: where blocks begin, so that every token's parts can be read 16 bytes at a time."""


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """One cache layout: [blocks, block_size, token_bytes] uint8.

    Attributes:
        name: "v32", "v4" or "indexer".
        fp8_values: leading values of a row that are stored in FP8.
        bf16_values: values after them (RoPE) that are stored as they are.
        group: FP8 values that share a scale.
        scale_bytes: 4 for fp32 scales, 1 for UE8M0 exponents.
        scale_room: bytes that a token's scales take, padding included.
        split_block: False: a token's bytes lie together, values then scales then bf16. True: a
            block holds the values of all its tokens first and then the scales of all its tokens.
    """

    name: str
    fp8_values: int
    bf16_values: int
    group: int
    scale_bytes: int
    scale_room: int
    split_block: bool

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.fp8_values + self.bf16_values

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.fp8_values // self.group

    @property
    def data_bytes(self) -> int:
        """Bytes of a token without its scales."""
        return self.fp8_values + 2 * self.bf16_values

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.data_bytes + self.scale_room

    def offsets(self, block_size: int) -> tuple[int, int, int, int]:
        """Where a token's parts lie inside its block, in bytes.

        Returns:
            (token_step, bf16_at, scale_step, scale_at): token t's FP8 values begin at
            t * token_step, its bf16 values bf16_at later, its scales at scale_at + t * scale_step.
        """
        if self.split_block:
            return (
                self.data_bytes,
                self.fp8_values,
                self.scale_room,
                block_size * self.data_bytes,
            )
        return (
            self.token_bytes,
            self.fp8_values + self.scale_room,
            self.token_bytes,
            self.fp8_values,
        )


V32 = KVLayout("v32", 512, 64, 128, 4, 16, split_block=False)
"""DeepSeek-V3.2, 656 bytes: 512 e4m3, 4 fp32 scales, 64 bf16.

vllm/v1/attention/backends/mla/flashmla_sparse.py; concat_and_cache_ds_mla in csrc.
"""

V4 = KVLayout("v4", 448, 64, 64, 1, 8, split_block=True)
"""DeepSeek-V4, 584 bytes: 448 e4m3, 64 bf16; 7 UE8M0 scales and a zero at the block's end.

vllm/models/deepseek_v4/common/ops/cache_utils.py.
"""

INDEXER = KVLayout("indexer", 128, 0, 128, 4, 4, split_block=True)
"""The indexer's keys, 132 bytes: 128 e4m3; an fp32 scale at the block's end.

indexer_k_quant_and_cache in csrc; DeepGEMM's fp8_paged_mqa_logits reads it.
"""

LAYOUTS = {layout.name: layout for layout in (V32, V4, INDEXER)}
