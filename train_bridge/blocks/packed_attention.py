"""What the trainer's attention blocks share: masters, settings around them, their backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from consistent_kernels.blocks import BlockPrograms, V4Parameters, V32Parameters
from consistent_kernels.blocks.ops import check_weights
from consistent_kernels.blocks.paging import require_hidden
from consistent_kernels.errors import invalid
from consistent_kernels.sparse_attention import require_backward
from train_bridge.blocks.ops import TrainableBlockOps
from train_bridge.blocks.packing import PackedSequences
from train_bridge.functions.ambient import plain_settings
from train_bridge.weight_version import MASTER_DTYPES

AS_THEY_ARE = "a trainer's block runs the engine's kernels as they are"
"""Why torch.compile stays out: it would leave out the rounding of a master to bf16, for one."""


class PackedAttention(torch.nn.Module):
    """Masters by name; those of the indexer are buffers, since no gradient flows into it."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: dict[str, torch.Tensor],
        params: V32Parameters | V4Parameters,
        programs: BlockPrograms,
        backward: str,
    ) -> None:
        super().__init__()
        require_backward(backward)
        check_weights(type(self).__name__, weights, shapes)
        self.params = params
        self.programs, self.backward_name = programs, backward
        for name in shapes:
            own = weights[name].detach().clone()  # a reload of this block reaches no other
            if name.startswith("index_"):
                self.register_buffer(name, own)
            else:
                self.register_parameter(name, torch.nn.Parameter(own))

    @torch.compiler.disable(reason=AS_THEY_ARE)
    def forward(self, hidden: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
        """Attend inside each sequence; autocast around the call reaches nothing.

        Args:
            hidden: [T, hidden] bf16; sequences: of the same T tokens.

        Returns:
            [T, hidden] bf16.

        Raises:
            InvalidInputError: hidden states of another shape or dtype, or masters of a dtype that
                does not round to the engine's weights in one step.
        """
        weights = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, weight in weights.items():
            if weight.dtype not in MASTER_DTYPES:
                # block.half() would round twice, and the engine rounds once.
                hint = "Cast the block back, and load its weights again"
                expected = "float32 or bfloat16"
                raise invalid(type(self).__name__, f"weight {name!r}", expected, weight.dtype, hint)
        ops = TrainableBlockOps(weights, self.programs)
        ops.backward = self.backward_name
        tokens = len(sequences.positions)
        require_hidden(type(self).__name__, hidden, tokens, self.params.hidden, ops.dtype)
        with plain_settings(hidden.device.type):
            return self._attend(ops, hidden, sequences)

    def _attend(
        self, ops: TrainableBlockOps, hidden: torch.Tensor, sequences: PackedSequences
    ) -> torch.Tensor:
        raise NotImplementedError
