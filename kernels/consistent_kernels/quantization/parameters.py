"""Which weights of a model are FP8, read alike from the configurations of vLLM and transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from consistent_kernels.contract import Scalar
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.quantization.spec import GROUP, SCALE_FORMATS

SCALE_SUFFIX = "_scale_inv"
"""Published checkpoints call the scale of `<name>` `<name>_scale_inv`; a weight is q * scale."""

_UNQUANTIZED = ("lm_head", "embed_tokens", "norm", "layernorm", "gate")
_OP = "quantization_config"


@dataclasses.dataclass(frozen=True)
class BlockFp8Parameters:
    """Block FP8 as Qwen and DeepSeek publish it.

    Every linear layer and every expert is float8_e4m3fn with a scale per 128 x 128 block, and its
    input is quantized as it comes; embeddings, norms, gates and the output head are not.

    Attributes:
        scale_format: "fp32", or "ue8m0" (powers of two) where the configuration has `scale_fmt`.
    """

    scale_format: str = "fp32"

    def __post_init__(self) -> None:
        if self.scale_format not in SCALE_FORMATS:
            raise UnsupportedError(_OP, f"scale_format {self.scale_format!r}", SCALE_FORMATS)

    @classmethod
    def from_hf_config(cls, config: Any, *, gates: Sequence[str] = ()) -> BlockFp8Parameters:
        """Read a `quantization_config`, as a dict or as transformers' object.

        Args:
            config: with quant_method, weight_block_size, activation_scheme, modules_to_not_convert.
            gates: names of the routers, which must not be converted.

        Raises:
            UnsupportedError: names everything that differs from the form above.
        """
        given = config if isinstance(config, Mapping) else config.to_dict()
        block = given.get("weight_block_size")
        expected = {
            "quant_method": (str(given.get("quant_method")).rpartition(".")[2].lower(), "fp8"),
            "fmt": (given.get("fmt") or "e4m3", "e4m3"),
            "weight_block_size": (None if block is None else list(block), [GROUP, GROUP]),
            "activation_scheme": (given.get("activation_scheme"), "dynamic"),
        }
        wrong = [f"{key}={got!r}" for key, (got, wanted) in expected.items() if got != wanted]
        kept = [
            *(given.get("modules_to_not_convert") or ()),
            *(given.get("ignored_layers") or ()),
        ]
        converted = [name for name in kept if not _stays(name)]
        if converted:
            wrong.append(f"modules_to_not_convert names {', '.join(sorted(converted)[:4])}")
        missing = [gate for gate in gates if gate not in kept]
        if missing:
            wrong.append(f"modules_to_not_convert lacks {', '.join(missing[:4])}")
        if wrong:
            raise UnsupportedError(
                _OP,
                "; ".join(wrong),
                (
                    "quant_method='fp8', fmt='e4m3', weight_block_size=[128, 128], "
                    "activation_scheme='dynamic', every linear layer and expert converted, and "
                    "lm_head, norms and gates not",
                ),
            )
        scale_format = given.get("scale_fmt") or "float"
        return cls("fp32" if scale_format == "float" else scale_format)

    def to_hf_config(self, gates: Sequence[str] = ()) -> dict[str, Any]:
        """Return the `quantization_config` that `from_hf_config` reads back."""
        scale = {} if self.scale_format == "fp32" else {"scale_fmt": self.scale_format}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [GROUP, GROUP],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", *gates],
        } | scale

    def to_dict(self) -> dict[str, Scalar]:
        """Return plain JSON types."""
        return {"block": GROUP, "method": "block_fp8", "scale_format": self.scale_format}


def _stays(name: str) -> bool:
    # "model.layers.0.mlp.gate", "model.layers.0.input_layernorm", "model.norm", "lm_head"
    leaf = name.rpartition(".")[2]
    return leaf.endswith(_UNQUANTIZED) and not leaf.endswith("_gate")
