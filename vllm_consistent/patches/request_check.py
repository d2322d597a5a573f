"""Refuses sampling parameters that the trainer does not mirror, when a request comes in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_consistent.patches.ledger import Patch
from vllm_consistent.sampling import check_sampling_params


def _wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _validate_params(self: Any, params: Any, supported_tasks: Any) -> None:
        from vllm.sampling_params import SamplingParams

        stock(self, params, supported_tasks)
        if isinstance(params, SamplingParams):
            check_sampling_params(params)

    return _validate_params


PATCH = Patch(
    module="vllm.v1.engine.input_processor",
    owner="InputProcessor",
    attribute="_validate_params",
    signature=("self", "params", "supported_tasks"),
    reason=(
        "requests can be validated only by logits processors, and any of those forces the V1 "
        "model runner"
    ),
    lines="vllm/v1/engine/input_processor.py:80-128, called first in process_inputs",
    removal="vLLM lets a plugin validate requests",
    wrap=_wrap,
)
