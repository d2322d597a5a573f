"""The programs that kernel tests run on: (implementation, device) pairs, as pytest parameters."""

import pytest
import torch

REFERENCE_CPU = pytest.param(("reference", "cpu"), id="reference-cpu")
TRITON_CUDA = pytest.param(
    ("triton", "cuda"),
    id="triton-cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="the Triton program needs a CUDA device"
        ),
    ],
)
