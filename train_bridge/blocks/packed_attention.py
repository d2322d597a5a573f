"""What the trainer's attention blocks share: masters, and how sparse attention runs backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from consistent_kernels.blocks import BlockPrograms
from consistent_kernels.blocks.ops import check_weights
from consistent_kernels.sparse_attention import require_backward

AS_THEY_ARE = "a trainer's block runs the engine's kernels as they are"
"""Why torch.compile stays out: it would leave out the rounding of a master to bf16, for one."""


class PackedAttention(torch.nn.Module):
    """Masters by name; those of the indexer are buffers, since no gradient flows into it."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: dict[str, torch.Tensor],
        programs: BlockPrograms,
        backward: str,
    ) -> None:
        super().__init__()
        require_backward(backward)
        check_weights(type(self).__name__, weights, shapes)
        self.programs, self.backward_name = programs, backward
        for name in shapes:
            if name.startswith("index_"):
                self.register_buffer(name, weights[name])
            else:
                self.register_parameter(name, torch.nn.Parameter(weights[name].clone()))
