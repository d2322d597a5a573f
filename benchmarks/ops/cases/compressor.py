"""A compressor step of DeepSeek-V4, state to FP8 cache, against vLLM's Triton kernels for it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_to_cache,
    paged_windows,
    write_compressor_state,
)
from consistent_kernels.compressor.spec import IMPLEMENTATIONS
from consistent_kernels.kv_cache_fp8 import INDEXER, V4, KVLayout, new_cache
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.testing import norm_weight

OP = "compressor"
_BLOCK = 64
_FORMS = (("csa", 4, 512), ("hca", 128, 512), ("index", 4, 128))
_NO_CPU = "vLLM has no such kernel on a CPU"
_REASON = (
    "stock on CUDA takes a CUTLASS DSL form of the 512-column kernel where that package is "
    "installed; timed is its Triton form"
)


@dataclasses.dataclass
class Step:
    """A step of T requests, every token closing a window: the most that a step can have to do."""

    params: CompressorParameters
    layout: KVLayout
    rope: RopeParameters
    kv_score: torch.Tensor
    bias: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    entry_slots: torch.Tensor
    table: torch.Tensor
    state: torch.Tensor
    cache: torch.Tensor
    rows: torch.Tensor
    """Which state rows form which entry: integers, once a step for all layers of a ratio."""
    first: torch.Tensor

    def ours(self, impl: str) -> None:
        """Store the state, form the entries, store them."""
        write_compressor_state(
            self.kv_score, self.bias, self.positions, self.state, self.slots, impl=impl
        )
        compress_to_cache(
            self.state, self.rows, self.first, self.weight, self.cache, self.entry_slots,
            rope=self.rope, params=self.params, layout=self.layout, impl=impl,
        )  # fmt: skip

    def entries(self, impl: str, part: slice = slice(None)) -> torch.Tensor:
        """The entries of some tokens, bf16."""
        return compress(
            self.state, self.rows[part], self.first[part], self.weight, rope=self.rope,
            params=self.params, impl=impl,
        )  # fmt: skip

    def stock(self) -> None:
        """vLLM's `save_partial_states` and `compress_norm_rope_store_triton`."""
        from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import (
            compress_norm_rope_store_triton,
        )
        from vllm.models.deepseek_v4.common.ops.save_partial_states import save_partial_states

        width, size = self.params.state_width, self.params.head_dim
        pages = self.state.view(-1, _BLOCK, 2 * width)
        cos, sin = rope_tables(self.rope, self.state.device)
        pdl = {"launch_pdl": False}
        save_partial_states(
            kv=self.kv_score[:, :width], score=self.kv_score[:, width:], ape=self.bias,
            positions=self.positions, state_cache=pages, slot_mapping=self.slots,
            block_size=_BLOCK, state_width=width, compress_ratio=self.params.ratio, pdl_kwargs=pdl,
        )  # fmt: skip
        is_index = self.layout is INDEXER
        compress_norm_rope_store_triton(
            state_cache=pages, num_actual=len(self.positions), token_to_req_indices=self.requests,
            positions=self.positions, slot_mapping=self.slots, block_table=self.table,
            block_size=_BLOCK, state_width=width, cos_sin_cache=_cos_sin(cos, sin),
            kv_cache=self.cache,
            k_cache_metadata=types.SimpleNamespace(slot_mapping=self.entry_slots),
            pdl_kwargs=pdl, head_dim=size, rope_head_dim=64, compress_ratio=self.params.ratio,
            overlap=self.params.overlap, use_fp4_cache=False, rms_norm_weight=self.weight,
            rms_norm_eps=self.params.norm_eps, quant_block=128 if is_index else 64,
            token_stride=size if is_index else 576, scale_dim=4 if is_index else 8,
        )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _cos_sin(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((cos, sin), dim=1)


def make_step(setting: Setting, ratio: int, size: int, tokens: int) -> Step:
    """Draw a step of `tokens` requests, each at the end of its third window."""
    params = CompressorParameters(ratio, ratio == 4, size, 1e-6)
    device, width = setting.device, params.state_width
    layout = INDEXER if size == 128 else V4
    last = 3 * ratio - 1
    pages = last // _BLOCK + 1
    table = torch.arange(tokens * pages, dtype=torch.int32, device=device).view(tokens, pages)
    positions = torch.full((tokens,), last, dtype=torch.int64, device=device)
    slots = table[:, last // _BLOCK].long() * _BLOCK + last % _BLOCK
    requests = torch.arange(tokens, dtype=torch.int32, device=device)
    return Step(
        params,
        layout,
        RopeParameters(head_dim=size, rotary_dim=64, theta=160000.0, max_position=4096),
        setting.hazards(tokens, 2 * width, seed=1).float(),
        setting.normal(ratio, width, seed=2, dtype=torch.float32),
        norm_weight(size, seed=3, device=device),
        positions,
        requests,
        slots,
        table[:, 0].long() * _BLOCK + last // ratio,
        table,
        setting.normal(tokens * pages * _BLOCK, 2 * width, seed=4, dtype=torch.float32),
        new_cache(tokens * pages, _BLOCK, layout, device),
        paged_windows(positions, requests, table, _BLOCK, params),
        positions // ratio * ratio,
    )


def steps(
    setting: Setting, name: str, ratio: int, size: int, tokens: int
) -> Iterator[tuple[Case, Step]]:
    """The same step by each implementation; `step.cache` is what it writes."""
    step = make_step(setting, ratio, size, tokens)
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(step.entries, impl)
        yield (
            Case(
                op="compressor",
                shape=f"{name} tokens={tokens} ratio={ratio} D={size}",
                impl=impl,
                ours=functools.partial(step.ours, impl),
                stock=step.stock if setting.device == "cuda" else None,
                relations=functools.partial(check_rows, run, tokens),
                reason=_REASON if setting.device == "cuda" else _NO_CPU,
            ),
            step,
        )


def cases(setting: Setting) -> Iterator[Case]:
    """CSA and HCA of the attention, CSA of the indexer, at decode sizes."""
    for name, ratio, size in _FORMS:
        for tokens in setting.rows():
            if tokens <= 256:  # a prefill closes one window in `ratio` tokens
                for case, _ in steps(setting, name, ratio, size, tokens):
                    yield case
