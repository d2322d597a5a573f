"""All decoder layers of a dense model on CPU as one list of kernel calls.

With few rows, calls from Python cost as much as the arithmetic. The list runs the kernels that the
layers' own ops run ("llvm"), and for norms and rotary ones that a probe found to give the
reference's bits: so the result is that of the layers one by one, which the trainer computes too.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaModel
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3Model

from consistent_kernels import counters, llvm
from consistent_kernels.attention import plan_attention
from consistent_kernels.attention.cpu import page_rows
from consistent_kernels.contract import Contract
from consistent_kernels.rotary.tables import rope_tables
from vllm_consistent.layers.activation import ConsistentSiluAndMul
from vllm_consistent.layers.layernorm import ConsistentRMSNorm
from vllm_consistent.layers.linear import ConsistentLinearMethod
from vllm_consistent.layers.rotary import RotaryMixin

_KEPT_LISTS = 32
_WIDENED = 8  # columns that are widened at once
_LAYERS = (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_COMPILED = ("attention", "linear", "silu_and_mul")


@dataclasses.dataclass
class _Step:
    """One list of calls with the tensors it reads and writes."""

    commands: Any
    plan: Any
    hidden: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    out: torch.Tensor
    keeps: list[torch.Tensor]
    is_decode: bool = False


class CompiledDecoder:
    """Builds and keeps lists by the shape of a batch; `run` is the model's forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = list(model.layers)
        first = self.layers[0].self_attn
        self.params = first.attn.impl.params
        self.rope = first.rotary_emb.rope
        self.steps: collections.OrderedDict[Any, _Step] = collections.OrderedDict()
        # Looked up once: attributes of modules are slow, and each step wants a hundred.
        self._attentions = [layer.self_attn.attn for layer in self.layers]
        self._names = [attention.layer_name for attention in self._attentions]
        self._weighted = [model.norm, *(layer.input_layernorm for layer in self.layers)]

    def metadata(self, rows: int) -> Any | None:
        """Return the metadata that all layers share, or None where the layers must run alone."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        one = metadata.get(self._names[0])
        same = one is not None and all(metadata.get(name) is one for name in self._names)
        return one if same and one.num_actual_tokens == rows else None

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, meta: Any) -> torch.Tensor:
        """hidden [T, H] bf16 (embedded tokens), positions [T] -> [T, H] behind the last norm."""
        rows, addresses = hidden.shape[0], self._addresses()
        step = self._decode_step(rows, meta, addresses) or self._planned_step(
            hidden, meta, addresses
        )
        step.hidden.copy_(hidden)
        step.positions.copy_(positions)
        step.slots.copy_(meta.slot_mapping[:rows])
        self._count()
        step.commands.run()
        return step.out.clone()

    def _decode_step(self, rows: int, meta: Any, addresses: tuple[int, ...]) -> _Step | None:
        """Return the kept list of a batch of one query a sequence; such a batch needs no plan.

        Units of work and starts are the same for all of them; lengths and pages are copied.
        """
        if meta.max_query_len != 1 or meta.seq_lens.shape[0] != rows:
            return None
        key = (rows, rows, tuple(meta.block_table.shape), addresses)
        step = self.steps.get(key)
        if step is None or not step.is_decode or int(meta.seq_lens.min()) < 1:
            return None
        self.steps.move_to_end(key)
        step.plan.batch.lengths.copy_(meta.seq_lens)
        step.plan.batch.table.copy_(meta.block_table)
        return step

    def _planned_step(self, hidden: torch.Tensor, meta: Any, addresses: tuple[int, ...]) -> _Step:
        plan = plan_attention(
            meta.query_start_loc,
            params=self.params,
            num_tokens=hidden.shape[0],
            impl="llvm",
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            k_cache=self._attentions[0].kv_cache.select(1, 0),
        )
        batch = plan.batch
        key = (hidden.shape[0], batch.items.shape[0], tuple(batch.table.shape), addresses)
        step = self.steps.get(key)
        if step is None:
            step = self._build(hidden, plan)
            self.steps[key] = step
            if len(self.steps) > _KEPT_LISTS:
                self.steps.popitem(last=False)
        else:
            self.steps.move_to_end(key)
            mine = step.plan.batch
            for name in ("items", "starts", "lengths", "table"):
                getattr(mine, name).copy_(getattr(batch, name))
        # As many queries as rows, all of them used, one a unit: what `_decode_step` relies on.
        count = batch.items.shape[0]
        one_each = count == hidden.shape[0] == batch.lengths.shape[0]
        step.is_decode = one_each and bool((batch.items[:, 2] == 1).all())
        return step

    def _addresses(self) -> tuple[int, ...]:
        # Pages and norms may move (a reload, a new cache); packed weights are rebuilt in place.
        pages = [attention.kv_cache.data_ptr() for attention in self._attentions]
        norms = [norm._parameters["weight"].data_ptr() for norm in self._weighted]
        return (*pages, *norms)

    def _count(self) -> None:
        layers = len(self.layers)
        counters.count("linear", "llvm", 4 * layers)
        for op in ("attention_paged", "silu_and_mul"):
            counters.count(op, "llvm", layers)
        counters.count("write_kv", "llvm", layers)
        counters.count("rotary", "reference", layers)
        counters.count("rms_norm", "reference")
        counters.count("add_rms_norm", "reference", 2 * layers)
        if self._norms(self.layers[0].self_attn) is not None:
            counters.count("rms_norm", "reference", 2 * layers)

    @staticmethod
    def _norms(attention: Any) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        norm = getattr(attention, "q_norm", None)
        if norm is None:
            return None
        return norm.weight, attention.k_norm.weight, norm.variance_epsilon

    def _build(self, hidden: torch.Tensor, plan: Any) -> _Step:
        """Allocate the buffers of a step and write its list of calls."""
        # Ordinary tensors: an inference tensor could not be written outside inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            return _StepBuilder(self, hidden.shape[0], plan).build()


class _StepBuilder:
    def __init__(self, decoder: CompiledDecoder, rows: int, plan: Any) -> None:
        from consistent_kernels.attention import llvm as attention
        from consistent_kernels.linear import llvm as linear
        from consistent_kernels.linear.packing import packed_weight
        from consistent_kernels.llvm.commands import Commands
        from consistent_kernels.rms_norm import llvm as rms_norm
        from consistent_kernels.rotary import llvm as rotary
        from consistent_kernels.silu_and_mul import llvm as silu

        self.attention, self.linear, self.rms_norm = attention, linear, rms_norm
        self.rotary, self.silu, self.packed_weight = rotary, silu, packed_weight
        self.commands_type = Commands
        self.decoder, self.rows, self.params = decoder, rows, decoder.params
        batch = plan.batch
        copies = {
            name: getattr(batch, name).clone() for name in ("items", "starts", "lengths", "table")
        }
        self.plan = dataclasses.replace(plan, batch=dataclasses.replace(batch, **copies))
        self.calls: list[Any] = []
        self.keeps: list[torch.Tensor] = []
        self.outputs: dict[Any, torch.Tensor] = {}
        self.positions = torch.empty(rows, dtype=torch.int64)
        self.slots = torch.empty(rows, dtype=torch.int64)

    def _bf16(self, columns: int) -> torch.Tensor:
        return torch.empty((self.rows, columns), dtype=torch.bfloat16)

    def build(self) -> _Step:
        model = self.decoder.model
        width = model.norm.weight.shape[0]
        heads, head_dim = self.params.num_heads, self.params.head_dim
        residual, normed = self._bf16(width), self._bf16(width)
        queries, mixed = (self._bf16(heads * head_dim) for _ in range(2))
        out = None
        linears = [linear for layer in self.decoder.layers for linear in _linears(layer)]
        self.following = dict(zip(map(id, linears), linears[1:], strict=False))
        for layer in self.decoder.layers:
            self._norm(out, residual, layer.input_layernorm, normed)
            qkv = self._linear(layer.self_attn.qkv_proj, normed, "qkv")
            self._rotate(layer.self_attn, qkv, queries)
            self._attend(layer.self_attn, queries, mixed)
            out = self._linear(layer.self_attn.o_proj, mixed, "o")
            self._norm(out, residual, layer.post_attention_layernorm, normed)
            both = self._linear(layer.mlp.gate_up_proj, normed, "gate_up")
            active = self._activate(layer.mlp.down_proj, both)
            out = self._linear(layer.mlp.down_proj, active, "down")
        self._norm(out, residual, model.norm, normed)
        self.keeps += [residual, normed, queries, mixed, *self.outputs.values()]
        commands = self.commands_type(self.calls)
        return _Step(commands, self.plan, residual, self.positions, self.slots, normed, self.keeps)

    def _norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Any, out: torch.Tensor
    ) -> None:
        weight, eps = norm.weight.data, norm.variance_epsilon
        if x is None:
            call = self.rms_norm.command(residual, None, weight, eps, out, None)
        else:
            call = self.rms_norm.command(x, residual, weight, eps, out, residual)
        self.calls.append(call)

    def _linear(self, layer: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        method = layer.quant_method
        packed = self.packed_weight(method.packed[0].number)
        columns = packed.shape[0] * packed.shape[2]
        if name not in self.outputs:
            self.outputs[name] = self._bf16(columns)
        out = self.outputs[name]
        if llvm.multiplier() == "fma":
            wide = self.outputs.setdefault(
                ("wide", x.shape[1]), torch.empty(x.shape, dtype=torch.float32)
            )
            self.calls.append(self.linear.widen_command(x, wide))
            x = wide
        following = self.following.get(id(layer))
        if following is not None:
            following = self.packed_weight(following.quant_method.packed[0].number)
        self.calls.append(self.linear.command(x, packed, method.addend(layer), out, following))
        self.keeps += [packed, method.addend(layer)]
        return out[:, : method.packed[0].columns]

    def _rotate(self, attention: Any, qkv: torch.Tensor, queries: torch.Tensor) -> None:
        tables = rope_tables(self.decoder.rope, "cpu")
        cache = attention.attn.kv_cache
        (k_rows, step), (v_rows, _) = (page_rows(part) for part in cache.unbind(1))
        norm = self.decoder._norms(attention)
        heads = rotary_heads(self.params, tables[0].shape[1], norm is not None)
        pages = (k_rows, v_rows, cache.shape[2], step)
        self.calls.append(
            self.rotary.command(
                self.positions, tables, qkv, queries, pages, self.slots, heads, norm
            )
        )
        self.keeps += [*tables, k_rows, v_rows]

    def _attend(self, attention: Any, queries: torch.Tensor, mixed: torch.Tensor) -> None:
        shape = (self.rows, self.params.num_heads, self.params.head_dim)
        k_rows, v_rows = (page_rows(part)[0] for part in attention.attn.kv_cache.unbind(1))
        plan = dataclasses.replace(self.plan, params=attention.attn.impl.params)
        self.calls.append(
            self.attention.command(
                queries.view(shape), k_rows, v_rows, plan, mixed.view(shape), None
            )
        )

    def _activate(self, down: Any, both: torch.Tensor) -> torch.Tensor:
        half = both.shape[1] // 2
        active = self.outputs.setdefault("active", self._bf16(half))
        self.calls.append(self.silu.command(both[:, :half], both[:, half:], active))
        return active


def rotary_heads(params: Any, half: int, has_norm: bool) -> Any:
    """Return the shape of the rotary kernel."""
    from consistent_kernels.rotary.llvm import Heads

    return Heads(params.num_heads, params.num_kv_heads, params.head_dim, half, has_norm)


class _CompiledForward:
    """Goes before vLLM's model class."""

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """As vLLM's; the layers run alone while vLLM profiles, when there are no pages."""
        meta = None
        if inputs_embeds is None and intermediate_tensors is None:
            meta = self.compiled_decoder.metadata(input_ids.shape[0])
        if meta is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        return self.compiled_decoder.run(self.embed_input_ids(input_ids), positions, meta)


class ConsistentLlamaModel(_CompiledForward, LlamaModel):
    """Llama, SmolLM2."""


class ConsistentQwen2Model(_CompiledForward, Qwen2Model):
    """Qwen2."""


class ConsistentQwen3Model(_CompiledForward, Qwen3Model):
    """Dense Qwen3."""


_MODELS = {
    LlamaModel: ConsistentLlamaModel,
    Qwen2Model: ConsistentQwen2Model,
    Qwen3Model: ConsistentQwen3Model,
}


def compile_decoder(model: Any, contract: Contract) -> bool:
    """Give a loaded model on CPU the forward above; returns whether the list can serve it.

    Nothing but speed depends on the answer.
    """
    body = getattr(model, "model", None)
    served = _MODELS.get(type(body))
    if served is None or any(contract.implementation(op) != "llvm" for op in _COMPILED):
        return False
    if not all(_is_served(layer) for layer in body.layers) or not _is_norm(body.norm):
        return False
    body.compiled_decoder = CompiledDecoder(body)
    body.__class__ = served
    return True


def _is_norm(norm: Any) -> bool:
    from consistent_kernels.rms_norm.llvm import has_reference_bits

    ours = type(norm) is ConsistentRMSNorm and norm.weight.dtype == torch.bfloat16
    return ours and has_reference_bits(norm.weight.shape[0])


def _is_linear(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    if type(method) is not ConsistentLinearMethod or len(method.packed or ()) != 1:
        return False
    return method.packed[0].inner % _WIDENED == 0


def _linears(layer: Any) -> tuple[Any, ...]:
    """In the order in which they run."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _is_served(layer: Any) -> bool:
    from consistent_kernels.rotary.llvm import has_reference_bits

    if not isinstance(layer, _LAYERS):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if not all(map(_is_linear, _linears(layer))) or not all(map(_is_norm, norms)):
        return False
    if type(mlp.act_fn) is not ConsistentSiluAndMul:
        return False
    if not isinstance(attention.rotary_emb, RotaryMixin):
        return False
    has_norm = hasattr(attention, "q_norm")
    if has_norm:
        pair = (attention.q_norm, attention.k_norm)
        if not all(map(_is_norm, pair)) or len({n.variance_epsilon for n in pair}) != 1:
            return False
    half = rope_tables(attention.rotary_emb.rope, "cpu")[0].shape[1]
    return has_reference_bits(rotary_heads(attention.attn.impl.params, half, has_norm))
