"""The sizes of a model that decide memory, from its config.json or from a table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from consistent_kernels.errors import InvalidInputError, UnsupportedError

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
"""config.json of models that a recipe may name without having them; offline."""

_DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab: as in config.json.
        tied: one matrix serves as embedding and head.
        qkv_bias: q, k and v have a bias (Qwen2).
        qk_norm: q and k are normalized by head (Qwen3).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer.

        H D (2 Hq + 2 Hk) for q, k, v and o; 3 H I for the MLP; 2 H for the norms; with a bias
        D (Hq + 2 Hk); with q/k norm 2 D.
        """
        heads = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        count = self.hidden * heads + 3 * self.hidden * self.intermediate + 2 * self.hidden
        if self.qkv_bias:
            count += self.head_dim * (self.heads + 2 * self.kv_heads)
        return count + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding: V H."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters: L layers, one or two tables, the final norm's H."""
        tables = self.table_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + tables + self.hidden


def shape_of(config: dict[str, Any], name: str) -> ModelShape:
    """Return the sizes that a config.json gives.

    Raises:
        UnsupportedError: an architecture whose sizes this command does not know.
        InvalidInputError: a key is missing.
    """
    architecture = (config.get("architectures") or ["unknown"])[0]
    if architecture not in _DENSE:
        raise UnsupportedError("plan", f"architecture {architecture} of {name}", _DENSE)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return ModelShape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
    except KeyError as error:
        raise InvalidInputError(f"plan: config.json of {name} must hold {error}") from error


def find_shape(model: str) -> ModelShape:
    """Return the sizes of a model folder, or of a name in `KNOWN`; nothing is downloaded.

    Raises:
        InvalidInputError: neither; or a config.json that cannot be read.
    """
    file = Path(model).expanduser() / "config.json"
    if file.is_file():
        try:
            return shape_of(json.loads(file.read_text()), model)
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"plan: {file} must be JSON: {error}") from error
    if model in KNOWN:
        return shape_of(KNOWN[model], model)
    raise InvalidInputError(
        f"plan: model must be a folder with config.json or one of {', '.join(KNOWN)}, got "
        f"{model!r}. Set actor_rollout_ref.model.path to a local folder"
    )
