"""The CUDA worker."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from consistent_kernels import deep_gemm_start
from consistent_kernels.attention.spec import DEFAULT_KEY_SPLIT
from vllm_consistent.contracts import attached
from vllm_consistent.layers.gemm_shapes import gemm_shapes
from vllm_consistent.worker import ConsistentWorkerMixin

_log = logging.getLogger(__name__)


class ConsistentGPUWorker(ConsistentWorkerMixin, Worker):
    """vLLM's CUDA worker with our sampler and weights; V2 runner by default."""

    def sleep(self, level: int = 1) -> None:
        """As vLLM; level 2 discards the weights, so rollouts are refused until an update."""
        if level == 2:
            self.served_weights.mark_stale("sleep level 2 discarded the weights; load them again")
        super().sleep(level)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM; full graphs are captured for short and for long contexts."""
        if self.use_v2_model_runner:
            from vllm_consistent.runner.graphs import adopt_graphs

            adopt_graphs(self.model_runner, DEFAULT_KEY_SPLIT)
        self._warm_up()
        return super().compile_or_warm_up_model()

    def _warm_up(self) -> None:
        from vllm_consistent.runner.warm_up import warm_up

        pages = [cache for cache in self.model_runner.kv_caches if isinstance(cache, torch.Tensor)]
        config = self.model_config
        warm_up(
            attached(self.vllm_config),
            pages[0] if pages else None,
            config.get_vocab_size(),
            config.max_model_len,
            draws=not self.use_v2_model_runner,
        )

    def _adopt_runner(self) -> None:
        if self.use_v2_model_runner:
            from vllm_consistent.runner.runner_v2 import adopt

            contract = attached(self.vllm_config)
            adopt(self.model_runner, contract.implementation("token_logprobs"))
            return
        from vllm_consistent.runner.runner_v1_cuda import ConsistentGPUModelRunner

        self.model_runner.__class__ = ConsistentGPUModelRunner
        self.model_runner.adopt()

    def _prepare_kernels(self, model: torch.nn.Module) -> None:
        scheduler = self.vllm_config.scheduler_config
        shapes = gemm_shapes(model, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        if not shapes:
            return
        seconds = deep_gemm_start.prepare(shapes, self.device)
        # Compilers and probes leave memory in PyTorch's cache, which vLLM would count as in use.
        torch.cuda.empty_cache()
        _log.info("DeepGEMM: %d layer shapes compiled and probed in %.1f s", len(shapes), seconds)
