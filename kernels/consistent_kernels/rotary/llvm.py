"""Rotary, with q and k norms before it and the pages behind it, as a kernel for a list of commands.

The bits of `rms_norm_ref` and `rotary_ref`, which a probe at first use compares; keys and values go
straight into their pages.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I32, I64, Kernel, floats
from consistent_kernels.rms_norm.llvm import float_word, inverse_rms
from consistent_kernels.rms_norm.reference import rms_norm_ref
from consistent_kernels.rotary.reference import rotary_ref

_LANES = 8  # half a head may be an odd multiple of it


class Heads(NamedTuple):
    """The shape that a kernel is compiled for."""

    queries: int
    keys: int
    width: int
    half: int
    has_norm: bool


class _RotaryWrite(Kernel):
    """The words of its command: see `command`."""

    def __init__(self, heads: Heads) -> None:
        super().__init__("rotary_write")
        self.heads, b = heads, self.b
        (self.positions, self.cos, self.sin, self.limit, qkv, stride, out, rows) = self.words(1, 8)
        (slots, keys, values, row_bytes, block, block_rows) = self.words(9, 6)
        q_weight, k_weight, eps = self.words(15, 3)
        self.eps = b.bitcast(b.trunc(eps, I32), F32)
        self.squares, self.normed = self.scratch(heads.width), self.scratch(heads.width)
        size = 2 * heads.width
        with self.work(rows) as row:
            self._angles(row)
            source = self.scaled(qkv, row, stride)
            target = self.scaled(out, row, size * heads.queries)
            with self.loop(0, heads.queries) as head:
                self._head(
                    self.scaled(source, head, size), self.scaled(target, head, size), q_weight
                )
            slot = self.load(self.scaled(slots, row, 8), I64, 8)
            with b.if_then(b.icmp_signed(">=", slot, self.i64(0))):
                page, place = b.sdiv(slot, block), b.srem(slot, block)
                offset = b.mul(b.add(b.mul(page, block_rows), place), row_bytes)
                source = self.at(source, size * heads.queries)
                target = b.add(keys, offset)
                with self.loop(0, heads.keys) as head:
                    self._head(
                        self.scaled(source, head, size), self.scaled(target, head, size), k_weight
                    )
                source = self.at(source, size * heads.keys)
                target = b.add(values, offset)
                with self.loop(0, size * heads.keys, 2 * _LANES) as at:
                    moved = self.load(b.add(source, at), ir.VectorType(I32, _LANES // 2), 2)
                    self.store(moved, b.add(target, at), 2)

    def _angles(self, row: Any) -> None:
        """Addresses of the row's cosines and sines; a position outside the table turns NaN."""
        b = self.b
        position = self.load(self.scaled(self.positions, row, 8), I64, 8)
        low = b.icmp_signed(">=", position, self.i64(0))
        self.known = b.and_(low, b.icmp_signed("<", position, self.limit))
        position = b.select(self.known, position, self.i64(0))
        self.angles = [
            self.scaled(table, position, 4 * self.heads.half) for table in (self.cos, self.sin)
        ]

    def _head(self, source: Any, target: Any, weight: Any) -> None:
        b, heads = self.b, self.heads
        with self.loop(0, heads.width, _LANES) as j:
            x = self.load_bf16(self.scaled(source, j, 2), _LANES)
            self.store(x, self.scaled(self.normed, j, 4), 4)
            if heads.has_norm:
                self.store(b.fmul(x, x), self.scaled(self.squares, j, 4), 4)
        if heads.has_norm:
            scale = self.splat(inverse_rms(self, self.squares, heads.width, self.eps), _LANES)
            with self.loop(0, heads.width, _LANES) as j:
                place = self.scaled(self.normed, j, 4)
                x = self.load(place, floats(_LANES), 4)
                w = self.load_bf16(self.scaled(weight, j, 2), _LANES)
                self.store(self.rounded(b.fmul(b.fmul(x, scale), w)), place, 4)
        with self.loop(0, heads.half, _LANES) as j:
            first = self.scaled(self.normed, j, 4)
            x1 = self.load(first, floats(_LANES), 4)
            x2 = self.load(self.at(first, 4 * heads.half), floats(_LANES), 4)
            known = self.splat(self.known, _LANES)
            cos, sin = (
                b.select(
                    known,
                    self.load(self.scaled(table, j, 4), floats(_LANES), 4),
                    self.fill(float("nan"), _LANES),
                )
                for table in self.angles
            )
            y1 = b.fsub(b.fmul(x1, cos), b.fmul(x2, sin))
            y2 = b.fadd(b.fmul(x2, cos), b.fmul(x1, sin))
            place = self.scaled(target, j, 2)
            self.store(self.to_bf16(y1), place, 2)
            self.store(self.to_bf16(y2), self.at(place, 2 * heads.half), 2)
        with self.loop(2 * heads.half, heads.width, _LANES) as j:
            x = self.load(self.scaled(self.normed, j, 4), floats(_LANES), 4)
            self.store(self.to_bf16(x), self.scaled(target, j, 2), 2)


@functools.cache
def rotary_write_kernel(heads: Heads) -> int:
    """Return the address of the kernel."""
    return _RotaryWrite(heads).compile()


def command(
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor, int, int],
    slots: torch.Tensor,
    heads: Heads,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that rotate q and k and write k and v into their pages.

    Args:
        positions: [T] int64; tables: (cos, sin), [P, half] fp32.
        qkv: [T, ...] bf16: heads of q, k and v side by side; rows may be strided.
        q_out: [T, Hq * D] bf16 contiguous.
        pages: (keys, values) as rows [n, Hk, D] bf16 of equal strides, keys of a page, rows from
            one page to the next.
        slots: [T] int64, page * keys of a page + place; -1 writes nothing.
        norm: (q weight [D], k weight [D], eps) of Qwen3, bf16, or None.
    """
    k_rows, v_rows, block, block_rows = pages
    q_weight, k_weight, eps = norm or (qkv, qkv, 0.0)
    words = (
        positions.data_ptr(),
        tables[0].data_ptr(),
        tables[1].data_ptr(),
        tables[0].shape[0],
        qkv.data_ptr(),
        2 * qkv.stride(0),
        q_out.data_ptr(),
        positions.shape[0],
        slots.data_ptr(),
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        2 * k_rows.stride(0),
        block,
        block_rows,
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        float_word(eps),
    )
    return rotary_write_kernel(heads), words, positions.shape[0]


@functools.cache
def has_reference_bits(heads: Heads) -> bool:
    """Return whether the kernel serves these heads with the reference's bytes; cached."""
    width, half = heads.width, heads.half
    if width % (2 * _LANES) or half % _LANES or (heads.has_norm and width < 4 * _LANES):
        return False
    tokens, total = 5, heads.queries + 2 * heads.keys
    numbers = torch.arange(tokens * total * width, dtype=torch.float64)
    values = (torch.sin(numbers * 2.2214) * 2.0 ** (numbers % 6 - 3)).bfloat16()
    qkv = values.view(tokens, total * width)
    angles = torch.arange(tokens * half, dtype=torch.float64).view(tokens, half)
    tables = torch.cos(angles).float(), torch.sin(angles).float()
    weights = values[:width].clone(), values[width : 2 * width].clone()
    norm = (*weights, 1e-6) if heads.has_norm else None
    positions, slots = torch.arange(tokens).flip(0), torch.tensor([7, 0, 3, -1, 9])
    q_out = torch.empty(tokens, heads.queries * width, dtype=torch.bfloat16)
    pages = torch.zeros(2, 12, heads.keys, width, dtype=torch.bfloat16)
    place = (pages[0], pages[1], 5, 6)
    run_one(*command(positions, tables, qkv, q_out, place, slots, heads, norm))
    q, k, v = qkv.view(tokens, total, width).split((heads.queries, heads.keys, heads.keys), 1)
    if norm is not None:
        q, k = (rms_norm_ref(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    q, k = rotary_ref(positions, q, k, *tables)
    expected = torch.zeros_like(pages)
    kept = (slots >= 0).nonzero().view(-1)
    rows = slots[kept] // 5 * 6 + slots[kept] % 5
    expected[0, rows], expected[1, rows] = k[kept], v[kept]
    pairs = ((q_out.view(q.shape), q), (pages, expected))
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
