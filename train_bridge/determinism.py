"""A switch that makes gradients equal run to run; the forward needs none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from consistent_kernels.errors import ConfigurationError
from train_bridge import env


@contextmanager
def deterministic_gradients(device_type: str = "cpu") -> Iterator[None]:
    """Run the body with PyTorch's deterministic algorithms; settings are put back afterwards.

    The forward is deterministic by construction. The backward uses PyTorch's GEMM and scatter-add,
    which on CUDA are run-to-run stable only in this mode.

    Args:
        device_type: "cpu" or "cuda", where the backward runs.

    Raises:
        ConfigurationError: on CUDA, when the process was started without a deterministic cuBLAS
            workspace (cuBLAS reads the variable once, so setting it here would come too late).
    """
    if device_type == "cuda" and not env.cublas_is_deterministic():
        raise ConfigurationError(
            [f"start the process with {env.CUBLAS_WORKSPACE}=:4096:8; it is not set"],
            "deterministic_gradients",
        )
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling every empty tensor with NaN is a debugging aid that costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
