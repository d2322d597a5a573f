"""Sample with an engine that may neither compile a kernel nor wait for the device, or fail.

Start it with VLLM_GPU_SYNC_CHECK=error. `--wait` puts a wait into the sampler: the control.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def wait_in_the_sampler() -> None:
    """Make every score read a value on the host."""
    from vllm_consistent.runner import runner_v2

    original = runner_v2.score

    def waiting(*args: Any) -> Any:
        result = original(*args)
        result[1].sum().item()
        return result

    runner_v2.score = waiting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--wait", action="store_true")
    args = parser.parse_args()
    from vllm import SamplingParams

    from vllm_consistent.integrations.engine import ConsistentEngine

    engine = ConsistentEngine(
        args.model,
        skip_tokenizer_init=True,
        max_model_len=8192,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,
        jit_monitor_mode="error",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
    )
    if args.wait:
        wait_in_the_sampler()
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, logprobs=0, detokenize=False)
    # Within one key split, across its border while decoding, and beyond it.
    prompts = [[(7 * i + j) % 200 + 5 for j in range(n)] for i, n in enumerate((30, 4090, 5000))]
    samples = engine.generate_with_logprobs(prompts, params)
    sys.stdout.write(f"sampled {sum(len(s.token_ids) for s in samples)} tokens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
