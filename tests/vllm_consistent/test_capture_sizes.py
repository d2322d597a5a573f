"""Prompts get graphs where nobody chose sizes, and vLLM takes the list as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_consistent.capture_sizes import PROMPT_STEP, capture_prompts, with_prompts


@pytest.fixture
def config(checkpoints: Callable[[str], Path]) -> Any:
    """A stock configuration as it is when our hook sees it on a GPU: no sizes yet."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(checkpoints("llama")),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=1000,
        max_num_seqs=24,
    )
    config = arguments.create_engine_config()
    # Where another test has registered the plugin, its hook set the CPU's eager mode.
    config.model_config.enforce_eager = False
    config.compilation_config.cudagraph_mode = None
    config.compilation_config.cudagraph_capture_sizes = None
    config.compilation_config.max_cudagraph_capture_size = None
    return config


def test_prompts_follow_vllms_own_sizes(config: Any) -> None:
    compilation = config.compilation_config
    config._set_cudagraph_sizes()
    stock = list(compilation.cudagraph_capture_sizes)
    compilation.cudagraph_capture_sizes = compilation.max_cudagraph_capture_size = None
    capture_prompts(config)
    config._set_cudagraph_sizes()  # as vLLM does after our hook
    sizes = compilation.cudagraph_capture_sizes
    assert sizes[: len(stock)] == stock
    assert stock[-1] == 48
    assert sizes[len(stock) :] == list(range(64, 1000, PROMPT_STEP))
    assert compilation.max_cudagraph_capture_size == sizes[-1] == 960


def test_a_users_own_choice_stays(config: Any) -> None:
    from vllm.config.compilation import CUDAGraphMode

    compilation = config.compilation_config
    compilation.cudagraph_capture_sizes = [1, 2, 8]
    capture_prompts(config)
    assert compilation.cudagraph_capture_sizes == [1, 2, 8]
    compilation.cudagraph_capture_sizes = None
    compilation.max_cudagraph_capture_size = 16
    capture_prompts(config)
    assert compilation.cudagraph_capture_sizes is None
    compilation.max_cudagraph_capture_size = None
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE):
        compilation.cudagraph_mode = mode
        capture_prompts(config)
        assert compilation.cudagraph_capture_sizes is None
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    config.model_config.enforce_eager = True
    capture_prompts(config)
    assert compilation.cudagraph_capture_sizes is None


def test_nothing_beyond_a_step() -> None:
    assert with_prompts([1, 2, 4], 60) == [1, 2, 4]
    assert with_prompts([1, 64], 128) == [1, 64, 128]
    assert with_prompts([1, 2048], 8192) == [1, 2048]
    assert with_prompts([1, 512], 8192) == [1, 512, *range(576, 2049, 64)]
