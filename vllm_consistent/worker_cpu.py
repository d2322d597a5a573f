"""The CPU worker. Its own module: importing vLLM's CPU worker replaces CUDA buffers by host memory
(vllm/v1/worker/cpu/shm.py), which a CUDA process must never do.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_consistent.worker import ConsistentWorkerMixin


class ConsistentCPUWorker(ConsistentWorkerMixin, CPUWorker):
    """vLLM's CPU worker (V1 runner) with our sampler and weights."""

    def _adopt_runner(self) -> None:
        from vllm_consistent.runner.runner_v1_cpu import ConsistentCPUModelRunner

        self.model_runner.__class__ = ConsistentCPUModelRunner
        self.model_runner.adopt()
