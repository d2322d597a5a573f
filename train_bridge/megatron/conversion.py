"""Names and layouts of weights: Hugging Face on one side, megatron-core on the other.

megatron-core keeps q, k and v in one matrix, interleaved by group: the query heads of key head 0,
key head 0, value head 0, the query heads of key head 1, ... Gate and up are stacked. Norms before a
linear live in that linear. Each expert has its own matrices, where transformers stacks all experts
and checkpoints hold gate and up apart as well.
Source: megatron-core 0.19.2, `SelfAttention.forward`, `MLP.forward` and `TEGroupedMLP`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from consistent_kernels.errors import InvalidInputError, invalid
from consistent_kernels.model_facts import ModelFacts

_EMBEDDING = ("embedding.word_embeddings.weight", "model.embed_tokens.weight")
_FINAL_NORM = ("decoder.final_layernorm.weight", "model.norm.weight")
_HEAD = ("output_layer.weight", "lm_head.weight")
_LAYER = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
_DENSE = (
    ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_MOE = (
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("mlp.router.weight", "mlp.gate.weight"),
)
_QK_NORM = (
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_IGNORED_SUFFIX = "_extra_state"


def qkv_rows(facts: ModelFacts) -> torch.Tensor:
    """Return where each row of [q; k; v] stands in megatron-core's interleaved matrix.

    Returns:
        [(Hq + 2 Hk) D] int64: `stacked = interleaved[rows]`, `interleaved[rows] = stacked`.
    """
    group = facts.num_heads // facts.num_kv_heads
    rows = torch.arange((group + 2) * facts.num_kv_heads * facts.head_dim)
    blocks = rows.view(facts.num_kv_heads, group + 2, facts.head_dim)
    parts = (blocks[:, :group], blocks[:, group : group + 1], blocks[:, group + 1 :])
    return torch.cat([part.reshape(-1) for part in parts])


def qkv_sizes(facts: ModelFacts) -> tuple[int, int, int]:
    """Return the rows of q, k and v."""
    keys = facts.num_kv_heads * facts.head_dim
    return facts.num_heads * facts.head_dim, keys, keys


def moe_layers(facts: ModelFacts) -> frozenset[int]:
    """Return the indices of the layers that have experts."""
    listed = str(dict(facts.moe).get("layers", ""))
    return frozenset(int(index) for index in listed.split(",") if index)


def _plain_names(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield (megatron-core name, Hugging Face name) of what is the same tensor on both sides."""
    yield _EMBEDDING
    with_experts = moe_layers(facts)
    for layer in range(facts.num_layers):
        mlp = _MOE if layer in with_experts else _DENSE
        for ours, theirs in _LAYER + mlp + (_QK_NORM if facts.qk_norm else ()):
            yield f"decoder.layers.{layer}.{ours}", f"model.layers.{layer}.{theirs}"
    yield _FINAL_NORM
    if not facts.tie_word_embeddings:
        yield _HEAD


def _fused_names(facts: ModelFacts) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (megatron-core name, Hugging Face names) of fused tensors."""
    with_experts = moe_layers(facts)
    for layer in range(facts.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias") if facts.qkv_bias else ("weight",):
            names = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
            yield f"{ours}.self_attention.linear_qkv.{kind}", names
        if layer in with_experts:
            continue
        gate_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield f"{ours}.mlp.linear_fc1.weight", gate_up


def _expert_names(facts: ModelFacts) -> Iterator[tuple[list[str], str, list[tuple[str, ...]]]]:
    """Yield (megatron-core names, stacked Hugging Face name, checkpoint names) of experts.

    The lists have an entry for each expert; a checkpoint's entry names the parts, in row order.
    """
    count = int(dict(facts.moe).get("num_experts", 0))
    for layer in sorted(moe_layers(facts)):
        ours, theirs = f"decoder.layers.{layer}.mlp.experts", f"model.layers.{layer}.mlp.experts"
        for linear, stacked, parts in (
            ("linear_fc1", "gate_up_proj", ("gate_proj", "up_proj")),
            ("linear_fc2", "down_proj", ("down_proj",)),
        ):
            yield (
                [f"{ours}.{linear}.weight{index}" for index in range(count)],
                f"{theirs}.{stacked}",
                [
                    tuple(f"{theirs}.{index}.{part}.weight" for part in parts)
                    for index in range(count)
                ],
            )


def _is_qkv(name: str) -> bool:
    return ".linear_qkv." in name


def from_hf_state(
    hf_state: Mapping[str, torch.Tensor], facts: ModelFacts, *, vocab_rows: int | None = None
) -> dict[str, torch.Tensor]:
    """Return a megatron-core state dict (TP 1, PP 1) holding the values of a Hugging Face one.

    Args, errors: as `megatron_named`.
    """
    return dict(megatron_named(hf_state, facts, vocab_rows=vocab_rows))


def megatron_named(
    hf_state: Mapping[str, torch.Tensor], facts: ModelFacts, *, vocab_rows: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (megatron-core name, tensor) of Hugging Face weights; each is read when it is due.

    Args:
        hf_state: by Hugging Face name; a repeated tied `lm_head.weight` is passed over. Experts
            stacked, as transformers names them, or one by one, as checkpoints do.
        facts: of the model.
        vocab_rows: rows of the padded vocabulary, where it is padded; the new rows are 0.

    Raises:
        InvalidInputError: a name is missing, or unknown (found last).
    """
    left = set(hf_state)
    if facts.tie_word_embeddings:
        left.discard(_HEAD[1])
    missing_rows = (vocab_rows or facts.vocab_size) - facts.vocab_size

    def take(name: str) -> torch.Tensor:
        if name not in left:
            raise InvalidInputError(f"from_hf_state: hf_state must hold {name}, and does not")
        left.remove(name)
        return hf_state[name]

    for ours, theirs in _plain_names(facts):
        tensor = take(theirs)
        if missing_rows and ours in (_EMBEDDING[0], _HEAD[0]):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, missing_rows))
        yield ours, tensor
    for ours, parts in _fused_names(facts):
        stacked = torch.cat([take(name) for name in parts])
        if _is_qkv(ours):
            interleaved = torch.empty_like(stacked)
            interleaved[qkv_rows(facts).to(stacked.device)] = stacked
            stacked = interleaved
        yield ours, stacked
    for names, stacked_name, separate in _expert_names(facts):
        if stacked_name in left:
            # Copies: a view would keep the tensor of all experts alive.
            each = (row.clone() for row in take(stacked_name))
        else:
            each = (torch.cat([take(name) for name in parts]) for parts in separate)
        yield from zip(names, each, strict=True)
    if left:
        raise invalid("from_hf_state", "hf_state", "of known names", sorted(left)[:5])


def hf_named(
    named: Mapping[str, torch.Tensor], facts: ModelFacts
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of megatron-core parameters, or of their gradients.

    Experts come stacked, as transformers names them.

    Args:
        named: by megatron-core name; rows beyond the vocabulary are left out.
        facts: of the model.

    Raises:
        InvalidInputError: a name is missing or unknown.
    """
    rest = {name: x for name, x in named.items() if not name.endswith(_IGNORED_SUFFIX)}

    def take(name: str) -> torch.Tensor:
        if name not in rest:
            raise InvalidInputError(f"hf_named: named must hold {name}, and does not")
        return rest.pop(name)

    for ours, theirs in _plain_names(facts):
        tensor = take(ours)
        yield theirs, tensor[: facts.vocab_size] if ours in (_EMBEDDING[0], _HEAD[0]) else tensor
    for ours, parts in _fused_names(facts):
        tensor = take(ours)
        if _is_qkv(ours):
            tensor = tensor[qkv_rows(facts).to(tensor.device)]
            sizes = qkv_sizes(facts)
        else:
            sizes = (facts.intermediate_size, facts.intermediate_size)
        yield from zip(parts, tensor.split(sizes), strict=True)
    for names, stacked_name, _ in _expert_names(facts):
        yield stacked_name, torch.stack([take(name) for name in names])
    if rest:
        raise invalid("hf_named", "named", "of known names", sorted(rest)[:5])
