"""megatron-core's training parts on a CPU: its code names the device "cuda" in plain text.

Arithmetic is not touched: tensors that would be made on a CUDA device are made on the CPU, and
CUDA's random state, streams and synchronization are the CPU's, or nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # Its optimizers take only the type names of CUDA tensors.
            return result.replace("torch.", "torch.cuda.")
        return result


_REPLACED = (
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (torch.cuda, "current_stream", lambda *_: None),
    (torch.cuda, "synchronize", lambda *_: None),
    (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
    (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Let megatron-core find its device on the CPU."""
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _REPLACED:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(_CudaIsCpu())
        yield


_installed = contextlib.ExitStack()


def install() -> None:
    """As `cuda_on_cpu`, for the rest of this process."""
    _installed.enter_context(cuda_on_cpu())
