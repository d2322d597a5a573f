"""Fixtures for kernel tests: every relation runs on each implementation this machine has."""

from __future__ import annotations

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param(("reference", "cpu"), id="reference-cpu"),
        pytest.param(
            ("triton", "cuda"),
            id="triton-cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not HAS_CUDA, reason="the Triton program needs a CUDA device"),
            ],
        ),
    ]
)
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs; `triton` runs where CUDA is."""
    return request.param
