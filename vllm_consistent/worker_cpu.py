"""The CPU worker. Its own module: importing vLLM's CPU worker replaces CUDA buffers by host memory
(vllm/v1/worker/cpu/shm.py), which a CUDA process must never do.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_consistent.contracts import attached
from vllm_consistent.worker import ConsistentWorkerMixin

_log = logging.getLogger(__name__)


class ConsistentCPUWorker(ConsistentWorkerMixin, CPUWorker):
    """vLLM's CPU worker (V1 runner) with our sampler and weights."""

    def _adopt_runner(self) -> None:
        from vllm_consistent.runner.runner_v1_cpu import ConsistentCPUModelRunner

        self.model_runner.__class__ = ConsistentCPUModelRunner
        self.model_runner.adopt()

    def _prepare_kernels(self, model: Any) -> None:
        from vllm_consistent.layers.compiled_decoder import compile_decoder

        if not compile_decoder(model, attached(self.vllm_config)):
            _log.info("the decoder layers run one op at a time")
