"""The models: random checkpoints with peaked logits, made here, and SmolLM2's real weights.

Flat logits hide mismatches, so the logits of a random model have a standard deviation of 10: with
independent Gaussian logits over V ids the mean log-prob of a sampled token is then near
psi(1 - c / 10) - psi(1), c = sqrt(2 ln V), which is -1.3 for V = 151,936 (random energy model,
Derrida 1981). Query norms are scaled up, so that attention is not a plain mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.rollout.prompts import ChatPrompts, PromptSource, RandomPrompts
from consistent_kernels.model_facts import gate_names
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.quantization.parameters import SCALE_SUFFIX, BlockFp8Parameters
from vllm_consistent import env
from vllm_consistent.cli.demo.model_source import resolve_model
from vllm_consistent.cli.demo.options import BUNDLED_MODEL

_LOGIT_STD = 10.0
_QUERY_GAIN = 2.5
_SHARD_BYTES = 2 << 30
_SEED = 20_251


@dataclasses.dataclass(frozen=True)
class Shape:
    """A random Qwen3: the fields of `Qwen3Config` that differ between sizes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    def config(self) -> Any:
        """Return the Hugging Face configuration."""
        from transformers import Qwen3Config

        return Qwen3Config(
            **dataclasses.asdict(self),
            architectures=["Qwen3ForCausalLM"],
            dtype="bfloat16",
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )


@dataclasses.dataclass(frozen=True)
class MoeShape(Shape):
    """A random Qwen3-MoE whose every layer has experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    def config(self) -> Any:
        """Return the Hugging Face configuration."""
        from transformers import Qwen3MoeConfig

        dense = super().config().to_dict()
        dense.pop("layer_types", None)
        return Qwen3MoeConfig(
            **dense
            | dataclasses.asdict(self)
            | {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        )


class Fp8MoeShape(MoeShape):
    """A random Qwen3-MoE quantized to block FP8 by our function, as Qwen publishes such models."""

    def config(self) -> Any:
        """Return the Hugging Face configuration."""
        config = super().config()
        gates = gate_names(config, config.architectures[0])
        config.quantization_config = BlockFp8Parameters().to_hf_config(gates)
        return config


MODELS: dict[str, Shape | None] = {
    "qwen3_8b": Shape(4096, 12288, 36, 32, 8, 128, 151_936, False),
    "qwen3_0_6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, True),
    # Qwen3-30B-A3B with 8 of its 48 layers, so that two engines start quickly beside each other.
    "qwen3_30b_a3b": MoeShape(2048, 6144, 8, 32, 4, 128, 151_936, False, 128, 8, 768),
    "qwen3_30b_a3b_fp8": Fp8MoeShape(2048, 6144, 8, 32, 4, 128, 151_936, False, 128, 8, 768),
    "smollm2": None,
}
"""Shape of a random model, or None for real weights."""

TINY_MODELS: dict[str, Shape | None] = {
    "qwen3_8b": Shape(192, 320, 2, 4, 2, 64, 1280, False),
    "qwen3_0_6b": Shape(128, 256, 2, 2, 1, 64, 1280, True),
    "qwen3_30b_a3b": MoeShape(128, 256, 2, 2, 1, 64, 1280, False, 8, 2, 64),
    "qwen3_30b_a3b_fp8": Fp8MoeShape(128, 256, 2, 2, 1, 128, 1280, False, 8, 2, 128),
    "smollm2": Shape(128, 192, 2, 2, 1, 64, 1280, True),
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        path: Hugging Face folder.
        prompts: draws prompts that suit its weights.
        weight_bytes: size of its tensor files.
        kv_bytes: bytes of keys and values of one token, in bf16.
    """

    path: Path
    prompts: PromptSource
    weight_bytes: int
    kv_bytes: int


def checkpoint(
    name: str,
    scratch: Path,
    *,
    shapes: dict[str, Shape | None] = MODELS,
    real: Path | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Checkpoint:
    """Return the named model, making a random one in `scratch` where it is not there yet.

    Args:
        name: a key of `shapes`.
        scratch: folder for random checkpoints (memory-backed is fastest).
        real: folder of SmolLM2; by default it is converted from the package that carries it.
    """
    shape = shapes[name]
    if shape is None:
        path = resolve_model(str(real or BUNDLED_MODEL), env.cache_home() / "models", notify).path
    else:
        path = random_checkpoint(shape, scratch / _folder_name(name, shape))
    config = json.loads((path / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return Checkpoint(
        path,
        ChatPrompts(path) if shape is None else RandomPrompts(config["vocab_size"]),
        sum(file.stat().st_size for file in path.glob("*.safetensors")),
        2 * 2 * config["num_hidden_layers"] * kv_heads * head_dim,
    )


def _folder_name(name: str, shape: Shape) -> str:
    facts = json.dumps([dataclasses.asdict(shape), _LOGIT_STD, _QUERY_GAIN, _SEED])
    return f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def random_checkpoint(shape: Shape, folder: Path) -> Path:
    """Write a checkpoint of random weights; the same on every run on one kind of device.

    The folder appears in one step, complete, and is used as it is where it exists.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        _write(shape, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(shape: Shape, folder: Path) -> None:
    from safetensors.torch import save_file

    shape.config().save_pretrained(folder)
    index: dict[str, str] = {}
    size = 0
    with ThreadPoolExecutor(4) as pool:
        writes = []
        for number, shard in enumerate(_shards(shape)):
            name = f"model-{number:05d}.safetensors"
            index |= dict.fromkeys(shard, name)
            size += sum(tensor.nbytes for tensor in shard.values())
            writes.append(pool.submit(save_file, shard, folder / name, {"format": "pt"}))
        for write in writes:
            write.result()
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text)


def _shards(shape: Shape) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in random_weights(shape):
        shard[name] = tensor.cpu()
        size += tensor.nbytes
        if size >= _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def random_weights(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor), bf16 or FP8; drawn on the GPU where there is one."""
    from transformers import AutoModelForCausalLM

    config = shape.config()
    quantized = isinstance(shape, Fp8MoeShape)
    if quantized:
        del config.quantization_config  # masters
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(_SEED)
    for name, parameter in model.named_parameters():  # a tied head is not named twice
        mean, std = _distribution(name, parameter.shape, shape)
        values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        values.normal_(mean, std, generator=generator)
        for published, tensor in _published(name, values.to(torch.bfloat16)):
            if quantized and published.endswith("_proj.weight"):
                yield from _in_fp8(published, tensor)
            else:
                yield published, tensor


def _published(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter under the names of a published checkpoint: experts stand one by one."""
    module, _, parameter = name.rpartition(".")
    if not module.endswith(".experts"):
        yield name, values
        return
    parts = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else (parameter,)
    for expert, stacked in enumerate(values):
        for part, rows in zip(parts, stacked.chunk(len(parts)), strict=True):
            yield f"{module}.{expert}.{part}.weight", rows.contiguous()


def _in_fp8(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    impl = "triton" if values.is_cuda else "reference"
    fp8, scale = quantize_weight(values, scale_format="fp32", impl=impl)
    yield name, fp8
    yield f"{name}{SCALE_SUFFIX}", scale


def _distribution(name: str, size: torch.Size, shape: Shape) -> tuple[float, float]:
    """Return mean and standard deviation of a parameter."""
    if name.endswith("norm.weight"):
        gain = 1.0
        if name.endswith("q_norm.weight"):
            gain = _QUERY_GAIN
        elif name == "model.norm.weight" and shape.tie_word_embeddings:
            # The table is shared, so the last norm scales the logits instead of the head.
            gain = _LOGIT_STD / (_embedding_std(shape) * math.sqrt(shape.hidden_size))
        return gain, 0.2 * gain
    if name.endswith("embed_tokens.weight"):
        return 0.0, _embedding_std(shape)
    if name == "lm_head.weight":
        return 0.0, _LOGIT_STD / math.sqrt(shape.hidden_size)
    return 0.0, 1.0 / math.sqrt(size[-1])


def _embedding_std(shape: Shape) -> float:
    # Small beside what the layers add: a tied head must not simply return the last token.
    return 0.02
