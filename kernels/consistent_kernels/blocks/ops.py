"""The ops of a block as the engine calls them; the trainer's subclass gives them gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from consistent_kernels.blocks.layer_norm import index_layer_norm
from consistent_kernels.blocks.parameters import BlockPrograms
from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_to_cache,
    compressor_state,
)
from consistent_kernels.errors import invalid
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.interleaved_rotary import interleaved_rotary, interleaved_rotary_
from consistent_kernels.kv_cache_fp8 import KVLayout
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.rms_norm import rms_norm
from consistent_kernels.rotary import RopeParameters, rotary
from consistent_kernels.sparse_attention import sparse_attention, sparse_attention_fp8


def check_weights(
    op: str, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse missing, unknown and misshapen weights.

    Raises:
        InvalidInputError: names the first one.
    """
    for name in sorted(shapes.keys() | weights.keys()):
        expected = shapes.get(name, "absent")
        given = tuple(weights[name].shape) if name in weights else "absent"
        if expected != given:
            raise invalid(op, f"weight {name!r}", expected, given)


class BlockOps:
    """Calls the ops of a block on its weights, with the programs that were chosen.

    Weights are rounded by `prepare`, or at their first use; make a new object after an update. An
    engine prepares: a compiler that saw the cast to bf16 and back would leave it out.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        programs: BlockPrograms,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Hold the weights.

        Args:
            weights: masters by name, of any float dtype.
            programs: the implementation of each op.
            dtype: the model dtype.
        """
        self.weights, self.programs, self.dtype = weights, programs, dtype
        self._prepared: dict[str, torch.Tensor] = {}

    def prepared(self, name: str, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a linear's weight in the form its program reads."""
        if name not in self._prepared:
            self._prepared[name] = prepare_weight(
                self.weights[name], dtype=self.dtype, impl=self.programs.linear, out_dtype=out_dtype
            )
        return self._prepared[name]

    def rounded(self, name: str) -> torch.Tensor:
        """Return a weight rounded to the model dtype, contiguous."""
        if name not in self._prepared:
            self._prepared[name] = self.weights[name].detach().to(self.dtype).contiguous()
        return self._prepared[name]

    def exact(self, name: str) -> torch.Tensor:
        """Return a weight in fp32, contiguous."""
        if name not in self._prepared:
            self._prepared[name] = self.weights[name].detach().float().contiguous()
        return self._prepared[name]

    def prepare(
        self,
        linears: Iterable[str],
        fp32_linears: Iterable[str],
        others: Iterable[str],
        exact: Iterable[str] = (),
    ) -> None:
        """Round the weights now: of linears, of those with fp32 results, of other ops; or not."""
        for name in exact:
            self.exact(name)
        for name in linears:
            self.prepared(name)
        for name in fp32_linears:
            self.prepared(name, torch.float32)
        for name in others:
            self.rounded(name)

    def linear(
        self, x: torch.Tensor, name: str, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x W^T by the weight of that name."""
        weight = self.prepared(name, out_dtype)
        return linear(x, weight, impl=self.programs.linear, out_dtype=out_dtype)

    def grouped_linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x[:, g] W[g]^T by the weight of that name."""
        return grouped_linear(x, self.rounded(name), impl=self.programs.grouped_linear)

    def rms_norm(self, x: torch.Tensor, name: str | None, eps: float) -> torch.Tensor:
        """RMS norm by the weight of that name, or by ones."""
        if name is None:
            weight = torch.full(x.shape[-1:], 1.0, dtype=self.dtype, device=x.device)
        else:
            weight = self.rounded(name)
        return rms_norm(x, weight, eps, impl=self.programs.other)

    def interleaved_rotary(
        self,
        positions: torch.Tensor,
        x: torch.Tensor,
        rope: RopeParameters,
    ) -> torch.Tensor:
        """Rotate adjacent pairs of the last columns."""
        return interleaved_rotary(positions, x, rope=rope, impl=self.programs.other)

    def inverse_rotary_(
        self, positions: torch.Tensor, x: torch.Tensor, rope: RopeParameters
    ) -> torch.Tensor:
        """Rotate them back; x may be overwritten, and what is returned is used in its place."""
        return interleaved_rotary_(positions, x, rope=rope, inverse=True, impl=self.programs.other)

    def rotary(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rope: RopeParameters
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate halves of the first columns (the indexer of V3.2)."""
        return rotary(positions, q, k, rope=rope, impl=self.programs.other)

    def layer_norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        """`index_layer_norm` by the weight and bias of that name, in fp32 (V3.2's index keys)."""
        weight, bias = (self.exact(key) for key in (name, f"{name}_bias"))
        return index_layer_norm(x, weight, bias, eps)

    def compressor_state(
        self, kv_score: torch.Tensor, name: str, positions: torch.Tensor
    ) -> torch.Tensor:
        """What tokens leave for the compressor of that name."""
        bias = self.weights[f"{name}_bias"].detach()
        return compressor_state(kv_score, bias, positions, impl=self.programs.other)

    def compress(
        self,
        state: torch.Tensor,
        name: str,
        rows: torch.Tensor,
        positions: torch.Tensor,
        rope: RopeParameters,
        params: CompressorParameters,
    ) -> torch.Tensor:
        """Entries of the compressor of that name."""
        return compress(
            state, rows, positions, self.rounded(f"{name}_norm"), rope=rope, params=params,
            dtype=self.dtype, impl=self.programs.other,
        )  # fmt: skip

    def compress_to_cache(
        self,
        state: torch.Tensor,
        name: str,
        rows: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        rope: RopeParameters,
        params: CompressorParameters,
        layout: KVLayout,
    ) -> None:
        """Entries of the compressor of that name, stored in their FP8 cache."""
        weight = self.rounded(f"{name}_norm")
        compress_to_cache(
            state, rows, positions, weight, cache, slots, rope=rope, params=params, layout=layout,
            impl=self.programs.other,
        )  # fmt: skip

    def sparse_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        d_v: int,
        sinks: str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over named entries, with the sinks of that name; written into `out`, if any."""
        values = None if sinks is None else self.weights[sinks].detach()
        return sparse_attention(
            q, kv, indices, scale=scale, d_v=d_v, sinks=values, out=out,
            impl=self.programs.attention,
        )[0]  # fmt: skip

    def sparse_attention_fp8(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
        extra: tuple[torch.Tensor, torch.Tensor] | None = None,
        sinks: str | None = None,
    ) -> torch.Tensor:
        """Attention over named slots of FP8 caches, with the sinks of that name."""
        values = None if sinks is None else self.weights[sinks].detach()
        return sparse_attention_fp8(
            q, cache, slots, scale=scale, extra=extra, sinks=values, impl=self.programs.attention
        )[0]
