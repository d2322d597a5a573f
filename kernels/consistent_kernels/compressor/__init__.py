"""DeepSeek-V4's KV compressor: one entry for every `ratio` tokens (CSA with overlap, HCA)."""

from consistent_kernels.compressor.api import (
    compress,
    compress_bwd,
    compress_to_cache,
    compressor_state,
    compressor_state_bwd,
    write_compressor_state,
)
from consistent_kernels.compressor.windows import (
    CompressorParameters,
    packed_windows,
    paged_windows,
)

__all__ = [
    "CompressorParameters",
    "compress",
    "compress_bwd",
    "compress_to_cache",
    "compressor_state",
    "compressor_state_bwd",
    "packed_windows",
    "paged_windows",
    "write_compressor_state",
]
