"""vLLM's options, spelled in every way that its parser takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl", reason="the verl extra is not installed")

from train_bridge.verl.preflight.engine_options import ENGINE

pytestmark = pytest.mark.verl

Keys = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor-parallel-size", 2),
        ("tensor_par", 2),
        ("kv-cache-dtype", "fp8"),
        ("logits-processors", ["some.Processor"]),
        ("no-disable-cascade-attn", True),
        ("no_disable_cascade_attn", True),
        ("kv_transfer_config", {"kv_connector": "some"}),
        ("additional_config", "text"),
        ("block_size", 8),
        ("max-model-len", 64),
        ("max_model_len", "auto"),
    ],
)
def test_every_spelling_is_named(name: str, value: Any, broken_keys: Keys) -> None:
    key = f"{ENGINE}.{name}"
    assert broken_keys({key: value}) == [key]


@pytest.mark.parametrize(
    ("name", "inner", "value"),
    [
        ("attention_config", "backend", "FLASHINFER"),
        ("attention-config", "use_non_causal", True),
        ("kernel_config", "moe_backend", "triton"),
    ],
)
def test_a_nested_option_is_named(name: str, inner: str, value: Any, broken_keys: Keys) -> None:
    import json

    key = f"{ENGINE}.{name}"
    assert broken_keys({key: {inner: value}}) == [f"{key}.{inner}"]
    assert broken_keys({key: json.dumps({inner: value})}) == [f"{key}.{inner}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor-parallel-size", 1),
        ("no-enable-dbo", True),
        ("disable_cascade_attn", None),
        ("speculative_config", {}),
        ("attention_config", {"flash_attn_version": 3}),
        ("block_size", 32),
        ("max_model_len", 4096),
        ("compilation_config", {"cudagraph_mode": "PIECEWISE"}),
        ("async_scheduling", True),
        ("seed", 7),
        ("model", "served by its folder"),
    ],
)
def test_what_is_harmless_is_left_alone(name: str, value: Any, broken_keys: Keys) -> None:
    assert broken_keys({f"{ENGINE}.{name}": value}) == []


def test_names_are_those_of_vllm() -> None:
    """An option that vLLM renames would no longer be guarded; rope_* are of an older vLLM."""
    pytest.importorskip("vllm", reason="no engine is installed")
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    from train_bridge.verl.preflight import engine_options

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    older = {"rope_scaling", "rope_theta", "rope_parameters"}
    assert engine_options._WHOLE - older - {"config"} <= known
    begun = {
        name
        for name in known - engine_options._WHOLE
        if any(other.startswith(name) for other in engine_options._WHOLE)
    }
    assert not begun, "vLLM takes these for themselves, the rules for beginnings of others"
