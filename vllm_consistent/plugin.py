"""Entry point of the vLLM general plugin; imported in every vLLM process, so it stays light."""

from __future__ import annotations

from vllm_consistent import env
from vllm_consistent.registration import forget_registered, is_registered, note_registered

CPU_BACKEND = "vllm_consistent.attention.cpu.ConsistentCPUAttentionBackend"
CUDA_BACKEND = "vllm_consistent.attention.cuda.ConsistentCUDAAttentionBackend"


def register() -> None:
    """Hook this package into vLLM when VLLM_CONSISTENT=1; else do nothing at all.

    vLLM calls it in the front end, in the engine core, in each worker and in the process that
    inspects models. Only names are registered here: layers are imported by our worker class, which
    the configuration hook selects. Idempotent.

    Raises:
        UnsupportedError: vLLM is not a supported version.
        ConfigurationError: the switch has a value that is neither on nor off.
    """
    if not env.enabled():
        return
    from vllm_consistent import patches

    if is_registered():
        # vLLM's engine arguments may have been imported since.
        patches.apply_front_end()
        return
    import vllm

    from vllm_consistent.versions import check_vllm_version

    check_vllm_version(vllm.__version__)
    note_registered(vllm.__version__)
    try:
        _hook()
    except BaseException:
        # vLLM may load plugins again in this process.
        forget_registered()
        raise


def _hook() -> None:
    import vllm.envs as vllm_envs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_consistent import config, patches

    # An unknown VLLM_ variable is a warning, and an error under fail_on_environ_validation.
    vllm_envs.environment_variables.setdefault(env.SWITCH, env.enabled)
    vllm_envs.environment_variables.setdefault(env.PROGRAM, env.program)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    config.install()
    patches.apply_front_end()
