"""One attention block each of DeepSeek-V3.2 and V4 over packed sequences: the trainer's form."""

from train_bridge.blocks.packing import PackedSequences
from train_bridge.blocks.v4 import PackedV4Attention
from train_bridge.blocks.v32 import PackedV32Attention

__all__ = ["PackedSequences", "PackedV4Attention", "PackedV32Attention"]
