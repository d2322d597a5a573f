"""One attention block each of DeepSeek-V3.2 and V4 over paged FP8 caches: the engine's form.

`train_bridge.blocks` holds the trainer's form over packed sequences; both give equal bits.
"""

from consistent_kernels.blocks.contract import block_contract
from consistent_kernels.blocks.ops import BlockOps
from consistent_kernels.blocks.paging import PagedBatch
from consistent_kernels.blocks.parameters import (
    BlockPrograms,
    V4Parameters,
    V32Parameters,
    v4_weight_shapes,
    v32_weight_shapes,
)
from consistent_kernels.blocks.v4 import PagedV4Attention
from consistent_kernels.blocks.v32 import PagedV32Attention

__all__ = [
    "BlockOps",
    "BlockPrograms",
    "PagedBatch",
    "PagedV4Attention",
    "PagedV32Attention",
    "V4Parameters",
    "V32Parameters",
    "block_contract",
    "v4_weight_shapes",
    "v32_weight_shapes",
]
