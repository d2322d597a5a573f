"""The activation between an expert's two GEMMs in Triton, wherever a kernel does it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_activation(gate, up, limit, HAS_LIMIT: tl.constexpr):
    """silu(gate) * up in fp32, unrounded; gate <= limit and |up| <= limit before it, NaN staying.

    Compile the kernel with `enable_fp_fusion=False`: a product folded into a sum rounds otherwise.
    """
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
