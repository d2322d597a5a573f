"""Time tiles of the experts' grouped GEMMs and say which give the base tile's bits (CUDA).

`python -m benchmarks.expert_tiles.run`: what `TILES_BY_ROWS` in
`kernels/consistent_kernels/experts/spec.py` is chosen from. Shape: Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

import torch
import triton

from benchmarks.ops.timing import interleaved_us
from consistent_kernels.experts.spec import BASE_TILE, GroupedTile
from consistent_kernels.experts.triton import launch
from consistent_kernels.experts.triton_layout import expert_layout

EXPERTS, SLOTS, HIDDEN, WIDTH = 128, 8, 2048, 768
TOKENS = {64: (16, 32), 256: (16, 32, 64), 4096: (64, 128)}
"""Tokens to the rows of a tile that are worth a try."""
SHAPES = {
    16: [(64, 128, 4), (128, 128, 3), (128, 128, 4), (128, 64, 4), (256, 128, 2), (128, 256, 2)],
    32: [(128, 128, 3), (128, 64, 4), (256, 128, 2), (256, 64, 3)],
    64: [(128, 64, 3), (128, 64, 4), (128, 128, 3), (256, 64, 3)],
    128: [(128, 64, 4), (256, 64, 3), (256, 64, 4)],
}
"""Rows to (weight rows, columns of K, stages)."""


def time_us(tokens: int, tile: GroupedTile, gated: bool) -> tuple[float, torch.Tensor]:
    """Return the median time of one of the two GEMMs, and its result."""
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.rand((tokens, EXPERTS), device="cuda", generator=generator).topk(SLOTS).indices
    ids = ids.int().view(-1).contiguous()
    rows, inner, outer = (tokens, HIDDEN, WIDTH) if gated else (ids.numel(), WIDTH, HIDDEN)
    x = torch.empty((rows, inner), dtype=torch.bfloat16, device="cuda")
    x.normal_(generator=generator)
    weight = torch.empty(
        (EXPERTS, outer * (2 if gated else 1), inner), dtype=torch.bfloat16, device="cuda"
    ).normal_(0.0, 0.02, generator=generator)
    y = torch.empty((ids.numel(), outer), dtype=torch.bfloat16, device="cuda")
    layout = expert_layout(ids, EXPERTS, tile.block_m)

    def call() -> None:
        launch(x, weight, y, layout, tile, slots=SLOTS, gated=gated)

    us, _ = interleaved_us(call, None, device="cuda", repeats=20, graph=True)
    return us, y


def main() -> int:
    """Print one line of JSON a tile, the fastest of each group last."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for tokens, gated in itertools.product(TOKENS, (True, False)):
        _, expected = time_us(tokens, BASE_TILE, gated)
        rows = []
        for block_m in TOKENS[tokens]:
            for block_n, block_k, stages in SHAPES[block_m]:
                warps = (8,) if block_m == 128 else (4, 8) if block_n == 256 else (4,)
                for num_warps in warps:
                    tile = GroupedTile(block_m, block_n, block_k, num_warps, stages)
                    try:
                        us, y = time_us(tokens, tile, gated)
                    except triton.runtime.errors.OutOfResources as error:
                        sys.stdout.write(f"{tile}: {error}\n")
                        continue
                    same = torch.equal(y.view(torch.int16), expected.view(torch.int16))
                    rows.append((us, same, tile))
        for us, same, tile in sorted(rows, key=lambda row: -row[0]):
            line = {"tokens": tokens, "gated": gated, "us": round(us, 1), "same_bits": same}
            sys.stdout.write(json.dumps(line | {"tile": str(tile)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
