"""Memory per GPU and bytes per step, as formulas over a model's sizes and a recipe's numbers.

Letters: P parameters, N GPUs that share a master (FSDP), L layers, H hidden, I intermediate, Hq and
Hk query and key heads, D head dim, V vocabulary, T tokens of a micro-batch on one GPU. Bytes; a GiB
is 2^30. Activations are what our autograd functions keep, so they are those of this project's
forward, not of another. Communication buffers, CUDA contexts, graphs and fragmentation are one
number, `reserve`, that is assumed and not derived.
"""

from __future__ import annotations

import dataclasses

from consistent_kernels.token_logprobs.spec import STREAM_ROWS
from vllm_consistent.cli.plan.recipe import Recipe
from vllm_consistent.cli.plan.shapes import ModelShape

BF16, FP32 = 2, 4
GIB = 1 << 30
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Line:
    """One entry of a plan.

    Attributes:
        name: what it is.
        bytes: per GPU.
        formula: how it comes about, in the letters of this module.
    """

    name: str
    bytes: int
    formula: str


@dataclasses.dataclass(frozen=True)
class Phase:
    """What lies on a GPU at once."""

    name: str
    lines: tuple[Line, ...]

    @property
    def bytes(self) -> int:
        """The sum of the lines."""
        return sum(line.bytes for line in self.lines)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimate.

    Attributes:
        recipe, shape: what it is of.
        training, rollout: what lies on a GPU in either phase; both take turns.
        gpu_bytes: of the device.
        kv_token_bytes: of one token in the KV cache.
        kv_tokens: that fit in the KV cache of a replica.
        sync: bytes that one weight update moves, per GPU.
        problems: why it does not fit; empty when it does.
    """

    recipe: Recipe
    shape: ModelShape
    gpu_bytes: int
    training: Phase
    rollout: Phase
    kv_token_bytes: int
    kv_tokens: int
    sync: tuple[Line, ...]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether both phases fit and the engine can serve a sequence of full length."""
        return not self.problems

    @property
    def full_length_sequences(self) -> int:
        """Sequences of full length that a replica keeps at once."""
        return self.kv_tokens // self.recipe.max_model_len


def layer_activations(shape: ModelShape) -> int:
    """Bytes that one layer keeps per token for its backward.

    2 (4 H + (2 Hq + 2 Hk) D + 3 I) + 4 Hq: two residual sums and two norms; rotated q, rotated k,
    v and attention's output; gate, up and their product; attention's fp32 logsumexp. With q/k norm
    also 2 (Hq + Hk) D: q and k before it.
    """
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if shape.qk_norm:
        heads += (shape.heads + shape.kv_heads) * shape.head_dim
    elements = 4 * shape.hidden + heads + 3 * shape.intermediate
    return BF16 * elements + FP32 * shape.heads


def activations(shape: ModelShape, recipe: Recipe) -> Line:
    """Kept for the backward of one micro-batch.

    With checkpointing T (4 H L + layer): the two bf16 inputs (hidden, residual) of every layer,
    and one layer while it runs again; a megatron-core layer has one input: T (2 H L + layer).
    Without: T L layer.
    """
    tokens, layer = recipe.micro_batch_tokens, layer_activations(shape)
    if recipe.gradient_checkpointing:
        count = 1 if recipe.megatron else 2
        inputs = count * BF16 * shape.hidden * shape.layers
        return Line("activations", tokens * (inputs + layer), f"T ({2 * count} H L + layer)")
    return Line("activations", tokens * shape.layers * layer, "T L layer")


def backward_temporaries(shape: ModelShape, recipe: Recipe) -> Line:
    """Gradients that live for one layer: 6 T I (gate, up, product, bf16) + 4 H I (fp32 weight)."""
    gradients = BF16 * 3 * recipe.micro_batch_tokens * shape.intermediate
    weight = FP32 * shape.hidden * shape.intermediate
    return Line("gradients of one layer", gradients + weight, "6 T I + 4 H I")


def head(shape: ModelShape, recipe: Recipe) -> Line:
    """Log-probs of a tile of R rows and the head's gradient: 12 R V + 4 V H.

    R = min(T, STREAM_ROWS): fp32 logits, their gradient and one temporary of that size; the fp32
    gradient of the whole head, which exists on every GPU before it is reduced.
    """
    rows = min(recipe.micro_batch_tokens, STREAM_ROWS["triton"])
    total = 3 * FP32 * rows * shape.vocab + FP32 * shape.table_parameters
    return Line("log-probs and head", total, "12 R V + 4 V H")


def gathered(shape: ModelShape, recipe: Recipe) -> Line:
    """Whole bf16 weights of what runs and of what is fetched ahead: 2 (2 layer + V H).

    Two layers and one table; 0 on one GPU and under Megatron, where nothing is gathered. There the
    fused q, k, v is kept a second time in the engine's order of rows: 2 L H D (Hq + 2 Hk).
    """
    if recipe.megatron:
        columns = shape.head_dim * (shape.heads + 2 * shape.kv_heads)
        total = BF16 * shape.layers * shape.hidden * columns
        return Line("q, k, v in the engine's order", total, "2 L H D (Hq + 2 Hk)")
    if recipe.shard_gpus == 1:
        return Line("gathered weights", 0, "0 on one GPU")
    total = BF16 * (2 * shape.layer_parameters + shape.table_parameters)
    return Line("gathered weights", total, "2 (2 layer + V H)")


def masters(shape: ModelShape, recipe: Recipe) -> Line:
    """Trainer's weights: b P / N, b bytes a parameter (`fsdp_config.model_dtype`).

    Megatron: 2 P, bf16 and whole on every GPU; its fp32 masters belong to the optimizer.
    """
    if recipe.megatron:
        return Line("weights", BF16 * shape.parameters, "2 P")
    total = _share(recipe.master_bytes * shape.parameters, recipe.shard_gpus)
    return Line("masters", total, f"{recipe.master_bytes} P / N")


def gradients(shape: ModelShape, recipe: Recipe) -> Line:
    """Reduced gradients in the masters' dtype: b P / N. Megatron: 4 P, fp32 and whole."""
    if recipe.megatron:
        return Line("gradients", FP32 * shape.parameters, "4 P")
    total = _share(recipe.master_bytes * shape.parameters, recipe.shard_gpus)
    return Line("gradients", total, f"{recipe.master_bytes} P / N")


def optimizer(shape: ModelShape, recipe: Recipe) -> Line:
    """Adam's two moments in the masters' dtype: 2 b P / N. Megatron: 12 P / N, with the masters."""
    if recipe.megatron:
        total = _share(3 * FP32 * shape.parameters, recipe.shard_gpus)
        return Line("masters and optimizer", total, "12 P / N")
    total = _share(2 * recipe.master_bytes * shape.parameters, recipe.shard_gpus)
    return Line("optimizer", total, f"{2 * recipe.master_bytes} P / N")


def reference_policy(shape: ModelShape, recipe: Recipe) -> Line:
    """The reference policy's masters: b P / N. Megatron: 2 P, whole."""
    if recipe.megatron:
        return Line("reference policy", BF16 * shape.parameters, "2 P")
    total = _share(recipe.reference_bytes * shape.parameters, recipe.shard_gpus)
    return Line("reference policy", total, f"{recipe.reference_bytes} P / N")


def engine_weights(shape: ModelShape) -> Line:
    """vLLM's weights: 2 P (TP 1)."""
    return Line("engine weights", BF16 * shape.parameters, "2 P")


def engine_activations(shape: ModelShape, recipe: Recipe) -> Line:
    """Of the largest scheduler step: 2 B (4 H + 3 I + (2 Hq + 2 Hk) D) + 12 S V.

    B = max_num_batched_tokens, S = max_num_seqs: bf16 activations of one layer; fp32 logits,
    log-probs and one temporary of the sampled rows.
    """
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = 4 * shape.hidden + 3 * shape.intermediate + heads
    total = BF16 * recipe.max_num_batched_tokens * layer
    total += 3 * FP32 * recipe.max_num_seqs * shape.vocab
    return Line("engine activations", total, "2 B (4 H + 3 I + (2 Hq + 2 Hk) D) + 12 S V")


def kv_token_bytes(shape: ModelShape) -> int:
    """Bytes of a token in the KV cache: 4 L Hk D (k and v in bf16)."""
    return 2 * BF16 * shape.layers * shape.kv_heads * shape.head_dim


def weight_sync(shape: ModelShape, recipe: Recipe) -> tuple[Line, ...]:
    """Bytes that a GPU receives or copies in one weight update.

    Gather: b P (N - 1) / N over the network or NVLink, masters parameter by parameter. Copy: 2 P
    within the GPU, rounded to bf16, from the trainer's process into the engine's. Megatron gathers
    at the end of the optimizer's step: 2 P (N - 1) / N.
    """
    whole = recipe.master_bytes * shape.parameters
    received = whole - _share(whole, recipe.shard_gpus)
    return (
        Line("gathered by the trainer", received, f"{recipe.master_bytes} P (N - 1) / N"),
        Line("copied into the engine", BF16 * shape.parameters, "2 P"),
    )


def _share(total: int, parts: int) -> int:
    return -(-total // parts)


def _resident(shape: ModelShape, recipe: Recipe) -> list[Line]:
    """What the trainer leaves on the GPU while the engine runs."""
    lines = []
    if not recipe.param_offload:
        lines.append(masters(shape, recipe))
        if recipe.megatron:
            # Its buffers are released with the weights alone.
            lines += [gradients(shape, recipe), gathered(shape, recipe)]
    if not recipe.optimizer_offload:
        lines.append(optimizer(shape, recipe))
    if recipe.reference and not recipe.reference_offload:
        lines.append(reference_policy(shape, recipe))
    return lines


def make_plan(recipe: Recipe, shape: ModelShape, gpu_bytes: int, reserve_bytes: int) -> Plan:
    """Return the estimate of a recipe on a GPU.

    Training: masters, gradients, optimizer, gathered weights, activations, temporaries, the larger
    of a layer's backward and the head's, reference policy, reserve. Rollout: gpu_memory_utilization
    of the device for the engine, what the trainer leaves there, reserve. The KV cache is what the
    engine's part leaves after weights and activations.

    Args:
        recipe, shape: see there.
        gpu_bytes: memory of the device.
        reserve_bytes: contexts, graphs, communication, fragmentation; in both phases.
    """
    reserve = Line("reserve", reserve_bytes, "assumed")
    peak = max(backward_temporaries(shape, recipe), head(shape, recipe), key=lambda x: x.bytes)
    train_lines = [
        masters(shape, recipe),
        gradients(shape, recipe),
        optimizer(shape, recipe),
        gathered(shape, recipe),
        activations(shape, recipe),
        peak,
    ]
    if recipe.reference and not recipe.reference_offload:
        train_lines.append(reference_policy(shape, recipe))
    training = Phase("training", (*train_lines, reserve))

    weights, working = engine_weights(shape), engine_activations(shape, recipe)
    engine = int(recipe.gpu_memory_utilization * gpu_bytes)
    cache = engine - weights.bytes - working.bytes
    kv = Line("KV cache", max(cache, 0), "utilization x device - weights - activations")
    resident = _resident(shape, recipe)
    rollout = Phase("rollout", (weights, working, kv, *resident, reserve))
    per_token = kv_token_bytes(shape)
    plan = Plan(
        recipe=recipe,
        shape=shape,
        gpu_bytes=gpu_bytes,
        training=training,
        rollout=rollout,
        kv_token_bytes=per_token,
        kv_tokens=kv.bytes // per_token,
        sync=weight_sync(shape, recipe),
        problems=(),
    )
    return dataclasses.replace(plan, problems=tuple(_problems(plan)))


def _problems(plan: Plan) -> list[str]:
    recipe, found = plan.recipe, []
    if plan.training.bytes > plan.gpu_bytes:
        found.append(
            f"training needs {gib(plan.training.bytes)} of {gib(plan.gpu_bytes)} GiB: lower "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, keep "
            "model.enable_gradient_checkpointing, or take more GPUs"
        )
    if plan.rollout.bytes > plan.gpu_bytes:
        found.append(
            f"rollout needs {gib(plan.rollout.bytes)} of {gib(plan.gpu_bytes)} GiB: lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization, or set "
            f"actor.{'megatron' if recipe.megatron else 'fsdp_config'}.param_offload and "
            "optimizer_offload"
        )
    if plan.kv_tokens < recipe.max_model_len:
        found.append(
            f"the KV cache holds {plan.kv_tokens} tokens, less than one sequence of "
            f"{recipe.max_model_len}: raise actor_rollout_ref.rollout.gpu_memory_utilization"
        )
    if recipe.longest_sequence > recipe.micro_batch_tokens:
        found.append(
            f"a sequence of {recipe.longest_sequence} tokens exceeds a micro-batch of "
            f"{recipe.micro_batch_tokens}: raise "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        )
    if recipe.longest_sequence > recipe.max_model_len:
        found.append(
            f"prompt and response take {recipe.longest_sequence} tokens, more than "
            f"rollout.max_model_len={recipe.max_model_len}: raise it"
        )
    return found


def gib(count: int) -> str:
    """Return bytes as GiB with one decimal."""
    return f"{count / GIB:.1f}"
