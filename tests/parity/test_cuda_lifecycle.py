"""CUDA only: the compiled graph, vLLM's compile cache, sleep and wake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM

from consistent_kernels.errors import ConsistencyError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, push_weights, token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROBE = Path(__file__).resolve().parents[1] / "support" / "engine_probe.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def probe(checkpoint: Path, cache: Path, switch: str) -> dict[str, Any]:
    """Run the probe in a fresh process on the given compile-cache folder."""
    environment = dict(os.environ)
    environment |= {
        "VLLM_CONSISTENT": switch,
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("VLLM_DISABLE_COMPILE_CACHE", None)
    done = subprocess.run(
        [sys.executable, str(PROBE), str(checkpoint)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_compiled_graph_and_cache(checkpoint: Path, tmp_path: Path) -> None:
    stock = probe(checkpoint, tmp_path / "shared", "0")
    assert stock["graphs"], "the engine compiled nothing"
    assert stock["foreign"], "control: a stock graph holds floating-point operators"
    after_stock = probe(checkpoint, tmp_path / "shared", "1")
    fresh = probe(checkpoint, tmp_path / "fresh", "1")
    assert fresh["graphs"]
    assert fresh["foreign"] == []
    # A graph taken from the stock run's cache would run stock arithmetic.
    assert after_stock["bits"] == fresh["bits"]
    assert stock["bits"] != fresh["bits"]


@pytest.mark.parametrize("fault", [(), ("--wait",)], ids=["strict", "control"])
def test_rollouts_compile_nothing_and_wait_for_nothing(
    tmp_path: Path, fault: tuple[str, ...]
) -> None:
    model = tiny_model("qwen3")
    model.config.max_position_embeddings = 8192
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, str(PROBE.with_name("strict_probe.py")), str(tmp_path), *fault],
        env=dict(os.environ)
        | {
            "VLLM_CONSISTENT": "1",
            "VLLM_GPU_SYNC_CHECK": "error",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        capture_output=True,
        text=True,
    )
    if fault:
        assert done.returncode != 0
        assert "sync" in done.stderr[-6000:]
    else:
        assert done.returncode == 0, done.stderr[-6000:]
        assert "sampled 36 tokens" in done.stdout


def test_sleep_and_wake_change_no_bit(checkpoint: Path) -> None:
    from vllm import SamplingParams

    from vllm_consistent.integrations.engine import ConsistentEngine

    engine = ConsistentEngine(
        str(checkpoint),
        skip_tokenizer_init=True,
        max_model_len=512,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,
        enable_sleep_mode=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 8]},
    )
    trainer = bridge_model(AutoModelForCausalLM.from_pretrained(checkpoint).float().cuda())
    params = SamplingParams(max_tokens=16, seed=3, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [[5 + 3 * i + j for j in range(30 + i)] for i in range(5)]

    def sample() -> tuple[list[Any], torch.Tensor]:
        samples = engine.generate_with_logprobs(prompts, params)
        return [s.token_ids for s in samples], torch.cat([s.logprobs for s in samples])

    push_weights(trainer, engine.llm)
    tokens, logprobs = sample()
    engine.llm.sleep(1)
    engine.llm.wake_up()
    again_tokens, again = sample()
    assert again_tokens == tokens
    assert_bitwise_equal(again, logprobs, "level 1")
    engine.llm.sleep(2)
    engine.llm.wake_up()
    with pytest.raises(ConsistencyError):
        sample()
    push_weights(trainer, engine.llm)
    again_tokens, again = sample()
    assert again_tokens == tokens
    assert_bitwise_equal(again, logprobs, "level 2")
    # Control: other weights give other bits.
    other = bridge_model(tiny_model("qwen3", seed=1, dtype=torch.float32).cuda())
    push_weights(other, engine.llm)
    assert not torch.equal(sample()[1], logprobs)
    engine.close()


def test_graphs_of_both_lengths_score_alike(tmp_path: Path) -> None:
    """Decode across the border of a key split: short graphs before it, long ones behind."""
    from vllm import SamplingParams

    from vllm_consistent.integrations.engine import ConsistentEngine

    model = tiny_model("qwen3")
    model.config.max_position_embeddings = 8192
    model.save_pretrained(tmp_path)
    engine = ConsistentEngine(
        str(tmp_path),
        skip_tokenizer_init=True,
        max_model_len=8192,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
    )
    manager = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    manager = manager.cudagraph_manager
    replayed = []
    short, long = manager.short_graphs, manager.graphs
    assert short
    assert set(short) == set(long)
    run = type(manager).run_fullgraph

    def noted(desc: Any) -> Any:
        replayed.append(max(b.longest for b in manager.builders) <= manager.key_split)
        return run(manager, desc)

    manager.run_fullgraph = noted
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [[(7 * i + j) % 200 + 5 for j in range(n)] for i, n in enumerate((4086, 30, 2000))]
    samples = engine.generate_with_logprobs(prompts, params)
    assert {True, False} <= set(replayed), "both kinds of graphs must have run"
    trainer = bridge_model(AutoModelForCausalLM.from_pretrained(tmp_path).float().cuda())
    sequences = [s.prompt_ids + s.token_ids for s in samples]
    for sample, scores in zip(samples, engine.score(sequences), strict=True):
        start = len(sample.prompt_ids) - 1
        assert_bitwise_equal(scores[start:], sample.logprobs)
        ids = torch.tensor([sample.prompt_ids + sample.token_ids], device="cuda")
        with torch.no_grad():
            trained = token_logprobs(trainer, ids, entropy=False).log_probs[0, start + 1 :]
        assert_bitwise_equal(trained.cpu(), sample.logprobs)
