"""megatron-core's training parts on a CPU: its code names the device "cuda" in plain text.

Import it after the process group is there. Arithmetic is not touched: tensors that would be made on
a CUDA device are made on the CPU, and CUDA's random state, streams and synchronization are nothing.
"""

from __future__ import annotations

from typing import Any

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


torch.cuda.current_device = lambda: torch.device("cpu")
_CudaIsCpu().__enter__()
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
torch.cuda.current_stream = lambda *_: None
torch.cuda.synchronize = lambda *_: None
