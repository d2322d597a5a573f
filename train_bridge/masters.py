"""Masters of a model that an engine serves in FP8: loaded from its checkpoint, saved as they are.

transformers dequantizes such a checkpoint, forgets that it was quantized, and would quantize again
when it saves. A trainer must keep its masters, and know how the engine serves them: that stands in
the model's configuration as `served_quantization`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from consistent_kernels.contract import Contract
from consistent_kernels.model_facts import gate_names
from consistent_kernels.quantization.parameters import BlockFp8Parameters

KEY = "served_quantization"
"""Entry of config.json: the `quantization_config` of the engine's checkpoint."""


def load_masters(path: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Load a checkpoint, quantized or not, as a trainer's model with masters of `dtype`.

    FP8 weights become q * s rounded to `dtype`. What our function quantized comes back to the same
    FP8 bits; a checkpoint that was quantized otherwise keeps its values but may get other scales,
    so push the weights before the first rollout.

    Args:
        path: of a block-FP8 checkpoint, or of masters that `save_pretrained` wrote.
        dtype: fp32 or bf16.
        options: of `AutoModelForCausalLM.from_pretrained`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

    given = getattr(AutoConfig.from_pretrained(path), "quantization_config", None)
    if given is not None:
        wanted = {key: value for key, value in dict(given).items() if key != "quant_method"}
        options["quantization_config"] = FineGrainedFP8Config(**wanted | {"dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    remember_quantization(model, given)
    return model


def served_quantization(config: Any, contract: Contract | None) -> dict[str, Any] | None:
    """Return how the engine serves a model's weights: what the model knows, else the contract."""
    known = getattr(config, "quantization_config", None) or getattr(config, KEY, None)
    if known or contract is None:
        return known
    scale_format = contract.model.get("quantization.scale_format")
    if scale_format is None:
        return None
    gates = gate_names(config, str(contract.model.get("architecture")))
    return BlockFp8Parameters(str(scale_format)).to_hf_config(gates)


def remember_quantization(model: Any, quantization: dict[str, Any] | None) -> None:
    """Write it into the model's configuration, and let `save_pretrained` write masters."""
    if not quantization:
        return
    setattr(model.config, KEY, dict(quantization))
    # How transformers read the checkpoint; reversed, it would quantize. Without it, its own default
    # names of the architecture are written.
    vars(model).pop("_weight_conversions", None)
