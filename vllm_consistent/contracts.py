"""Carries the contract from the front end to the layers, inside vLLM's `additional_config`.

`additional_config` is hashed into vLLM's compile-cache key, so a graph compiled for one contract is
never reused for another one or for stock vLLM.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from consistent_kernels.contract import Contract, contract_from_dict
from consistent_kernels.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "vllm_consistent"


def attach(vllm_config: VllmConfig, contract: Contract) -> None:
    """Write `contract` and its digest into `vllm_config.additional_config`."""
    vllm_config.additional_config[KEY] = {
        "digest": contract.digest,
        "contract": json.dumps(contract.to_dict(), sort_keys=True),
    }


@functools.lru_cache(maxsize=16)
def _parse(text: str) -> Contract:
    return contract_from_dict(json.loads(text))


def attached(vllm_config: VllmConfig) -> Contract | None:
    """Return the contract that the front end attached, or None."""
    extra = vllm_config.additional_config
    if not isinstance(extra, dict) or KEY not in extra:
        return None
    return _parse(extra[KEY]["contract"])


def current_contract(layer: str) -> Contract:
    """Return the contract of the engine that is being built.

    Raises:
        ConfigurationError: none is attached, so `layer` cannot know what to compute.
    """
    from vllm.config import get_current_vllm_config

    contract = attached(get_current_vllm_config())
    if contract is None:
        raise ConfigurationError(
            [
                f"{layer} is built without a contract: the front end did not run the plugin's "
                "configuration hook. Set VLLM_CONSISTENT=1 before vLLM is imported, in the front "
                "end and in the workers"
            ],
            "engine",
        )
    return contract
