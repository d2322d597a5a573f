"""FP8 with a scale per 128 values of a row, or per 128 x 128 block of a weight."""

from consistent_kernels.quantization.api import (
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
    quantize_weight,
)
from consistent_kernels.quantization.layout import (
    pack_ue8m0_scales,
    tma_aligned_scales,
    unpack_ue8m0_scales,
)

__all__ = [
    "dequantize_blocks",
    "dequantize_rows",
    "pack_ue8m0_scales",
    "quantize_blocks",
    "quantize_rows",
    "quantize_weight",
    "tma_aligned_scales",
    "unpack_ue8m0_scales",
]
