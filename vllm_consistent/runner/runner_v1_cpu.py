"""V1 model runner on CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from consistent_kernels.llvm import memory
from vllm_consistent.runner.runner_v1 import RunnerV1Mixin


class ConsistentCPUModelRunner(RunnerV1Mixin, CPUModelRunner):
    """vLLM's, with our sampler and prompt scoring, and pages in large pages."""

    def _allocate_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        tensors = super()._allocate_kv_cache_tensors(*args, **kwargs)
        for tensor in tensors.values():
            memory.advise(tensor)
        return tensors
