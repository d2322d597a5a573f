"""What a `quantization_config` may say: block FP8 as Qwen publishes it, everything else by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import FineGrainedFP8Config

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.quantization.parameters import BlockFp8Parameters

GATES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
PUBLISHED: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.self_attn.q_norm",
        "model.norm",
        *GATES,
    ],
}


def test_a_published_configuration_is_read() -> None:
    assert BlockFp8Parameters.from_hf_config(PUBLISHED, gates=GATES).scale_format == "fp32"
    ue8m0 = BlockFp8Parameters.from_hf_config(PUBLISHED | {"scale_fmt": "ue8m0"})
    assert ue8m0.to_dict() == {"block": 128, "method": "block_fp8", "scale_format": "ue8m0"}
    for parameters in (ue8m0, BlockFp8Parameters()):
        again = BlockFp8Parameters.from_hf_config(parameters.to_hf_config(GATES), gates=GATES)
        assert again == parameters
    theirs = FineGrainedFP8Config(modules_to_not_convert=["lm_head", *GATES])
    assert BlockFp8Parameters.from_hf_config(theirs, gates=GATES) == BlockFp8Parameters()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"scale_fmt": "e5m3"}, "scale_format 'e5m3'"),
        ({"modules_to_not_convert": GATES[:1]}, r"lacks model\.layers\.1\.mlp\.gate"),
        (
            {"modules_to_not_convert": [*GATES, "model.layers.0.self_attn.q_proj"]},
            r"names model\.layers\.0\.self_attn\.q_proj",
        ),
        (
            {"modules_to_not_convert": [*GATES, "model.layers.0.mlp.experts"]},
            r"names model\.layers\.0\.mlp\.experts",
        ),
        ({"ignored_layers": ["model.layers.0.mlp.gate_proj"]}, r"names .*mlp\.gate_proj"),
    ],
)
def test_block_fp8_rejects_another_form(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        BlockFp8Parameters.from_hf_config(PUBLISHED | change, gates=GATES)


def test_everything_wrong_is_named_at_once() -> None:
    with pytest.raises(UnsupportedError) as caught:
        BlockFp8Parameters.from_hf_config({"quant_method": "fp8"}, gates=GATES)
    for part in ("weight_block_size", "activation_scheme", "lacks model.layers.0.mlp.gate"):
        assert part in str(caught.value)
