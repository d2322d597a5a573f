"""GEMMs of a CPU program, whatever PyTorch's process-wide settings say.

`torch.set_float32_matmul_precision("medium")` multiplies fp32 matrices in bf16 on CPUs that can,
`torch.backends.mkldnn.enabled = False` takes bf16 ones away from oneDNN. Trainers set the first, an
engine in another process does not, and no contract would show it. Gradients follow the settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_EXACT = ("ieee", "none")


def settings_are_plain() -> bool:
    """Return whether fp32 GEMMs run in fp32, and bf16 ones through oneDNN."""
    # What torch.backends.mkldnn reads, without its Python: this stands before every GEMM.
    precision = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    return precision in _EXACT and torch._C._get_mkldnn_enabled()


@contextmanager
def _put_aside() -> Iterator[None]:
    mkldnn = torch.backends.mkldnn
    precision, enabled = mkldnn.matmul.fp32_precision, torch._C._get_mkldnn_enabled()
    mkldnn.matmul.fp32_precision = "ieee"
    torch._C._set_mkldnn_enabled(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
        mkldnn.matmul.fp32_precision = precision


def plain_gemms() -> Any:
    """Return a context in which `settings_are_plain`; free where they are already."""
    return nullcontext() if settings_are_plain() else _put_aside()
