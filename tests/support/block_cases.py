"""Attention blocks with random weights, and an engine that is fed in steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from consistent_kernels.blocks import (
    BlockPrograms,
    PagedBatch,
    PagedV4Attention,
    PagedV32Attention,
    V4Parameters,
    V32Parameters,
    v4_weight_shapes,
    v32_weight_shapes,
)
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.testing import hazard_activations
from train_bridge.blocks import PackedSequences, PackedV4Attention, PackedV32Attention

ROPE = RopeParameters(head_dim=64, rotary_dim=64, theta=10000.0, max_position=8192)
BLOCK_SIZE = 16
CPU = BlockPrograms()
CUDA = BlockPrograms(
    linear="triton", indexer="triton", attention="flash_mla", topk="cuda", other="triton"
)
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="these programs need a CUDA device"
)
PROGRAMS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=[pytest.mark.gpu, needs_cuda]),
]
BLOCKS = ("v32", "v4-window", "v4-csa", "v4-hca", "v32-fp8", "v4-csa-fp8")


def parameters(name: str, device: str) -> V32Parameters | V4Parameters:
    """Real widths and top-k on CUDA; the widths that caches fix, and little else, on a CPU."""
    big = device == "cuda"
    common = {"norm_eps": 1e-6, "rope": ROPE}
    if name == "v32":
        sizes = {"hidden": 7168, "heads": 128, "q_rank": 1536, "nope_dim": 128, "value_dim": 128}
        small = {"hidden": 64, "heads": 2, "q_rank": 32, "nope_dim": 16, "value_dim": 16}
        index = {"index_heads": 64, "topk": 2048} if big else {"index_heads": 2, "topk": 24}
        width = 192 if big else 80
        return V32Parameters(**(sizes if big else small), **index, **common, scale=width**-0.5)
    sizes = {"hidden": 4096, "heads": 64, "q_rank": 1024, "groups": 8, "out_rank": 1024}
    small = {"hidden": 64, "heads": 2, "q_rank": 32, "groups": 2, "out_rank": 16}
    index = {"index_heads": 64, "topk": 512} if big else {"index_heads": 2, "topk": 8}
    ratio = {"v4-window": 1, "v4-csa": 4, "v4-hca": 128}[name]
    window = 128 if big else 16
    return V4Parameters(**(sizes if big else small), **index, **common, ratio=ratio, window=window)


def make_weights(params: V32Parameters | V4Parameters, device: str) -> dict[str, torch.Tensor]:
    """FP32 masters: linears scaled by their width, norms around one, biases and sinks normal."""
    shapes = (
        v32_weight_shapes(params) if isinstance(params, V32Parameters) else v4_weight_shapes(params)
    )
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator(device).manual_seed(number)
        values = torch.randn(shape, generator=generator, device=device)
        if len(shape) > 1 and not name.endswith("bias"):
            values *= shape[-1] ** -0.5
        elif "norm" in name and not name.endswith("bias"):
            values = 1.0 + 0.2 * values
        weights[name] = values
    return weights


@dataclasses.dataclass
class BlockCase:
    """A block in both forms on one set of weights."""

    name: str
    device: str
    params: V32Parameters | V4Parameters
    programs: BlockPrograms
    weights: dict[str, torch.Tensor]

    @classmethod
    def make(cls, name: str, device: str) -> BlockCase:
        """Make the block of that name with the programs of the device.

        A name that ends in "-fp8" reads keys straight from the FP8 pages.
        """
        kind = name.removesuffix("-fp8")
        params = parameters(kind, device)
        programs = CUDA if device == "cuda" else CPU
        if kind != name:
            programs = dataclasses.replace(programs, read="fp8")
        name = kind
        return cls(name, device, params, programs, make_weights(params, device))

    def trainer(self) -> torch.nn.Module:
        """Return the trainer's form."""
        kind = PackedV32Attention if self.name == "v32" else PackedV4Attention
        return kind(self.params, self.weights, programs=self.programs)

    def hidden(self, tokens: int, seed: int = 0) -> torch.Tensor:
        """Return hidden states with hazards, of unit scale."""
        return hazard_activations((tokens, self.params.hidden), seed=seed, device=self.device)

    def engine(
        self, lengths: list[int], queries: int = 256, max_seq_len: int | None = None
    ) -> PagedEngine:
        """Return the engine's form with room for requests of these lengths.

        Args:
            queries: whose entries its workspace holds at a time.
            max_seq_len: bound of its steps; the longest length by default.
        """
        return PagedEngine(self, lengths, queries, max_seq_len or max(lengths))


@dataclasses.dataclass
class StaticBatch:
    """The tensors that a captured step reads; rows beyond those filled are padding."""

    hidden: torch.Tensor
    batch: PagedBatch

    def fill(self, engine: PagedEngine, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Set row i to request i's next token."""
        count = len(positions)
        requests = torch.arange(count, device=positions.device)
        pages = engine.table[requests, positions // BLOCK_SIZE].long()
        self.hidden[:count] = hidden
        self.batch.positions[:count] = positions
        self.batch.requests[:count] = requests.to(torch.int32)
        self.batch.slots[:count] = pages * BLOCK_SIZE + positions % BLOCK_SIZE


class PagedEngine:
    """The engine's form: shuffled pages among poisoned ones, steps of any tokens, padded rows."""

    def __init__(self, case: BlockCase, lengths: list[int], queries: int, max_seq_len: int) -> None:
        pages = max(lengths) // BLOCK_SIZE + 1
        count = pages * len(lengths) + 3
        order = torch.randperm(count, generator=torch.Generator().manual_seed(7))
        table = order[: pages * len(lengths)].view(len(lengths), pages)
        self.table = table.to(case.device, torch.int32)
        self.max_seq_len = max_seq_len
        kind = PagedV32Attention if case.name == "v32" else PagedV4Attention
        self.block = kind(
            case.params, case.weights, programs=case.programs, blocks=count,
            block_size=BLOCK_SIZE, device=case.device, max_seq_len=self.max_seq_len,
            queries=queries,
        )  # fmt: skip
        self._poison()

    def _poison(self) -> None:
        """Every byte of FP8 caches is NaN in e4m3, in bf16 and as a scale; all else is NaN."""
        for value in vars(self.block).values():
            if isinstance(value, torch.Tensor):
                value.fill_(0xFF)
            elif hasattr(value, "state"):
                value.state.fill_(float("nan"))
                value.cache.fill_(0xFF)
            elif hasattr(value, "bounds"):
                value.rows.fill_(float("nan"))

    def step(
        self, hidden: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, padding: int
    ) -> torch.Tensor:
        """Run one step and drop the rows of padding, whose hidden states are NaN."""
        pages = self.table[requests, positions // BLOCK_SIZE].long()
        slots = pages * BLOCK_SIZE + positions % BLOCK_SIZE

        def pad(values: torch.Tensor, value: float) -> torch.Tensor:
            rows = values.new_full((padding, *values.shape[1:]), value)
            return torch.cat((values, rows))

        batch = PagedBatch(
            pad(positions, 0), pad(requests, 0).to(torch.int32), pad(slots, -1), self.table,
            BLOCK_SIZE, self.max_seq_len,
        )  # fmt: skip
        with torch.no_grad():
            out = self.block.forward(pad(hidden, float("nan")), batch)
        return out[: len(positions)]

    def static_batch(self, rows: int) -> StaticBatch:
        """Return the tensors of a graph of so many rows, all of them padding."""
        device = self.table.device
        hidden = torch.full(
            (rows, self.block.params.hidden), float("nan"), dtype=torch.bfloat16, device=device
        )
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        batch = PagedBatch(
            zeros, zeros.to(torch.int32), zeros - 1, self.table, BLOCK_SIZE, self.max_seq_len
        )
        return StaticBatch(hidden, batch)

    def warm_up(self, static: StaticBatch) -> None:
        """Compile and probe what the graph will hold; padding alone, so nothing is stored."""
        with torch.no_grad():
            self.block.forward(static.hidden, static.batch)
        torch.cuda.synchronize()

    def run(
        self,
        hidden: torch.Tensor,
        sequences: PackedSequences,
        plan: list[list[tuple[int, int, int]]],
        padding: int = 0,
    ) -> torch.Tensor:
        """Run steps of (request, from position, to position) and return rows in packed order."""
        out = torch.full_like(hidden, float("nan"))
        for pieces in plan:
            rows, requests, positions = [], [], []
            for request, begin, end in pieces:
                first = int(sequences.cu_seqlens[request])
                rows.append(torch.arange(first + begin, first + end))
                requests.append(torch.full((end - begin,), request))
                positions.append(torch.arange(begin, end))
            index = torch.cat(rows).to(hidden.device)
            out[index] = self.step(
                hidden[index],
                torch.cat(requests).to(hidden.device),
                torch.cat(positions).to(hidden.device),
                padding,
            )
        return out


def chunked(lengths: list[int], sizes: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    """A plan in which request i advances by sizes[i % len(sizes)] tokens a step, in mixed order."""
    done = [0] * len(lengths)
    plan = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        pieces = []
        for request in reversed(range(len(lengths))):
            end = min(lengths[request], done[request] + sizes[request % len(sizes)])
            if end > done[request]:
                pieces.append((request, done[request], end))
                done[request] = end
        plan.append(pieces)
    return plan


def prefill_then_decode(lengths: list[int], steps: int) -> list[list[tuple[int, int, int]]]:
    """A plan that ends with `steps` steps of one token a request."""
    first = [(i, 0, n - steps) for i, n in enumerate(lengths) if n > steps]
    plan = [first] if first else []
    for back in range(steps, 0, -1):
        plan.append([(i, n - back, n - back + 1) for i, n in enumerate(lengths) if n >= back])
    return plan
