"""The ops of a block with gradients: the engine's calls, wrapped in autograd Functions."""

from __future__ import annotations

import torch

from consistent_kernels.blocks import BlockOps
from consistent_kernels.blocks.parameters import LATENT
from consistent_kernels.compressor import CompressorParameters
from consistent_kernels.kv_cache_fp8 import KVLayout
from consistent_kernels.rotary import RopeParameters
from train_bridge.functions.compressor import CompressFunction, CompressorStateFunction
from train_bridge.functions.grouped_linear import GroupedLinearFunction
from train_bridge.functions.interleaved_rotary import InterleavedRotaryFunction
from train_bridge.functions.kv_cache_fp8 import KVCacheFP8Function
from train_bridge.functions.linear import LinearFunction
from train_bridge.functions.rms_norm import RMSNormFunction
from train_bridge.functions.sparse_attention import (
    SparseAttentionFP8Function,
    SparseAttentionFunction,
)

_compress = CompressFunction.apply
_compressor_state = CompressorStateFunction.apply
_grouped_linear = GroupedLinearFunction.apply
_interleaved_rotary = InterleavedRotaryFunction.apply
_kv_cache_fp8 = KVCacheFP8Function.apply
_linear = LinearFunction.apply
_rms_norm = RMSNormFunction.apply
_sparse_attention_fp8 = SparseAttentionFP8Function.apply
_sparse_attention = SparseAttentionFunction.apply


class TrainableBlockOps(BlockOps):
    """`BlockOps` whose results carry gradients to the masters and the inputs.

    What only the indexer uses (`rotary`, `layer_norm`) has none: no gradient flows into it.
    """

    backward: str = "own"
    """Of sparse attention: "own" or "cudnn"."""

    def linear(
        self, x: torch.Tensor, name: str, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As `BlockOps.linear`."""
        return _linear(
            x,
            self.weights[name],
            None,
            self.prepared(name, out_dtype),
            self.programs.linear,
            out_dtype,
        )

    def grouped_linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """As `BlockOps.grouped_linear`."""
        return _grouped_linear(x, self.weights[name], self.programs.grouped_linear)

    def rms_norm(self, x: torch.Tensor, name: str | None, eps: float) -> torch.Tensor:
        """As `BlockOps.rms_norm`."""
        if name is None:
            weight = torch.ones(x.shape[-1], dtype=self.dtype, device=x.device)
        else:
            weight = self.weights[name]
        return _rms_norm(x, weight, eps, self.programs.other)

    def interleaved_rotary(
        self,
        positions: torch.Tensor,
        x: torch.Tensor,
        rope: RopeParameters,
    ) -> torch.Tensor:
        """As `BlockOps.interleaved_rotary`."""
        return _interleaved_rotary(positions, x, rope, False, self.programs.other)

    def inverse_rotary_(
        self, positions: torch.Tensor, x: torch.Tensor, rope: RopeParameters
    ) -> torch.Tensor:
        """As `BlockOps.inverse_rotary_`, to a new tensor: autograd keeps x."""
        return _interleaved_rotary(positions, x, rope, True, self.programs.other)

    def compressor_state(
        self, kv_score: torch.Tensor, name: str, positions: torch.Tensor
    ) -> torch.Tensor:
        """As `BlockOps.compressor_state`."""
        bias = self.weights[f"{name}_bias"]
        return _compressor_state(kv_score, bias, positions, self.programs.other)

    def compress(
        self,
        state: torch.Tensor,
        name: str,
        rows: torch.Tensor,
        positions: torch.Tensor,
        rope: RopeParameters,
        params: CompressorParameters,
    ) -> torch.Tensor:
        """As `BlockOps.compress`."""
        weight = self.weights[f"{name}_norm"]
        return _compress(
            state, weight, rows, positions, rope, params, self.dtype, self.programs.other
        )

    def sparse_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        d_v: int,
        sinks: str | None = None,
    ) -> torch.Tensor:
        """As `BlockOps.sparse_attention`."""
        values = None if sinks is None else self.weights[sinks]
        return _sparse_attention(
            q, kv, indices, values, scale, d_v, self.programs.attention, self.backward
        )

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        layout: KVLayout,
        scale: float,
        extra: tuple[torch.Tensor, torch.Tensor] | None = None,
        sinks: str | None = None,
    ) -> torch.Tensor:
        """Attend to packed rows through a private FP8 cache, by the engine's read path.

        Args:
            q: [T, H, width]; kv: [S, width] bf16; indices: [T, K] int32 rows of kv, or -1.
            extra: a second (kv, indices), whose columns come behind.
        """
        if self.programs.read == "fp8":
            values = None if sinks is None else self.weights[sinks]
            more = (None, None) if extra is None else extra
            return _sparse_attention_fp8(
                q, kv, indices, *more, values, scale, layout, self.programs.attention,
                self.programs.kv_cache, self.backward,
            )  # fmt: skip
        rows = _kv_cache_fp8(kv, layout, self.programs.kv_cache)
        if extra is not None:
            behind = _kv_cache_fp8(extra[0], layout, self.programs.kv_cache)
            more = torch.where(extra[1] >= 0, extra[1] + len(rows), -1)
            rows, indices = torch.cat((rows, behind)), torch.cat((indices, more), dim=1)
        return self.sparse_attention(q, rows, indices, scale, LATENT, sinks)
