"""V1 model runner on CPU."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_consistent.runner.runner_v1 import RunnerV1Mixin


class ConsistentCPUModelRunner(RunnerV1Mixin, CPUModelRunner):
    """vLLM's, with our sampler and prompt scoring."""
