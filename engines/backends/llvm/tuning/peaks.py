"""Peak performance of one core of this machine, measured by minimal kernels.

    products(arithmetic)    a loop of inner steps of a contraction, with operands in registers; and of products of a
                            matrix unit, if there is one: the better of the two is the peak
    reads                   a loop of loads, over buffers that fit one level of the memory hierarchy
    additions               a dependency chain of additions, one a cycle on every core, which gives the clock rate

They are measured on demand, in a fraction of a second, and not stored: the clock and the load of other cores change
every figure by tens of percent within minutes, and a plan may run on another machine than the one that built it. A
share of a peak is meaningful only if both were measured on one machine at about the same time.
"""
from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.codegen.isa import Isa, best_isa
from infer_server.engines.backends.llvm.codegen.tiles import MatrixUnit, Tiles
from infer_server.engines.backends.llvm.kernels.common.access import hidden
from infer_server.engines.backends.llvm.kernels.common.arithmetic import Arithmetic, Int8, Operand, arithmetic_for
from infer_server.engines.backends.llvm.kernels.kernel import begin_kernel
from infer_server.engines.backends.llvm.runtime.abi import KERNEL
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.backends.llvm.tuning.timing import aligned
from infer_server.engines.codegen.ir_builder import Module, Value
from infer_server.engines.codegen.types import I8, I64, vector
from infer_server.engines.ir.graph import Array
from infer_server.engines.lowering.problems.view import SIZES
from infer_server.engines.machine.clock import thread_seconds
from infer_server.engines.machine.cpu import CpuInfo, detect
from infer_server.engines.plan.roofline import Level, Peaks

PRECISIONS = ("int8", "int16", "fp32", "bf16", "fp16")
CHAINS = 10                 # independent sums: more than latency times throughput of an instruction on current cores
TILE_CHAINS = 4             # accumulator registers of a matrix unit; the others hold operands
TURNS = 100_000             # iterations of the loop of products in one call, so that the call itself is negligible
STREAMS = 8                 # vectors that one iteration of the loop of reads loads
READ_BYTES = 1 << 24        # least bytes of one call, so that the call itself is negligible
MOST_BYTES = 1 << 28        # most bytes of the buffer for main memory
ADDITIONS = 16              # additions in an iteration of the chain, whose counter runs in parallel
USUAL_CACHES = (("L1d", 32 << 10), ("L2", 512 << 10), ("L3", 8 << 20))      # if the system does not tell
ROUNDS, TURN_SECONDS = 8, 0.004     # rounds, and the time of each loop in a round


@dataclass(frozen=True, eq=False)
class _Loop:
    """Measured loop: a call, and the work that it does."""
    call: Callable[[], None]
    work: float                 # multiply-accumulates, bytes or additions


def measure_peaks(clock: Callable[[], float] = thread_seconds) -> Peaks:
    """Measure the peaks of one core of this machine, per second or per unit of another `clock`."""
    cpu = detect()
    isa = best_isa(cpu.features)
    ways = {precision: [arithmetic_for(precision, isa)] for precision in PRECISIONS}
    ways["int8"] += [PAIRED] if isa.paired_tiles else []
    products = {precision: [_products(isa, arithmetic) for arithmetic in some] for precision, some in ways.items()}
    for precision, _ in isa.matrix.products if isa.matrix else ():
        products[precision].append(_tile_products(isa, precision))
    reads, chain = _reads(isa, cpu), _additions(isa)
    rates = _rates([*(loop for some in products.values() for loop in some), *reads.values(), chain], clock)
    macs = {precision: max(rates[loop] for loop in some) for precision, some in products.items()}
    levels = tuple(Level(name, size, rates[loop]) for (name, size), loop in reads.items())
    return Peaks(cpu.model, isa.name, macs, levels, rates[chain])


def _rates(loops: Sequence[_Loop], clock: Callable[[], float]) -> dict[_Loop, float]:
    """Return the best rate of each loop per unit of the clock, all measured in turns.

    A turn begins with an uncounted call, which loads the data into their cache level and raises the core's clock. The
    shortest call is the one that other processes disturbed least.
    """
    least = dict.fromkeys(loops, math.inf)
    for _ in range(ROUNDS):
        for loop in loops:
            loop.call()
            end, more = time.perf_counter() + TURN_SECONDS, True
            while more:
                begin = clock()
                loop.call()
                least[loop] = min(least[loop], clock() - begin)
                more = time.perf_counter() < end
    return {loop: loop.work / taken for loop, taken in least.items()}


# ---- arithmetic
def emit_products(module: Module, name: str, isa: Isa, arithmetic: Arithmetic) -> None:
    """Emit a loop that adds CHAINS products to independent sums in each iteration.

    The rows of the grid are iterations; the operands are pixels, weights and sums.
    """
    f, (x, w, y), (begin, end, _, _) = begin_kernel(module, name, 3)
    weights = arithmetic.weights(isa, w)
    pixel = dict(enumerate(arithmetic.pixel(isa, x)))
    sums = {i: arithmetic.zero(isa, x) for i in range(CHAINS)}
    for _ in f.range("turn", begin, end, pixel=pixel, sum=sums):
        for i in sums:
            for part, value in pixel.items():
                pixel[part] = _opaque(isa, value)
            sums[i] = arithmetic.dot(isa, sums[i], tuple(pixel.values()), weights)
    for i, total in sums.items():
        f.store(total, y + i * isa.bytes)


def _opaque(isa: Isa, value: Value) -> Value:
    """Return the value, opaque to LLVM, which would otherwise compute an invariant product once."""
    register = "w" if (isa.triple or platform.machine()).startswith("aarch64") else "v"
    f = value.f
    ints = f.cast("bitcast", value, isa.ints, "opaque")
    same = f.op(isa.ints, f'call {isa.ints} asm sideeffect "", "={register},0"({ints})', "opaque")
    return f.cast("bitcast", same, value.type, "opaque")


class _Paired(Int8):
    """Products of paired weights (contraction/pairing.py), on machines that have them in addition to dot4."""

    def pixel(self, isa: Isa, address: Value) -> Operand:
        return (address.f.load(vector(isa.bytes, I8), address, isa.bytes, "pixel"),)

    weights = pixel

    def weight_bytes(self, isa: Isa) -> int:
        return isa.bytes

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.paired_dot(acc, *pixel, *weights)


PAIRED = _Paired("uint8", "int8", 4)


def _products(isa: Isa, arithmetic: Arithmetic) -> _Loop:
    """Return a loop of TURNS iterations on zeros."""
    module = Module()
    emit_products(module, "products", isa, arithmetic)
    sizes = isa.bytes, arithmetic.weight_bytes(isa), CHAINS * isa.bytes
    call = partial(_Kernel(module, "products", isa), [aligned(np.zeros(size, np.uint8)) for size in sizes], (0, TURNS))
    return _Loop(call, TURNS * CHAINS * isa.lanes * arithmetic.elements)


def emit_tile_products(module: Module, name: str, unit: MatrixUnit, precision: str) -> None:
    """Emit a loop of products into four registers, from two left and two right operands; grid rows are iterations."""
    f, _, (begin, end, _, _) = begin_kernel(module, name, 0)
    tiles, instruction = Tiles(f, unit), unit.product(precision)
    tiles.configure(dict.fromkeys(range(unit.registers), (unit.rows, unit.row_bytes)))
    for _ in f.range("turn", begin, end):
        for sums in range(TILE_CHAINS):
            tiles.multiply(instruction, sums, TILE_CHAINS + sums // 2, TILE_CHAINS + 2 + sums % 2)
    tiles.release()


def _tile_products(isa: Isa, precision: str) -> _Loop:
    """Return a loop of TURNS products on zeros."""
    assert isa.matrix is not None
    module = Module()
    emit_tile_products(module, "tile_products", isa.matrix, precision)
    turns, macs = TURNS // TILE_CHAINS, isa.matrix.macs(SIZES[arithmetic_for(precision, isa).dtype])
    return _Loop(partial(_Kernel(module, "tile_products", isa), [], (0, turns)), turns * TILE_CHAINS * macs)


class _Kernel:
    """Kernel of a module, loaded to be measured."""

    def __init__(self, module: Module, name: str, isa: Isa) -> None:
        self._code = LoadedCode([compile_object(module.text(), isa)])
        self._function = KERNEL(self._code.addresses[name])

    def __call__(self, operands: Sequence[Array], rows: tuple[int, int], columns: tuple[int, int] = (0, 1)) -> None:
        table = np.array([array.ctypes.data for array in operands], np.uintp)
        self._function(table.ctypes.data, *rows, *columns)


# ---- memory
def emit_reads(module: Module, name: str, isa: Isa) -> None:
    """Emit a loop of reads.

    Rows of the grid are passes, columns are the bytes to read, a multiple of STREAMS vectors. The operands are the
    memory to read and a result.
    """
    f, (x, y), (begin, end, column_begin, column_end) = begin_kernel(module, name, 2)
    sums = {v: f.constant(0, vector(isa.lanes, "i32")) for v in range(STREAMS)}
    for _ in f.range("pass", begin, end, sum=sums):
        for at in f.range("at", column_begin, column_end, STREAMS * isa.bytes, sum=sums):
            for v in sums:
                sums[v] = sums[v].binary("or", f.load(isa.ints, x + at + v * isa.bytes, isa.bytes))
    for v, total in sums.items():
        f.store(total, y + v * isa.bytes)


def _reads(isa: Isa, cpu: CpuInfo) -> Mapping[tuple[str, float], _Loop]:
    """Return a loop for each (name, size) of a memory level.

    A cache is measured by a buffer that exceeds the level below and fills at most half of this one, which other cores
    may share; main memory by a buffer of four times the largest cache's size.
    """
    module = Module()
    emit_reads(module, "reads", isa)
    kernel = _Kernel(module, "reads", isa)
    caches = cpu.caches or USUAL_CACHES
    sizes: dict[tuple[str, float], int] = {}
    below = caches[0][1]
    for name, size in caches:
        sizes[name.removesuffix("d"), float(size)], below = min(size // 2, 4 * below), size
    sizes["DRAM", math.inf] = min(4 * caches[-1][1], MOST_BYTES)
    step, result = STREAMS * isa.bytes, aligned(np.zeros(STREAMS * isa.bytes, np.uint8))
    memory = aligned(np.ones(max(sizes.values()), np.uint8))        # ones, because zeroed pages may share one page

    def loop(size: int) -> _Loop:
        passes, size = max(1, READ_BYTES // size), size - size % step
        return _Loop(partial(kernel, [memory, result], (0, passes), (0, size)), passes * size)

    return {level: loop(size) for level, size in sizes.items()}


# ---- the clock
def emit_additions(module: Module, name: str) -> None:
    """Emit a loop of ADDITIONS dependent additions of a number to an address; grid rows are iterations.

    The operands are the number and the sum. Both are registers, since a core may eliminate additions of constants; and
    the sum is opaque to LLVM, which would use a multiplication otherwise.
    """
    f, (x, y), (begin, end, _, _) = begin_kernel(module, name, 2)
    number, at = f.load(I64, x, 8, "number"), {"sum": y}
    for _ in f.range("turn", begin, end, at=at):
        for _ in range(ADDITIONS):
            at["sum"] = hidden(at["sum"] + number)
    f.store(at["sum"], y, 8)


def _additions(isa: Isa) -> _Loop:
    module = Module()
    emit_additions(module, "additions")
    operands = [aligned(np.zeros(1, np.int64)) for _ in range(2)]
    return _Loop(partial(_Kernel(module, "additions", isa), operands, (0, TURNS)), TURNS * ADDITIONS)
