"""Numbers of tokens that CUDA graphs are captured for: vLLM's own, and those of short prompts.

vLLM captures up to 512 tokens, for decode; longer steps launch op by op. Our ops are launched
through Python, nine a layer, and up to some 2,000 tokens a slow host takes longer for them than the
GPU (docs/performance.md). Piecewise graphs leave it one op a layer, attention. A step is padded to
the next size; padded rows change no bits, as in decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROMPT_TOKENS = 2048
"""Beyond it the GPU takes longer than the host: 1.2 ms a layer of Qwen3-8B at 2,048 tokens."""
PROMPT_STEP = 64
"""Rows that a step is padded by, at most: two of a hundred on average."""


def with_prompts(sizes: Iterable[int], max_tokens: int) -> list[int]:
    """Return `sizes` and, beyond them, the multiples of PROMPT_STEP up to PROMPT_TOKENS.

    Args:
        sizes: numbers of tokens, ascending, at least one.
        max_tokens: the most that the scheduler puts into one step.
    """
    found = list(sizes)
    longest = min(PROMPT_TOKENS, max_tokens)
    first = (found[-1] // PROMPT_STEP + 1) * PROMPT_STEP
    return found + list(range(first, longest + 1, PROMPT_STEP))


def capture_prompts(vllm_config: VllmConfig) -> None:
    """Add the sizes of prompts where steps of several lengths run piecewise and no one chose sizes.

    Called before vLLM chooses its own; it is asked for them here, and takes the longer list later.
    """
    from vllm.config.compilation import CUDAGraphMode

    compilation = vllm_config.compilation_config
    chosen = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
    mode = compilation.cudagraph_mode  # None: vLLM's default, FULL_AND_PIECEWISE
    piecewise = mode is None or mode.mixed_mode() == CUDAGraphMode.PIECEWISE
    if vllm_config.model_config.enforce_eager or any(chosen) or not piecewise:
        return
    vllm_config._set_cudagraph_sizes()
    sizes = compilation.cudagraph_capture_sizes
    compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_capture_sizes = with_prompts(
        sizes, vllm_config.scheduler_config.max_num_batched_tokens
    )
