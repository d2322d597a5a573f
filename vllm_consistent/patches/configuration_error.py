"""Lets a ConfigurationError of the configuration hook reach the caller as itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from consistent_kernels.errors import ConfigurationError
from vllm_consistent.patches.ledger import Patch


def refusal_in(error: Exception) -> ConfigurationError | None:
    """Return the ConfigurationError that pydantic wrapped into `error`, if it did."""
    details = getattr(error, "errors", None)
    if not callable(details):
        return None
    for item in details():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigurationError):
            return cause
    return None


def _wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        except ValueError as error:
            refusal = refusal_in(error)
            if refusal is None:
                raise
            raise refusal from None

    return create_engine_config


PATCH = Patch(
    module="vllm.engine.arg_utils",
    owner="EngineArgs",
    attribute="create_engine_config",
    signature=("self", "usage_context", "headless"),
    reason=(
        "VllmConfig is a pydantic dataclass: a ValueError raised in its hooks becomes a "
        "ValidationError whose text buries the list of refusals"
    ),
    lines="vllm/engine/arg_utils.py: EngineArgs.create_engine_config",
    removal="vLLM validates configurations outside pydantic, or offers a front-end hook",
    wrap=_wrap,
)
