"""Rotary's parameters and tables: read from configurations, equal to Hugging Face's frequencies."""

from __future__ import annotations

import dataclasses
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.rotary.tables import inverse_frequencies
from consistent_kernels.testing import assert_bitwise_equal

CASES = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
}


def config_of(case: str, max_position: int = 32768) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=max_position,
        rope_parameters=dict(CASES[case]),
    )


@pytest.mark.parametrize("case", list(CASES))
def test_rope_frequencies_match_hugging_face(case: str) -> None:
    config = config_of(case)
    theirs = LlamaRotaryEmbedding(config)
    rope = RopeParameters.from_hf_config(config)
    ours = inverse_frequencies(rope)
    # They take a power and a quotient in fp32, then scale in fp32: a handful of half ulps, where
    # the power multiplies the exponent's half ulp by ln(theta) < 14.
    assert bool(((ours - theirs.inv_freq).abs() <= ours * (14 + 8) * 2**-24).all())
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("case", list(CASES))
def test_rope_tables_are_the_rounded_cosines(case: str) -> None:
    rope = RopeParameters.from_hf_config(config_of(case, max_position=2048))
    rope = dataclasses.replace(rope, max_position=2048)
    cos, sin = rope_tables(rope, "cpu")
    angle = torch.arange(2048).float()[:, None] * inverse_frequencies(rope)
    for table, exact in ((cos, angle.double().cos()), (sin, angle.double().sin())):
        assert table.dtype == torch.float32
        exact = exact * rope.attention_factor
        # One rounding to fp32 of an fp64 value that is itself good to a few 2^-52.
        assert bool(((table - exact).abs() <= exact.abs() * (2**-24 + 2**-40)).all())


def test_rope_tables_are_cached_and_equal_by_key() -> None:
    rope = RopeParameters(64, 64, 1e4, 128)
    first, again = rope_tables(rope, "cpu"), rope_tables(rope.key, "cpu")
    assert first[0] is again[0]
    assert RopeParameters.from_key(rope.key) == rope
    longer = rope_tables(dataclasses.replace(rope, max_position=256), "cpu")
    assert_bitwise_equal(longer[0][:128], first[0])


def test_rope_table_reaches_the_scaled_length() -> None:
    # max_position_embeddings is the length before the scaling here, after it in Llama 3.1.
    assert RopeParameters.from_hf_config(config_of("yarn", 32768)).max_position == 131072
    assert RopeParameters.from_hf_config(config_of("yarn", 131072)).max_position == 131072
    assert RopeParameters.from_hf_config(config_of("linear", 4096)).max_position == 16384
    assert RopeParameters.from_hf_config(config_of("llama3", 131072)).max_position == 131072


def test_rope_parameters_are_json_scalars_and_pickle() -> None:
    rope = RopeParameters.from_hf_config(config_of("yarn"))
    data = rope.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert not any(isinstance(value, float) for value in data.values())
    # The cached key must not enter equality.
    assert rope.key
    assert pickle.loads(pickle.dumps(rope)) == RopeParameters.from_hf_config(config_of("yarn"))


def test_rope_digest_sees_every_field() -> None:
    rope = RopeParameters(64, 64, 1e4, 128)
    keys = {rope.key}
    changes = {
        "theta": 1e5,
        "rotary_dim": 32,
        "attention_factor": 1.5,
        "rope_type": "linear",
        "factor": 2.0,
    }
    for name, value in changes.items():
        keys.add(dataclasses.replace(rope, **{name: value}).key)
    assert len(keys) == len(changes) + 1


def test_rope_parameters_reject_what_has_no_table() -> None:
    base = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }
    for rope_type in ("dynamic", "longrope"):
        config = SimpleNamespace(**base, rope_parameters={"rope_type": rope_type, "factor": 2.0})
        with pytest.raises(UnsupportedError, match=f"rope_type '{rope_type}' is not supported"):
            RopeParameters.from_hf_config(config)
    sections = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    with pytest.raises(UnsupportedError, match="mrope_section"):
        RopeParameters.from_hf_config(SimpleNamespace(**base, rope_parameters=sections))
    with pytest.raises(InvalidInputError, match="original_max_position must be positive"):
        RopeParameters(64, 64, 1e4, 128, rope_type="yarn", factor=4.0)
    with pytest.raises(InvalidInputError, match="rotary_dim must be even and at most 64, got 63"):
        RopeParameters(64, 63, 1e4, 128)
