"""The CUDA worker."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_consistent.contracts import attached
from vllm_consistent.worker import ConsistentWorkerMixin


class ConsistentGPUWorker(ConsistentWorkerMixin, Worker):
    """vLLM's CUDA worker with our sampler and weights; V2 runner by default."""

    def sleep(self, level: int = 1) -> None:
        """As vLLM; level 2 discards the weights, so rollouts are refused until an update."""
        if level == 2:
            self.served_weights.mark_stale("sleep level 2 discarded the weights; load them again")
        super().sleep(level)

    def _adopt_runner(self) -> None:
        if self.use_v2_model_runner:
            from vllm_consistent.runner.runner_v2 import adopt

            contract = attached(self.vllm_config)
            adopt(self.model_runner, contract.implementation("token_logprobs"))
            return
        from vllm_consistent.runner.runner_v1 import ConsistentGPUModelRunner

        self.model_runner.__class__ = ConsistentGPUModelRunner
        self.model_runner.adopt()
