"""The facts of a model that decide bits, read alike from vLLM and Hugging Face configurations."""

from __future__ import annotations

import dataclasses
from typing import Any

from consistent_kernels.contract import Scalar, float_bits
from consistent_kernels.errors import ConfigurationError, UnsupportedError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
_QUANTIZED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Architecture facts of a decoder, in plain types.

    Attributes:
        rope: RopeParameters as (key, value) pairs with floats as fp32 bit patterns.
        sliding_window: keys a query sees including itself, or None; equal for all layers.
        moe: router parameters, "intermediate_size" of an expert and "layers" (indices joined by
            commas) as (key, value) pairs; empty for a dense model.
        quantization: BlockFp8Parameters as (key, value) pairs; empty where weights are not
            quantized.
    """

    architecture: str
    dtype: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: str
    rope: tuple[tuple[str, Scalar], ...]
    sliding_window: int | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    moe: tuple[tuple[str, Scalar], ...] = ()
    quantization: tuple[tuple[str, Scalar], ...] = ()

    @property
    def scale_format(self) -> str | None:
        """Scales of FP8 weights, "fp32" or "ue8m0"; None where weights are not quantized."""
        return dict(self.quantization).get("scale_format")

    def to_dict(self) -> dict[str, Scalar]:
        """Return flat JSON types; entries of pairs become "rope.<key>", "moe.<key>" and so on."""
        flat = dataclasses.asdict(self)
        for name in ("rope", "moe", "quantization"):
            flat |= {f"{name}.{key}": value for key, value in flat.pop(name)}
        return flat


ONE_SIDED: dict[str, dict[str, tuple[Any, ...]]] = {
    "LlamaForCausalLM": {
        "bias": (None, False),
        "qkv_bias": (None, False),
        "logit_scale": (None, 1.0),
        "sliding_window": (None,),
    },
    "Qwen2ForCausalLM": {"dual_chunk_attention_config": (None,), "qk_norm": (None, False)},
    "Qwen3ForCausalLM": {"dual_chunk_attention_config": (None,)},
    "Qwen3MoeForCausalLM": {"dual_chunk_attention_config": (None,)},
}
"""Keys that vLLM's class of this name reads and Hugging Face's does not, with the values at which
both compute the same. Source: `getattr(config, ...)` in vllm/model_executor/models/{llama,qwen2,
qwen3,qwen3_moe}.py."""


def _check_one_sided(config: Any, architecture: str, head_dim: int, violations: list[str]) -> None:
    """Refuse what vLLM and Hugging Face read differently out of one configuration."""
    for key, neutral in ONE_SIDED[architecture].items():
        value = getattr(config, key, None)
        if value not in neutral:
            violations.append(
                f"{key}={value!r} is read by vLLM and not by Hugging Face; remove it or set it to "
                f"{neutral[-1]!r}"
            )
    if getattr(config, "is_causal", True) is False:
        violations.append("is_causal=False is not supported: attention is causal")
    rope = getattr(config, "rope_parameters", None) or {}
    part = rope.get("partial_rotary_factor")
    if part not in (None, 1.0):
        violations.append(
            f"partial_rotary_factor={part} rotates a part of each head in vLLM and is not "
            f"supported by Hugging Face's {architecture}; remove it"
        )
    even = config.hidden_size // config.num_attention_heads
    if architecture == "Qwen2ForCausalLM" and head_dim != even:
        violations.append(
            f"head_dim={head_dim} is not read by vLLM's Qwen2, which takes hidden_size / "
            f"num_attention_heads = {even}; use that"
        )


def _sliding_window(config: Any, architecture: str, violations: list[str]) -> int | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if architecture == "LlamaForCausalLM":
        if kinds - {"full_attention"}:
            violations.append(
                f"layer_types={sorted(kinds)} is read by vLLM and not by Hugging Face's Llama; "
                "remove it"
            )
        return None
    if getattr(config, "use_sliding_window", None) is False or window is None:
        return None
    if len(kinds) > 1:
        violations.append(
            f"layer_types mixes {sorted(kinds)}; all layers must be of one kind for now"
        )
    if kinds == {"full_attention"}:
        # vLLM gives `sliding_window` to every layer (vllm/config/model.py: get_sliding_window).
        violations.append(
            f"sliding_window={window} applies to every layer in vLLM and to none in Hugging Face "
            "(layer_types, max_window_layers); set use_sliding_window to false"
        )
        return None
    return window


def _architecture(config: Any, given: str | None, violations: list[str]) -> str:
    names = [given] if given else list(getattr(config, "architectures", None) or ())
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        violations.append(f"architecture {names} is unknown; supported: {supported}")
    return names[0] if names else "unknown"


def _check_numerics(config: Any, dtype: str, head_dim: int, violations: list[str]) -> None:
    if dtype != "bfloat16":
        violations.append(f"dtype {dtype} is not supported; use bfloat16")
    if head_dim not in HEAD_DIMS:
        violations.append(f"head_dim {head_dim} is not supported; supported: {HEAD_DIMS}")
    if config.hidden_act != "silu":
        violations.append(f"hidden_act {config.hidden_act!r} is not supported; use 'silu'")
    if getattr(config, "mlp_bias", False):
        violations.append("mlp_bias=True is not supported")
    if getattr(config, "pretraining_tp", 1) != 1:
        violations.append(f"pretraining_tp={config.pretraining_tp} is not supported; use 1")


def moe_layers(config: Any) -> list[int]:
    """Return the indices of the layers whose MLP is a mixture of experts, as Qwen3-MoE places them.

    Source: Qwen3MoeDecoderLayer of transformers and of vLLM.
    """
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1)
    layers = range(config.num_hidden_layers)
    return [i for i in layers if i not in dense and (i + 1) % step == 0]


def _moe(config: Any, violations: list[str]) -> tuple[tuple[str, Scalar], ...]:
    from consistent_kernels.router import RouterParameters

    if getattr(config, "shared_expert_intermediate_size", 0):
        violations.append("shared_expert_intermediate_size is not supported for Qwen3-MoE")
    try:
        router = RouterParameters.from_hf_config(config).to_dict()
    except (UnsupportedError, ValueError) as error:
        violations.append(str(error))
        return ()
    layers = moe_layers(config)
    if not layers:
        violations.append("no layer has experts (mlp_only_layers, decoder_sparse_step)")
    own: dict[str, Scalar] = {
        "intermediate_size": config.moe_intermediate_size,
        "layers": ",".join(map(str, layers)),
    }
    return tuple(sorted((router | own).items()))


def gate_names(config: Any, architecture: str) -> list[str]:
    """Return the names of a model's routers, which are linear but never quantized."""
    if architecture != "Qwen3MoeForCausalLM":
        return []
    return [f"model.layers.{layer}.mlp.gate" for layer in moe_layers(config)]


def _quantization(
    config: Any, given: Any, architecture: str, widths: dict[str, int], violations: list[str]
) -> tuple[tuple[str, Scalar], ...]:
    from consistent_kernels.quantization.parameters import BlockFp8Parameters
    from consistent_kernels.quantization.spec import GROUP

    if not given:
        return ()
    if architecture not in _QUANTIZED:
        violations.append(
            f"quantized checkpoints of {architecture} are not supported; supported: "
            f"{', '.join(_QUANTIZED)}"
        )
    # A block must not hold rows of two parts of a fused weight, nor a row end inside a group.
    ragged = [f"{name}={width}" for name, width in widths.items() if width % GROUP]
    if ragged:
        violations.append(f"FP8 needs widths in multiples of {GROUP}, got {', '.join(ragged)}")
    try:
        gates = gate_names(config, architecture)
        parameters = BlockFp8Parameters.from_hf_config(given, gates=gates)
    except UnsupportedError as error:
        violations.append(str(error))
        return ()
    return tuple(sorted(parameters.to_dict().items()))


def model_facts(
    config: Any, dtype: str, architecture: str | None = None, quantization: Any = None
) -> ModelFacts:
    """Read the facts of a Hugging Face style configuration.

    Args:
        config: a LlamaConfig, Qwen2Config, Qwen3Config or Qwen3MoeConfig (vLLM's `hf_text_config`
            is one).
        dtype: the model dtype, "bfloat16".
        architecture: the class name, where `config.architectures` may be unset (a model that was
            never saved).
        quantization: how an engine serves these weights, in the form of `quantization_config`; the
            configuration's own by default.

    Raises:
        ConfigurationError: every reason why no contract covers this model, at once.
    """
    from consistent_kernels.rotary import RopeParameters

    violations: list[str] = []
    architecture = _architecture(config, architecture, violations)
    if architecture not in ARCHITECTURES:
        raise ConfigurationError(violations, "model")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _check_numerics(config, dtype, head_dim, violations)
    _check_one_sided(config, architecture, head_dim, violations)
    bias = bool(getattr(config, "attention_bias", False))
    if bias and architecture != "Qwen2ForCausalLM":
        violations.append("attention_bias=True puts a bias on o_proj, which is not supported")
    rope: tuple[tuple[str, Scalar], ...] = ()
    try:
        rope = tuple(sorted(RopeParameters.from_hf_config(config).to_dict().items()))
    except (UnsupportedError, ValueError) as error:
        violations.append(str(error))
    window = _sliding_window(config, architecture, violations)
    moe = _moe(config, violations) if architecture == "Qwen3MoeForCausalLM" else ()
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_attention_heads * head_dim,
        "num_key_value_heads * head_dim": config.num_key_value_heads * head_dim,
    }
    if moe:
        widths["moe_intermediate_size"] = config.moe_intermediate_size
    given = quantization or getattr(config, "quantization_config", None)
    quantized = _quantization(config, given, architecture, widths, violations)
    if violations:
        raise ConfigurationError(violations, f"model {architecture}")
    return ModelFacts(
        architecture=architecture,
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=float_bits(config.rms_norm_eps),
        rope=rope,
        sliding_window=window,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in _QK_NORM,
        moe=moe,
        quantization=quantized,
    )
