"""Compile a Triton kernel for a GPU that this machine does not have."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

ARCHITECTURES = (90, 100)
"""Hopper (H100, H200, GH200) and Blackwell (B200, GB200)."""


def cross_compile(
    kernel: Any,
    *,
    arch: int,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int = 0,
    enable_fp_fusion: bool = True,
    aligned: Collection[str] = (),
) -> bytes:
    """Return the cubin of `kernel` for compute capability `arch` (90 for sm_90).

    Args:
        kernel: a `triton.jit` function.
        signature: {argument: Triton type}, e.g. {"x_ptr": "*bf16", "eps": "fp32"}.
        constexprs: {constexpr argument: value}.
        registers: that a thread may have; 0 leaves it to the compiler.
        enable_fp_fusion: whether the compiler may contract a product and a sum to an fma.
        aligned: arguments that are multiples of 16, as a launcher's are that aligns them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full = dict(signature) | dict.fromkeys(constexprs, "constexpr")
    ordered = {name: full[name] for name in kernel.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in aligned
    }
    source = ASTSource(fn=kernel, signature=ordered, constexprs=dict(constexprs), attrs=divisible)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={
            "num_warps": num_warps,
            "num_stages": num_stages,
            "enable_fp_fusion": enable_fp_fusion,
            "maxnreg": registers or None,
        },
    )
    return compiled.asm["cubin"]


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return the local memory of a thread: 0 where all of its values stay in registers.

    Args:
        folder: where the cubin may be written, for Triton's cuobjdump.
    """
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", done.stdout + done.stderr))
