"""Start an engine in a fresh process and print what it compiled and sampled, as JSON.

Used where two states of the plugin, or two starts on one compile cache, are compared.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from typing import Any


def record_graphs() -> list[list[str]]:
    """Collect the foreign floating-point operators of every graph that vLLM's backend receives."""
    from vllm.compilation.backends import VllmBackend

    from vllm_consistent.graph_check import foreign_float_ops

    found: list[list[str]] = []
    original = VllmBackend.__call__

    def recording(self: Any, graph: Any, inputs: Any) -> Any:
        found.append(foreign_float_ops(graph))
        return original(self, graph, inputs)

    VllmBackend.__call__ = recording
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    args = parser.parse_args()
    graphs = record_graphs()
    from vllm import LLM, SamplingParams

    engine = LLM(
        args.model,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 28,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 8]},
    )
    prompts = [{"prompt_token_ids": [3 + 7 * i + j for j in range(20 + i)]} for i in range(6)]
    params = SamplingParams(
        max_tokens=16, temperature=1.0, seed=5, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = engine.generate(prompts, params, use_tqdm=False)
    bits = [
        [
            struct.pack("<f", entry[token].logprob).hex()
            for token, entry in zip(c.token_ids, c.logprobs, strict=True)
        ]
        for c in (output.outputs[0] for output in outputs)
    ]
    result = {"graphs": len(graphs), "foreign": [op for ops in graphs for op in ops], "bits": bits}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
