"""V1 model runner on CUDA, for VLLM_USE_V2_MODEL_RUNNER=0."""

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_consistent.runner.runner_v1 import RunnerV1Mixin


class ConsistentGPUModelRunner(RunnerV1Mixin, GPUModelRunner):
    """vLLM's, with our sampler and prompt scoring."""
