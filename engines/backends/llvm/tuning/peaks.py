"""What one core of this machine does at best, measured by the smallest kernels that can ask for it.

    products(arithmetic)    a loop of nothing but the inner step of a contraction, operands in registers
    reads                   a loop of nothing but loads, over buffers that fit a level of the memory

They are measured when they are asked for, in a fraction of a second, and kept nowhere: a core's clock and its
neighbours move every figure by tens of percent within minutes, and a plan may run on another machine than the one that
built it. A share of a peak says something only if both were taken on the same machine at the same time.
"""
from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from engines.backends.llvm.codegen.compile import compile_object
from engines.backends.llvm.codegen.ir_builder import Module, Value, vector
from engines.backends.llvm.codegen.isa import Isa, best_isa
from engines.backends.llvm.kernels.common.arithmetic import Arithmetic, arithmetic_for
from engines.backends.llvm.kernels.kernel import begin_kernel
from engines.backends.llvm.runtime.abi import KERNEL
from engines.backends.llvm.runtime.elf import LoadedCode
from engines.backends.llvm.tuning.tuner import aligned, measure
from engines.ir.graph import Array
from engines.machine.cpu import CpuInfo, detect
from engines.plan.roofline import Level, Peaks

PRECISIONS = ("int8", "fp32", "bf16", "fp16")
CHAINS = 10                 # independent sums: more than an instruction's latency times its throughput on today's cores
TURNS = 100_000             # of the loop of products for one call, so that the call itself costs nothing
STREAMS = 8                 # vectors that a turn of the loop of reads loads
READ_BYTES = 1 << 24        # at least, for one call: the same
MOST_BYTES = 1 << 28        # of the buffer that stands for main memory
USUAL_CACHES = (("L1d", 32 << 10), ("L2", 512 << 10), ("L3", 8 << 20))      # where the system does not say


def measure_peaks() -> Peaks:
    """This machine's, one core's."""
    cpu = detect()
    isa = best_isa(cpu.features)
    return Peaks(cpu.model, isa.name, _macs_per_second(isa), _levels(isa, cpu))


# ---- arithmetic
def emit_products(module: Module, name: str, isa: Isa, arithmetic: Arithmetic) -> None:
    """rows: turns of a loop, each adding CHAINS products to sums of their own. Operands: pixels, weights, sums."""
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
    """The value, in the same register, but LLVM cannot know it: else a product that never changes is made once."""
    register = "w" if (isa.triple or platform.machine()).startswith("aarch64") else "v"
    f = value.f
    ints = f.cast("bitcast", value, isa.ints, "opaque")
    same = f.op(isa.ints, f'call {isa.ints} asm sideeffect "", "={register},0"({ints})', "opaque")
    return f.cast("bitcast", same, value.type, "opaque")


def _macs_per_second(isa: Isa) -> dict[str, float]:
    arithmetics = {precision: arithmetic_for(precision, isa) for precision in PRECISIONS}
    times = measure({precision: _products(isa, arithmetic) for precision, arithmetic in arithmetics.items()})
    return {precision: TURNS * CHAINS * isa.lanes * arithmetic.elements / (times[precision] / 1e6)
            for precision, arithmetic in arithmetics.items()}


def _products(isa: Isa, arithmetic: Arithmetic) -> Callable[[], None]:
    """TURNS turns, on zeros."""
    module = Module()
    emit_products(module, "products", isa, arithmetic)
    kernel = _Kernel(module, "products", isa)
    sizes = isa.bytes, arithmetic.weight_bytes(isa), CHAINS * isa.bytes
    return partial(kernel, [aligned(np.zeros(size, np.uint8)) for size in sizes], (0, TURNS))


class _Kernel:
    """A kernel of a module, loaded to be measured."""

    def __init__(self, module: Module, name: str, isa: Isa) -> None:
        self._code = LoadedCode([compile_object(module.text(), isa)])
        self._function = KERNEL(self._code.addresses[name])

    def __call__(self, operands: Sequence[Array], rows: tuple[int, int], columns: tuple[int, int] = (0, 1)) -> None:
        table = np.array([array.ctypes.data for array in operands], np.uintp)
        self._function(table.ctypes.data, *rows, *columns)


# ---- memory
def emit_reads(module: Module, name: str, isa: Isa) -> None:
    """rows: how often; columns: bytes to read, a multiple of STREAMS vectors. Operands: what is read, a result."""
    f, (x, y), (begin, end, column_begin, column_end) = begin_kernel(module, name, 2)
    sums = {v: f.constant(0, vector(isa.lanes, "i32")) for v in range(STREAMS)}
    for _ in f.range("pass", begin, end, sum=sums):
        for at in f.range("at", column_begin, column_end, STREAMS * isa.bytes, sum=sums):
            for v in sums:
                sums[v] = sums[v].binary("or", f.load(isa.ints, x + at + v * isa.bytes, isa.bytes))
    for v, total in sums.items():
        f.store(total, y + v * isa.bytes)


def _levels(isa: Isa, cpu: CpuInfo) -> tuple[Level, ...]:
    """Each cache by a buffer of half its size; main memory by one of four times the largest cache's."""
    module = Module()
    emit_reads(module, "reads", isa)
    kernel = _Kernel(module, "reads", isa)
    caches = cpu.caches or USUAL_CACHES
    sizes = [(name.removesuffix("d"), float(size), size // 2) for name, size in caches]
    sizes.append(("DRAM", math.inf, min(4 * caches[-1][1], MOST_BYTES)))
    step, result = STREAMS * isa.bytes, aligned(np.zeros(STREAMS * isa.bytes, np.uint8))
    memory = aligned(np.ones(max(size for *_, size in sizes), np.uint8))        # ones: zeroed pages may all be one page
    passes: dict[str, int] = {}
    calls: dict[str, Callable[[], None]] = {}
    for name, _, size in sizes:
        passes[name] = max(1, READ_BYTES // size)
        calls[name] = partial(kernel, [memory, result], (0, passes[name]), (0, size - size % step))
    times = measure(calls)
    return tuple(Level(name, holds, passes[name] * (size - size % step) / (times[name] / 1e6))
                 for name, holds, size in sizes)
