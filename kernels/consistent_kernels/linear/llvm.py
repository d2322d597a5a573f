"""Linear as our own GEMM for x86 CPUs: one fp32 accumulator an element, K in ascending steps.

A step is one product with a fused multiply-add, or the two products of VDPBF16PS where the CPU
has it. An element's chain of steps is the same in every tile, so tiles follow rows and registers.
The weight lies in panels: for each step, the numbers of all columns of a panel side by side.
While a thread multiplies one panel it asks for the lines of its next one, evenly over all tiles of
rows: a few rows take as long to multiply as their weights take to come from memory. Fewer than a
tile of bf16 pairs take less; there the CPU's own prefetching brings more, and is left alone.
"""

from __future__ import annotations

import functools

import torch
from llvmlite import ir

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.llvm import is_available, multiplier
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I32, I64, Kernel, Variable, floats, ints
from consistent_kernels.llvm.machine import vector_bits

_VECTORS = 3
_LINE = 64  # bytes of a cache line
_SHARE = 8
_PAIR_BYTES = 4  # of two bf16
_WIDENED = 8
_MASK_LEADING = 0xFFFF0000


@functools.cache
def _shape(multiply: str, bits: int) -> tuple[int, int]:
    """Return (lanes of a vector, rows of the largest tile): accumulators fill the registers."""
    return (16, 8) if multiply == "dpbf16" or bits == 512 else (8, 4)


def panel_columns() -> int:
    """Return the columns of a panel."""
    return _VECTORS * _shape(multiplier(), vector_bits())[0]


class Gemm(Kernel):
    """The words of its command, behind the counter: see `command`."""

    def __init__(self, multiply: str, bits: int, out_fp32: bool) -> None:
        super().__init__("linear", bits)
        self.multiply, self.out_fp32 = multiply, out_fp32
        self.lanes, self.tile_rows = _shape(multiply, bits)
        b, vector = self.b, floats(self.lanes)
        words = self.words(1, 11)
        self.x, self.x_stride, rows, weight, panels, self.pairs, self.bias = words[:7]
        self.out, self.out_stride, next_weight, next_panel = words[7:]
        self.totals = [
            [Variable(self, vector) for _ in range(_VECTORS)] for _ in range(self.tile_rows)
        ]
        row = Variable(self, I64)
        # A tile asks for as many lines as it loads, so with several tiles the lines repeat.
        tiles = b.sdiv(b.add(rows, self.i64(self.tile_rows - 1)), self.i64(self.tile_rows))
        self.ahead_step = b.sdiv(b.add(tiles, self.i64(_LINE - 1)), tiles)
        if multiply == "dpbf16":
            is_short = b.icmp_signed("<", rows, self.i64(self.tile_rows))
            self.ahead_step = b.select(is_short, self.i64(0), self.ahead_step)
        self.ahead = Variable(self, I64)
        with self.work_ahead(panels, _SHARE) as (self.panel, following):
            panel_bytes = b.mul(self.pairs, self.i64(_PAIR_BYTES * self.lanes * _VECTORS))
            self.weight = b.add(weight, b.mul(self.panel, panel_bytes))
            beyond = b.icmp_signed(">=", following, panels)
            inside = self.scaled(weight, following, panel_bytes)
            outside = self.scaled(next_weight, b.sub(following, panels), next_panel)
            self.ahead.set(b.select(beyond, outside, inside))
            self.biases = self._biases()
            row.set(self.i64(0))
            again, done = (self.function.append_basic_block() for _ in range(2))
            b.branch(again)
            b.position_at_end(again)
            first = row.get()
            whole = self.function.append_basic_block()
            switch = b.switch(b.sub(rows, first), whole)
            switch.add_case(self.i64(0), done)
            for count in range(1, self.tile_rows + 1):
                block = whole
                if count < self.tile_rows:
                    block = self.function.append_basic_block()
                    switch.add_case(self.i64(count), block)
                b.position_at_end(block)
                self._tile(first, count)
                row.set(b.add(first, self.i64(count)))
                b.branch(again)
            b.position_at_end(done)

    def _biases(self) -> list:
        size = 4 * self.lanes
        base = self.scaled(self.bias, self.panel, size * _VECTORS)
        return [self.load(self.at(base, size * j), floats(self.lanes), 4) for j in range(_VECTORS)]

    def _tile(self, first: ir.Value, count: int) -> None:
        zero = self.fill(0.0, self.lanes)
        tile = self.totals[:count]
        base = self.scaled(self.x, first, self.x_stride)
        rows = [self.scaled(base, self.i64(r), self.x_stride) for r in range(count)]
        for totals in tile:
            for total in totals:
                total.set(zero)
        with self.loop(0, self.pairs) as pair:
            size = _PAIR_BYTES * self.lanes
            base = self.scaled(self.weight, pair, size * _VECTORS)
            columns = [
                self.load(self.at(base, size * j), ints(self.lanes), 4) for j in range(_VECTORS)
            ]
            for _ in range(_VECTORS):
                self.prefetch(self.ahead.get())
                self.ahead.set(self.b.add(self.ahead.get(), self.ahead_step))
            step = self._step_pairs if self.multiply == "dpbf16" else self._step_singles
            step(rows, columns, pair, tile)
        for r, totals in enumerate(tile):
            self._store(self.b.add(first, self.i64(r)), [total.get() for total in totals])

    def _step_pairs(self, rows: list, columns: list, pair: ir.Value, tile: list) -> None:
        for row, totals in zip(rows, tile, strict=True):
            x = self.splat(self.load(self.scaled(row, pair, _PAIR_BYTES), I32, 2), self.lanes)
            for column, total in zip(columns, totals, strict=True):
                total.set(self.dpbf16(total.get(), x, column))

    def _step_singles(self, rows: list, columns: list, pair: ir.Value, tile: list) -> None:
        # x holds fp32 here; the first number of a pair is the lower half of its word.
        b, lanes = self.b, self.lanes
        sixteen = ir.Constant(ints(lanes), [16] * lanes)
        leading = ir.Constant(ints(lanes), [_MASK_LEADING] * lanes)
        for half in range(2):
            bits = [b.and_(c, leading) if half else b.shl(c, sixteen) for c in columns]
            weights = [b.bitcast(each, floats(lanes)) for each in bits]
            for row, totals in zip(rows, tile, strict=True):
                place = self.at(self.scaled(row, pair, 8), 4 * half)
                x = self.splat(self.load(place, F32, 4), lanes)
                for weight, total in zip(weights, totals, strict=True):
                    total.set(self.fma(x, weight, total.get()))

    def _store(self, row: ir.Value, totals: list) -> None:
        size = 4 if self.out_fp32 else 2
        base = self.scaled(self.out, row, self.out_stride)
        base = self.scaled(base, self.panel, size * self.lanes * _VECTORS)
        for j, (total, bias) in enumerate(zip(totals, self.biases, strict=True)):
            value = self.b.fadd(total, bias)
            value = value if self.out_fp32 else self.to_bf16(value)
            self.store(value, self.at(base, size * self.lanes * j), size)


@functools.cache
def gemm_kernel(out_fp32: bool) -> int:
    """Return the address of the GEMM."""
    return Gemm(multiplier(), vector_bits(), out_fp32).compile()


def check_operand(x: torch.Tensor) -> None:
    """Raise UnsupportedError where `x` is not what this program multiplies."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not is_available():
        raise UnsupportedError(
            "linear (llvm)",
            f"{x.dtype} on {x.device.type}",
            ("torch.bfloat16 on an x86-64 CPU with AVX2 and llvmlite", "impl 'reference'"),
        )


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [N, K] bf16 as panels, int32 [panels, ceil(K / 2), columns of a panel].

    A number holds a pair along K, its first in the lower half. Missing columns and an odd K are
    filled with zeros.
    """
    columns, inner = weight.shape
    width = panel_columns()
    short, odd = -columns % width, inner % 2
    if short or odd:
        weight = torch.nn.functional.pad(weight, (0, odd, 0, short))
    weight = weight.contiguous()
    if weight.storage_offset() % 2:
        weight = weight.clone()
    pairs = weight.view(torch.int32)
    return pairs.view(-1, width, pairs.shape[1]).transpose(1, 2).contiguous()


def pack_transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return `pack(weight.t())` of `weight` [K, N] bf16 without transposing single numbers."""
    inner, columns = weight.shape
    width = panel_columns()
    short, odd = -columns % width, inner % 2
    if short or odd:
        weight = torch.nn.functional.pad(weight, (0, short, 0, odd))
    halves = weight.contiguous().view(torch.int16)
    first = halves[0::2].to(torch.int32).bitwise_and_(0xFFFF)
    pairs = first.bitwise_or_(halves[1::2].to(torch.int32).bitwise_left_shift_(16))
    return pairs.view(pairs.shape[0], -1, width).transpose(0, 1).contiguous()


def unpack(packed: torch.Tensor, columns: int, inner: int) -> torch.Tensor:
    """Return the weight [N, K] that was packed."""
    pairs = packed.transpose(1, 2).contiguous().view(-1, packed.shape[1])
    return pairs.view(torch.bfloat16)[:columns, :inner]


def operand(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, K] bf16 as the kernel reads it: an even K, fp32 where singles are multiplied."""
    if x.shape[1] % 2:
        x = torch.nn.functional.pad(x, (0, 1))
    if multiplier() == "fma":
        x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


@functools.lru_cache(maxsize=64)
def _no_bias(columns: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(columns, dtype=torch.float32)


def padded_bias(bias: torch.Tensor | None, packed: torch.Tensor) -> torch.Tensor:
    """Return the fp32 bias of every column of the panels."""
    columns = packed.shape[0] * packed.shape[2]
    if bias is None:
        return _no_bias(columns)
    return torch.nn.functional.pad(bias.float(), (0, columns - bias.shape[0]))


def command(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    following: torch.Tensor | None = None,
) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that write round(x W^T + bias) to `out`.

    Args:
        x: of `operand`; packed: of `pack`; bias: of `padded_bias`.
        out: [T, columns of all panels] bf16 or fp32; rows may be strided.
        following: packed weight of the next GEMM in the list, whose first panels threads ask for
            while they multiply their last ones. Only its address is used.
    """
    panels, pairs, _ = packed.shape
    following = packed if following is None else following
    words = (
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        x.shape[0],
        packed.data_ptr(),
        panels,
        pairs,
        bias.data_ptr(),
        out.data_ptr(),
        out.stride(0) * out.element_size(),
        following.data_ptr(),
        following.stride(0) * following.element_size(),
    )
    return gemm_kernel(out.dtype == torch.float32), words, panels


class _Widen(Kernel):
    """Words behind the counter: x, its row stride, out, rows, columns."""

    def __init__(self) -> None:
        super().__init__("widen")
        x, stride, out, rows, columns = self.words(1, 5)
        with self.work(rows) as row:
            source = self.scaled(x, row, stride)
            target = self.scaled(out, row, self.b.mul(columns, self.i64(4)))
            with self.loop(0, columns, _WIDENED) as j:
                value = self.load_bf16(self.scaled(source, j, 2), _WIDENED)
                self.store(value, self.scaled(target, j, 4), 4)


@functools.cache
def _widen_kernel() -> int:
    return _Widen().compile()


def widen_command(x: torch.Tensor, out: torch.Tensor) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that write x [T, K] bf16 to `out` [T, K] fp32; K % 8 == 0."""
    words = (x.data_ptr(), 2 * x.stride(0), out.data_ptr(), *x.shape)
    return _widen_kernel(), words, x.shape[0]


def linear_packed_llvm(
    x: torch.Tensor,
    packed: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = round(x W^T + b) from the panels of W.

    Args:
        x: [T, K] bf16; packed: of `pack`; columns: N; bias: [N] bf16 or None.
        out_dtype: bf16 or fp32.

    Returns:
        [T, N] contiguous.
    """
    check_operand(x)
    x = operand(x)
    out = torch.empty((x.shape[0], packed.shape[0] * packed.shape[2]), dtype=out_dtype)
    addend = padded_bias(bias, packed)
    if out.numel():
        run_one(*command(x, packed, addend, out))
    return out if out.shape[1] == columns else out[:, :columns].contiguous()


def linear_llvm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `linear_packed_llvm`, from a plain weight [N, K] bf16."""
    check_operand(x)
    return linear_packed_llvm(x, pack(weight), weight.shape[0], bias, out_dtype)


def linear_bwd_llvm(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """As `linear_bwd_ref`, of bf16 numbers: both products by the forward's GEMM, fp32 sums.

    Args:
        grad_y: [T, N]; x: [T, K]; weight: [N, K]; all bf16.
        needs: which of (x, weight, bias) want a gradient.
        weight_dtype: bf16 or fp32.
    """
    grad_x = grad_weight = None
    if needs[0]:
        packed = pack_transposed(weight)
        grad_x = linear_packed_llvm(grad_y, packed, weight.shape[1], None, x.dtype)
    if needs[1]:
        packed, rows = pack_transposed(x), grad_y.t().contiguous()
        grad_weight = linear_packed_llvm(rows, packed, x.shape[1], None, weight_dtype)
    return grad_x, grad_weight, grad_y.sum(0, dtype=torch.float32) if needs[2] else None
