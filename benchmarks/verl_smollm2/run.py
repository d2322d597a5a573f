"""GRPO on sums with verl, SmolLM2-135M-Instruct: the recipe, and the stock one beside it.

python benchmarks/verl_smollm2/run.py --out OUT [--only consistent|stock] [--device cpu] [KEY=VALUE]

Both runs are whole main_ppo runs (Ray, verl's vLLM server, FSDP2, colocated) on the same data with
the same keys; the stock one has verl's engine, vLLM without the plugin and verl's own trainer.
Writes OUT/{consistent,stock}.jsonl (verl's metrics, a line a step) and OUT/metrics.jsonl (the ones
that matter, of both). `plot.py` draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE = ROOT / "configs" / "recipes" / "smollm2_grpo_fsdp"
SUPPORT = ROOT / "tests" / "support"
RUNS = ("consistent", "stock")
KEPT = (
    "true_on_policy/",
    "training/rollout_",
    "rollout_corr/",
    "critic/score/mean",
    "critic/rewards/mean",
    "actor/entropy",
    "actor/grad_norm",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "response_length/mean",
    "perf/throughput",
    "perf/time_per_step",
    "timing_s/",
)
"""Prefixes of the metrics that go into metrics.jsonl."""

OURS = (
    "true_on_policy.",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.",
    "ray_kwargs.ray_init.runtime_env.env_vars.",
    "actor_rollout_ref.actor.fsdp_config._target_",
    "actor_rollout_ref.actor.fsdp_config.deterministic_gradients",
    "actor_rollout_ref.actor.fsdp_config.program",
    "actor_rollout_ref.ref.fsdp_config.program",
    "actor_rollout_ref.ref.fsdp_config._target_",
)
"""Keys of the recipe that the stock run does not have."""

PAGES = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
"""With it vLLM measures no memory, which another program on the GPU could disturb."""

STOCK = (
    "trainer.v1.trainer_mode=measure_mismatch",
    "trainer.experiment_name=smollm2_grpo_stock",
    # Its forward needs an attention that knows packed sequences, and fp32 log-probs: without
    # flash-attn, verl's plain path returns them in bf16.
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_fused_kernels=true",
    # SDPA's cost grows with the square of the packed length.
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
)


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows as verl's dataset wants them: sums, after one worked example."""
    rng = random.Random(seed)
    for index in range(count):
        a, b = rng.randint(1, 19), rng.randint(1, 9)
        yield {
            "data_source": "sums",
            "prompt": [
                {"role": "system", "content": "Add the numbers."},
                {"role": "user", "content": "What is 2 + 3?"},
                {"role": "assistant", "content": "The sum of 2 and 3 is 5."},
                {"role": "user", "content": f"What is {a} + {b}?"},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }


def write_data(out: Path, count: int) -> dict[str, Path]:
    """Write the training and the validation set; returns their paths."""
    import pandas

    paths = {}
    for name, size, seed in (("train", count, 0), ("val", 64, 1)):
        paths[name] = out / f"{name}.parquet"
        pandas.DataFrame(list(problems(size, seed))).to_parquet(paths[name])
    return paths


def model_folder(out: Path) -> Path:
    """Return SmolLM2-135M-Instruct as a bf16 checkpoint, converted once."""
    from vllm_consistent.cli.demo.model_source import BUNDLED_MODEL, resolve_model

    return resolve_model(BUNDLED_MODEL, out / "model", lambda text: print_line(text)).path


def print_line(text: str) -> None:
    """Print at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stock_overrides(overrides: list[str]) -> list[str]:
    """Return the recipe as overrides of verl's ppo_trainer, without what is ours."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_dir(str(RECIPE), version_base=None):
        recipe = OmegaConf.to_container(compose(RECIPE.name, overrides=overrides), resolve=True)
    with initialize_config_module("verl.trainer.config", version_base=None):
        base = OmegaConf.to_container(compose("ppo_trainer"), resolve=True)
    before, after = dict(leaves(base)), dict(leaves(recipe))
    return [
        f"++{key}={json.dumps(value)}"
        for key, value in after.items()
        if before.get(key, object()) != value and (key == PAGES or not key.startswith(OURS))
    ]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a nested dict; lists count as values."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
        return
    yield path, tree


def command(run: str, overrides: list[str]) -> list[str]:
    """Return the command line of a run."""
    if run == "consistent":
        module = ["-m", "train_bridge.verl.main_ppo"]
        return [
            sys.executable,
            *module,
            f"--config-dir={RECIPE}",
            f"--config-name={RECIPE.name}",
            *overrides,
        ]
    stock = [sys.executable, str(HERE / "measured.py")]
    return [*stock, *stock_overrides(overrides), *STOCK]


def environment(out: Path, run: str, device: str) -> dict[str, str]:
    """Return the variables of a run."""
    from benchmarks.env import variables

    given = variables()
    paths = [str(ROOT), str(ROOT / "kernels"), given.get("PYTHONPATH", "")]
    if device == "cpu":
        from vllm_name import name_vllm

        paths[:0] = [str(SUPPORT), str(name_vllm(out / "names"))]
    env = {
        **given,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VERL_FILE_LOGGER_PATH": str(out / f"{run}.jsonl"),
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env.pop("VLLM_CONSISTENT", None)
    # Some containers forbid bytecode: each process would then compile torch, vLLM and verl
    # anew, 20 s of CPU time instead of 8 to import them.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.setdefault("PYTHONPYCACHEPREFIX", str(out / "bytecode"))
    if device == "cpu":
        env |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu"}
        if run == "stock":
            env["VERL_ENGINE_DEVICE"] = "cuda"  # verl registers its engines for no CPU
    return env


def device_overrides(device: str) -> list[str]:
    """Return what a rehearsal without a GPU needs: Ray's logical GPU, a small engine."""
    if device == "cuda":
        return []
    engine = "++actor_rollout_ref.rollout.engine_kwargs.vllm"
    return [
        "trainer.device=cpu",
        "++ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=16",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        "++actor_rollout_ref.rollout.enable_sleep_mode=false",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512",
        f"{engine}.kv_cache_memory_bytes=268435456",
    ]


def launch(run: str, out: Path, overrides: list[str], device: str, limit: float) -> int:
    """Run one of the two for at most `limit` seconds; its log is OUT/<run>.log.

    Returns the exit code; 124 where the time was up.
    """
    started = time.monotonic()
    path = out / f"{run}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command(run, overrides),
            env=environment(out, run, device),
            cwd=out,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            code = 124
            stop(process)
    print_line(f"{run}: exit {code} after {time.monotonic() - started:.0f} s, log {path}")
    if code:
        print_line("\n".join(path.read_text().splitlines()[-40:]))
    return code


def stop(process: subprocess.Popen) -> None:
    """End a run: the driver takes its Ray cluster down on SIGTERM."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def collect(out: Path) -> None:
    """Write metrics.jsonl from the runs' own files."""
    with (out / "metrics.jsonl").open("w") as file:
        for run in RUNS:
            path = out / f"{run}.jsonl"
            for line in path.read_text().splitlines() if path.is_file() else []:
                entry = json.loads(line)
                data = {k: v for k, v in sorted(entry["data"].items()) if k.startswith(KEPT)}
                file.write(json.dumps({"run": run, "step": entry["step"], **data}) + "\n")


def main() -> int:
    """Make the data, run, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=3600, help="seconds of one run")
    parser.add_argument("--model", type=Path, help="a checkpoint folder instead of SmolLM2")
    parser.add_argument("overrides", nargs="*", help="verl's keys, for both runs")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(SUPPORT)]
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = write_data(out, 64 * 40)
    overrides = [
        f"data.train_files={data['train']}",
        f"data.val_files={data['val']}",
        f"actor_rollout_ref.model.path={args.model.resolve() if args.model else model_folder(out)}",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        "trainer.logger=[console,file]",
        *device_overrides(args.device),
        *args.overrides,
    ]
    runs = [args.only] if args.only else RUNS
    codes = [launch(run, out, overrides, args.device, args.limit) for run in runs]
    collect(out)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
