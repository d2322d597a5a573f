"""Engines for the tests of this folder: one process, plugin on, small models, started once each."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny_model

from vllm_consistent import env

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "block_size": 16,
    "kv_cache_memory_bytes": 1 << 26,
    "max_logprobs": -1,
    "seed": 0,
}


MOE_FAMILIES = ("qwen3_moe",)


def _make_expert_group() -> None:
    """vLLM makes the expert-parallel group with the first engine of a process, if that has experts;
    here engines of several families share one process.
    """
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [[0]], 0, "gloo", group_name="ep"
        )


@pytest.fixture(autouse=True)
def _clean_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine helper sets environment variables; undo that after each test."""
    for name in (env.SWITCH, "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: family -> folder of a tiny checkpoint with peaked logits."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


@pytest.fixture(scope="session")
def start_engine(checkpoints: Callable[[str], Path]) -> Callable[..., Any]:
    """Return a function that starts an engine of a family; arguments override DEFAULTS."""

    def start(family: str, model_folder: Path | None = None, **arguments: Any) -> Any:
        from vllm_consistent.integrations.engine import ConsistentEngine

        gc.collect()
        if family in MOE_FAMILIES:
            _make_expert_group()
        folder = model_folder or checkpoints(family)
        return ConsistentEngine(str(folder), **{**DEFAULTS, **arguments})

    return start


@pytest.fixture(scope="session")
def engines(start_engine: Callable[..., Any]) -> Callable[..., Any]:
    """As `start_engine`, but one engine per family and arguments for the whole session."""
    running: dict[tuple[Any, ...], Any] = {}

    def get(family: str, **arguments: Any) -> Any:
        key = (family, *sorted(arguments.items()))
        if key not in running:
            running[key] = start_engine(family, **arguments)
        return running[key]

    return get
