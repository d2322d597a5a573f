"""Correct FP8 and bf16 casts for Triton's interpreter.

The interpreter of Triton 3.6 rounds ties away from zero, drops a mantissa's carry and knows no NaN
of e4m3; bf16 it cuts off. With these casts an interpreted kernel gives the bits that a GPU gives.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_stock_convert = interpreter._convert_float


def _convert(data: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
    if (source, target) == (tl.float32, tl.float8e4nv):
        x = torch.from_numpy(np.ascontiguousarray(data.view(np.float32)))
        values = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return values.masked_fill(x.isnan(), 0x7F).numpy()
    if (source, target) == (tl.float8e4nv, tl.float32):
        x = torch.from_numpy(np.ascontiguousarray(data.view(np.uint8)))
        return x.view(torch.float8_e4m3fn).float().numpy().view(np.uint32)
    if (source, target) == (tl.float8e4nv, tl.float16):
        x = torch.from_numpy(np.ascontiguousarray(data.view(np.uint8)))
        return x.view(torch.float8_e4m3fn).half().numpy().view(np.uint16)
    if (source, target) == (tl.float32, tl.bfloat16):
        x = torch.from_numpy(np.ascontiguousarray(data.view(np.float32)))
        return x.bfloat16().view(torch.uint16).numpy()
    return _stock_convert(data, source, target, rounding)


def install() -> None:
    """Replace the interpreter's casts to e4m3 and bf16 and from e4m3 in this process."""
    interpreter._convert_float = _convert
