"""Runs in a fresh process: vLLM without the plugin, then with the plugin installed but off.

Usage: python stock_probe.py FOLDER. Prints one JSON line: what differs between the two.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import vllm.plugins


def snapshot() -> dict[str, Any]:
    """Return everything that the plugin could have changed."""
    import vllm.envs as vllm_envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends import registry
    from vllm.v1.engine.input_processor import InputProcessor

    return {
        "layers": sorted(op_registry_oot),
        "backends": {str(k): v for k, v in registry._ATTN_OVERRIDES.items()},
        "hooks": {k: v.__qualname__ for k, v in sorted(MODELS_CONFIG_MAP.items())},
        "methods": [
            EngineArgs.create_engine_config.__module__,
            InputProcessor._validate_params.__module__,
            str(hasattr(EngineArgs.create_engine_config, "__wrapped__")),
            str(hasattr(InputProcessor._validate_params, "__wrapped__")),
        ],
        "variables": sorted(vllm_envs.environment_variables),
        "worker_module": "vllm_consistent.worker" in sys.modules,
    }


def run(folder: str) -> dict[str, Any]:
    """Start an engine, sample, and return its classes and bits."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1 << 26,
    )
    params = SamplingParams(
        max_tokens=8, seed=3, temperature=0.8, top_p=0.9, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": [5 + 3 * i + j for j in range(9 + i)]} for i in range(4)]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    config = llm.llm_engine.vllm_config
    try:
        llm.collective_rpc("consistency_report")
    except (AttributeError, NotImplementedError) as error:
        no_report = type(error).__name__
    return {
        "classes": sorted({f"{type(m).__module__}.{type(m).__name__}" for m in model.modules()}),
        "worker": type(worker).__name__,
        "no_report": no_report,
        "runner": type(worker.model_runner).__name__,
        "sampler": type(worker.model_runner.sampler).__name__,
        "additional_config": config.additional_config,
        "extension": config.parallel_config.worker_extension_cls,
        "tokens": [list(o.token_ids) for o in outputs],
        "bits": [
            [
                struct.pack("<f", entry[t].logprob).hex()
                for t, entry in zip(o.token_ids, o.logprobs, strict=True)
            ]
            for o in outputs
        ],
    }


def main() -> int:
    """Compare the two states; the first one never loads any plugin."""
    folder = sys.argv[1]
    vllm.plugins.plugins_loaded = True
    without = {"run": run(folder), "snapshot": snapshot()}
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    loaded = "vllm_consistent.plugin" in sys.modules
    off = {"run": run(folder), "snapshot": snapshot()}
    result = {
        "loaded": loaded,
        "same": without == off,
        "without": without["run"],
        "off": off["run"],
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
