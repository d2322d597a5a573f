"""A kernel under construction: integers, vectors and loops over `llvmlite.ir`.

A kernel is a C function of one pointer, its command: 64-bit words, the first of which counts the
units of work that threads have taken; the word before it holds the number of threads. Every thread
of the team runs the function; which one takes a unit moves no bit, since no sum crosses units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from consistent_kernels.llvm.machine import compile_kernel, vector_bits

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
POINTER = ir.PointerType()
LANES = 16
"""Numbers of one vector wherever a sum has lanes; narrower registers hold it in parts."""

_SHARE, _LONGEST = 2, 8
"""Runs of units that a thread takes, and the units of the longest one."""

LOWEST = -3.4028234663852886e38
"""-FLT_MAX."""

_LOG2E = 1.4426950216293335
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Cephes' expf (Moshier): exp(r) = 1 + r + r^2 P(r), |r| <= ln 2 / 2."""


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def floats(lanes: int) -> ir.VectorType:
    """Return the type of `lanes` fp32."""
    return ir.VectorType(F32, lanes)


def ints(lanes: int, of: ir.IntType = I32) -> ir.VectorType:
    """Return the type of `lanes` integers."""
    return ir.VectorType(of, lanes)


class Variable:
    """A mutable value; LLVM turns it into registers."""

    def __init__(self, kernel: Kernel, typ: ir.Type) -> None:
        self._kernel, self._type = kernel, typ
        with kernel.b.goto_entry_block():
            self._slot = kernel.b.alloca(typ)

    def get(self) -> Any:
        """Return the value now."""
        return self._kernel.b.load(self._slot, typ=self._type)

    def set(self, value: Any) -> None:
        """Replace the value."""
        self._kernel.b.store(value, self._slot)


class Kernel:
    """Builds one function; `b` is the instruction builder.

    Args:
        bits: of the vector registers to write for, 512 or 256; this CPU's by default. It moves no
            bit of a result.
    """

    def __init__(self, name: str, bits: int | None = None) -> None:
        self.name = name
        self.bits = bits or vector_bits()
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        self._entry = self.function.append_basic_block("entry")
        start = self.function.append_basic_block("start")
        ir.IRBuilder(self._entry).branch(start)
        self.b = ir.IRBuilder(start)
        self.command = self.b.ptrtoint(self.function.args[0], I64)

    def compile(self, cpu: str | None = None) -> int:
        """Finish the function and return its address; `cpu` as in `compile_kernel`."""
        self.b.ret_void()
        return compile_kernel(self.module, self.name, cpu)

    def i64(self, value: int) -> ir.Constant:
        """Return a 64-bit constant."""
        return ir.Constant(I64, value)

    def fill(self, value: float, lanes: int = LANES) -> ir.Constant:
        """Return a vector of one fp32 constant."""
        return ir.Constant(floats(lanes), [float(value)] * lanes)

    def words(self, first: int, count: int) -> list[Any]:
        """Return words first .. first + count - 1 of the command."""
        return [self.load(self.at(self.command, 8 * (first + i)), I64, 8) for i in range(count)]

    def at(self, base: Any, offset: Any) -> Any:
        """Return base + offset, in bytes."""
        return self.b.add(base, self.i64(offset) if isinstance(offset, int) else offset)

    def scaled(self, base: Any, index: Any, size: Any) -> Any:
        """Return base + index * size, in bytes."""
        size = self.i64(size) if isinstance(size, int) else size
        return self.b.add(base, self.b.mul(index, size))

    def load(self, address: Any, typ: ir.Type, align: int) -> Any:
        """Return what stands at an address."""
        return self.b.load(self.b.inttoptr(address, POINTER), typ=typ, align=align)

    def store(self, value: Any, address: Any, align: int) -> None:
        """Write to an address."""
        self.b.store(value, self.b.inttoptr(address, POINTER), align=align)

    def scratch(self, numbers: int) -> Any:
        """Return the address of fp32 memory on the stack, for constant sizes only."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(F32, numbers))
            slot.align = 64
        return self.b.ptrtoint(slot, I64)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """Run the body for start, start + step, ... below stop; yields the counter."""
        counter = Variable(self, I64)
        counter.set(self.i64(start) if isinstance(start, int) else start)
        stop = self.i64(stop) if isinstance(stop, int) else stop
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        now = counter.get()
        self.b.cbranch(self.b.icmp_signed("<", now, stop), body, after)
        self.b.position_at_end(body)
        yield now
        counter.set(self.b.add(now, self.i64(step)))
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextmanager
    def work(self, units: Any, share: int = _SHARE) -> Iterator[Any]:
        """Run the body for every unit 0 .. units - 1 that this thread gets hold of.

        Args:
            share: how many runs of units a thread takes, about, where there are that many. A run
                costs a cache line that travels between cores, so small units want few.
        """
        with self.work_ahead(units, share, is_ahead=False) as (unit, _):
            yield unit

    @contextmanager
    def work_ahead(
        self, units: Any, share: int = _SHARE, *, is_ahead: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        """As `work`; yields a unit and the one that this thread takes next (maybe none: >= units).

        So a unit's data can be fetched while the one before it is worked on.
        """
        b = self.b
        run = self._run_length(units, share)
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        held = Variable(self, I64)
        held.set(self._take(run))
        b.branch(head)
        b.position_at_end(head)
        first = held.get()
        b.cbranch(b.icmp_signed("<", first, units), body, after)
        b.position_at_end(body)
        if is_ahead:
            held.set(self._take(run))
        stop = b.add(first, run)
        stop = b.select(b.icmp_signed("<", stop, units), stop, units)
        with self.loop(first, stop) as unit:
            following = b.add(unit, self.i64(1))
            inside = b.icmp_signed("<", following, stop)
            yield unit, b.select(inside, following, held.get())
        if not is_ahead:
            held.set(self._take(run))
        b.branch(head)
        b.position_at_end(after)

    def _run_length(self, units: Any, share: int) -> Any:
        """Units taken at once. The word before the counter holds the number of threads."""
        b = self.b
        threads = self.load(self.at(self.command, -8), I64, 8)
        run = b.sdiv(units, b.mul(threads, self.i64(share)))
        run = b.select(b.icmp_signed("<", run, self.i64(1)), self.i64(1), run)
        return b.select(b.icmp_signed(">", run, self.i64(_LONGEST)), self.i64(_LONGEST), run)

    def _take(self, run: Any) -> Any:
        return self.b.atomic_rmw("add", self.function.args[0], run, "monotonic")

    def prefetch(self, address: Any) -> None:
        """Ask for the cache line of an address, which need not exist, into the second level."""
        place = self.b.inttoptr(address, POINTER)
        read, second_level, data = 0, 1, 1
        flags = [ir.Constant(I32, x) for x in (read, second_level, data)]
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), place, *flags)

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """Return a vector of one value."""
        vector = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ints(lanes), [0] * lanes))

    def intrinsic(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """Call an LLVM intrinsic."""
        declared = self.module.globals.get(name)
        if declared is None:
            kinds = [argument.type for argument in arguments]
            declared = ir.Function(self.module, ir.FunctionType(result, kinds), name)
        return self.b.call(declared, arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """Return x y + z, rounded once."""
        suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
        return self.intrinsic(f"llvm.fma.{suffix}", x.type, x, y, z)

    def dpbf16(self, total: Any, x: Any, y: Any) -> Any:
        """Return total + the products of the bf16 pairs in x and y (int32 vectors)."""
        pairs = ir.VectorType(_BFloat(), 2 * LANES)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        halves = self.b.bitcast(x, pairs), self.b.bitcast(y, pairs)
        return self.intrinsic(name, total.type, total, *halves)

    def widen(self, halves: Any) -> Any:
        """bf16 (as int16 vector) to fp32."""
        lanes = halves.type.count
        wide = self.b.zext(halves, ints(lanes))
        shifted = self.b.shl(wide, ir.Constant(ints(lanes), [16] * lanes))
        return self.b.bitcast(shifted, floats(lanes))

    def load_bf16(self, address: Any, lanes: int = LANES) -> Any:
        """Return `lanes` bf16 as fp32."""
        return self.widen(self.load(address, ints(lanes, I16), 2))

    def to_bf16(self, x: Any) -> Any:
        """fp32 to bf16 (as int16): to nearest, ties to even; a NaN as PyTorch writes it."""
        lanes = x.type.count
        whole = ints(lanes)
        bits = self.b.bitcast(x, whole)
        sixteen = ir.Constant(whole, [16] * lanes)
        odd = self.b.and_(self.b.lshr(bits, sixteen), ir.Constant(whole, [1] * lanes))
        bits = self.b.add(bits, self.b.add(odd, ir.Constant(whole, [0x7FFF] * lanes)))
        rounded = self.b.trunc(self.b.lshr(bits, sixteen), ints(lanes, I16))
        nan = ir.Constant(ints(lanes, I16), [0x7FC0] * lanes)
        return self.b.select(self.b.fcmp_unordered("uno", x, x), nan, rounded)

    def rounded(self, x: Any) -> Any:
        """fp32 rounded to bf16 and widened again."""
        return self.widen(self.to_bf16(x))

    def maximum(self, x: Any, y: Any) -> Any:
        """Return x where x > y or x is NaN, else y: a NaN stays."""
        greater = self.b.fcmp_unordered("ugt", x, y)
        stays = self.b.fcmp_ordered("ord", y, y)
        return self.b.select(self.b.and_(greater, stays), x, y)

    def tree(self, x: Any, add: Callable[[Any, Any], Any]) -> Any:
        """Reduce a vector by halves, lane i with lane i + half, to a scalar."""
        lanes = x.type.count
        undefined = ir.Constant(x.type, ir.Undefined)
        while lanes > 1:
            lanes //= 2
            low = [ir.Constant(I32, i) for i in range(lanes)]
            high = [ir.Constant(I32, lanes + i) for i in range(lanes)]
            parts = [
                self.b.shuffle_vector(x, undefined, ir.Constant(ints(lanes), half))
                for half in (low, high)
            ]
            x = add(*parts)
            undefined = ir.Constant(x.type, ir.Undefined)
        return self.b.extract_element(x, ir.Constant(I32, 0))

    def sum(self, x: Any) -> Any:
        """Halving tree of a vector."""
        return self.tree(x, self.b.fadd)

    def sums_of(self, vectors: list[Any]) -> Any:
        """Return the `sum` of each of `LANES` vectors in one vector: the same trees."""
        undefined = ir.Constant(floats(LANES), ir.Undefined)
        level = [(vector, [index]) for index, vector in enumerate(vectors)]
        while len(level) > 1:
            half = len(level) // 2
            level = [self._halves(a, b) for a, b in zip(level[:half], level[half:], strict=True)]
        vector, owners = level[0]
        order = [owners.index(index) for index in range(LANES)]
        return self.b.shuffle_vector(vector, undefined, ir.Constant(ints(LANES), order))

    def _halves(self, first: tuple[Any, list[int]], second: tuple[Any, list[int]]) -> Any:
        block = LANES // len(first[1])
        low = [
            side * LANES + place * block + lane
            for side in range(2)
            for place in range(len(first[1]))
            for lane in range(block // 2)
        ]
        parts = [
            self.b.shuffle_vector(
                first[0], second[0], ir.Constant(ints(LANES), [lane + shift for lane in low])
            )
            for shift in (0, block // 2)
        ]
        return self.b.fadd(*parts), first[1] + second[1]

    def exp(self, x: Any, *, is_inside: bool = False) -> Any:
        """Return e^x of a vector to 2 ulp: NaN stays, -inf gives 0, large x inf.

        Args:
            is_inside: x is NaN or from -150 to 130, beyond which it is clamped; the same bits.
        """
        b, lanes = self.b, x.type.count
        low, high = self.fill(-150.0, lanes), self.fill(130.0, lanes)
        inside = x
        if not is_inside:
            inside = b.select(b.fcmp_ordered("olt", x, low), low, x)
            inside = b.select(b.fcmp_ordered("ogt", inside, high), high, inside)
        if self.bits == 512 and lanes == LANES:
            y, n = self._exp_parts(inside)
            return self._scaled_by_power(y, n)
        is_nan = b.fcmp_unordered("uno", x, x)
        inside = b.select(is_nan, self.fill(0.0, lanes), inside)
        y, n = self._exp_parts(inside)
        whole = ints(lanes)
        # 2^n in two factors: the first product is exact, the second rounds denormals once.
        exponent = b.fptosi(n, whole)
        half = b.ashr(exponent, ir.Constant(whole, [1] * lanes))
        for part in (half, b.sub(exponent, half)):
            biased = b.add(part, ir.Constant(whole, [127] * lanes))
            shifted = b.shl(biased, ir.Constant(whole, [23] * lanes))
            y = b.fmul(y, b.bitcast(shifted, x.type))
        return b.select(is_nan, x, y)

    def _exp_parts(self, inside: Any) -> tuple[Any, Any]:
        """Return (y, n) with e^x = y 2^n."""
        b, lanes = self.b, inside.type.count
        scaled = b.fmul(inside, self.fill(_LOG2E, lanes))
        n = self.intrinsic(f"llvm.rint.v{lanes}f32", inside.type, scaled)
        r = self.fma(n, self.fill(-_LN2_HIGH, lanes), inside)
        r = self.fma(n, self.fill(-_LN2_LOW, lanes), r)
        p = self.fill(_EXP[0], lanes)
        for coefficient in _EXP[1:]:
            p = self.fma(p, r, self.fill(coefficient, lanes))
        return b.fadd(self.fma(p, b.fmul(r, r), r), self.fill(1.0, lanes)), n

    def _scaled_by_power(self, y: Any, n: Any) -> Any:
        """Return y 2^n, rounded once, by the instruction that AVX-512 has for it; a NaN stays."""
        every, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)  # 4: as the thread rounds
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return self.intrinsic(name, y.type, y, n, self.fill(0.0), every, nearest)
