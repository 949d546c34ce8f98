"""Costs of a matrix unit's instructions, and of vector instructions that overlap with its products, in core cycles.

    python -m benchmarks.measure.tiles [--seconds 3]

Each figure is the median over turns of a loop's time divided by that of a chain of dependent additions (one a cycle)
that runs just before it, since the frequency varies and is lower while tiles are used. The machine must have the unit.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from benchmarks.reports.document import machine, markdown_table
from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.codegen.isa import Isa, best_isa
from infer_server.engines.backends.llvm.codegen.tiles import Tiles
from infer_server.engines.backends.llvm.kernels.common.access import hidden
from infer_server.engines.backends.llvm.kernels.kernel import begin_kernel
from infer_server.engines.backends.llvm.runtime.abi import KERNEL
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.backends.llvm.tuning.timing import aligned
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I64
from infer_server.engines.machine.cpu import detect

ITERATIONS = 2000
MEMORY = 64 << 20
SUMS = 24               # vector accumulators: more than latency times throughput of a multiply-add
Sums = dict[int, Value]     # vectors that stay in registers over all iterations
Body = Callable[[Function, Tiles, Value, Value, Sums], None]    # (f, tiles, memory, iteration, sums) -> an iteration


@dataclass(frozen=True)
class Loop:
    """Kernel of ITERATIONS iterations that each do something `times` times."""
    run: Callable[[], None]
    times: int = 1


def loop(isa: Isa, memory: np.ndarray, body: Body, times: int = 1, rows: int = 16) -> Loop:
    """Compile a loop around `body`; registers 0 to 5, sums and left operands, have `rows` rows of 64 bytes."""
    assert isa.matrix is not None
    module = Module()
    f, (at,), _ = begin_kernel(module, "kernel", 1)
    tiles = Tiles(f, isa.matrix)
    tiles.configure({n: (rows if n < 6 else 16, 64) for n in range(8)})
    sums = {n: f.constant(0, isa.floats) for n in range(SUMS)}
    for iteration in f.loop("iteration", ITERATIONS, sum=sums):
        body(f, tiles, at, iteration, sums)
    for total in sums.values():
        f.store(total, at, isa.bytes)
    tiles.release()
    code = LoadedCode([compile_object(module.text(), isa)])
    call, table = KERNEL(code.addresses["kernel"]), np.array([memory.ctypes.data], np.uintp)
    return Loop(partial(_called, call, table, code), times)


def _called(call: Callable[..., None], table: np.ndarray, code: LoadedCode) -> None:
    """Run the kernel; `code` keeps its memory."""
    call(table.ctypes.data, 0, 1, 0, 1)


# ---- measured loops
def products(instruction: str, sums: int) -> Body:
    def body(f: Function, tiles: Tiles, memory: Value, iteration: Value, _: Sums) -> None:
        for n in range(4):
            tiles.multiply(instruction, n % sums, 4 + n // 2, 6 + n % 2)
    return body


def loads(span: int, pitch: int) -> Body:
    """Load registers from consecutive addresses of the first `span` bytes."""
    def body(f: Function, tiles: Tiles, memory: Value, iteration: Value, _: Sums) -> None:
        tiles.load(0, memory + iteration.remainder(span // (16 * pitch)) * (16 * pitch), pitch)
    return body


def block(f: Function, tiles: Tiles, memory: Value, iteration: Value, _: Sums) -> None:
    """Emit a step of K of a micro-kernel: four loads from L1, four products."""
    for v in range(2):
        tiles.load(6 + v, memory + 1024 * v, 64)
        for t in range(2):
            if v == 0:
                tiles.load(4 + t, memory + 4096 + 1024 * t, 64)
            tiles.multiply("tdpbusd", 2 * t + v, 4 + t, 6 + v)


def store(f: Function, tiles: Tiles, memory: Value, iteration: Value, _: Sums) -> None:
    tiles.store(0, memory + iteration.remainder(4) * 1024, 64)


def vectors(isa: Isa, count: int, products: int) -> Body:
    """Emit `count` vector multiply-adds into SUMS accumulators, interleaved with `products` products."""
    def body(f: Function, tiles: Tiles, memory: Value, iteration: Value, sums: Sums) -> None:
        factor, parts = f.load(isa.floats, hidden(memory), isa.bytes), max(products, 1)
        for n in range(parts):
            if products:
                tiles.multiply("tdpbusd", n % 4, 4 + n // 2 % 2, 6 + n % 2)
            for i in range(count * n // parts, count * (n + 1) // parts):
                sums[i % SUMS] = isa.fma(factor, factor, sums[i % SUMS])
    return body


def cases(isa: Isa, memory: np.ndarray) -> Mapping[str, Loop]:
    make = partial(loop, isa, memory)
    loops = {f"{name}, into {sums} registers": make(products(name, sums), 4)
             for name in ("tdpbusd", "tdpbf16ps") for sums in (4, 2, 1)}
    loops |= {f"tdpbusd of {rows} rows": make(products("tdpbusd", 4), 4, rows) for rows in (14, 8, 4, 1)}
    loops |= {f"tileloadd from {level}, rows {pitch} bytes apart": make(loads(size, pitch))
              for level, size, pitch in (("L1", 16 << 10, 64), ("L1", 16 << 10, 256), ("L2", 1 << 20, 64),
                                         ("L2", 1 << 20, 1024), ("L3", 32 << 20, 64))}
    loops |= {"four tdpbusd with four tileloadd from L1": make(block), "tilestored": make(store),
              "ldtilecfg": make(lambda f, tiles, *_: tiles.configure(dict.fromkeys(range(8), (16, 64))))}
    loops |= {f"{count} multiply-adds of vectors, {where}": make(vectors(isa, count, number))
              for count in (64, 128, 256) for where, number in (("alone", 0), ("behind four tdpbusd", 4))}
    return loops


def chain(f: Function, tiles: Tiles, memory: Value, iteration: Value, _: Sums) -> None:
    """Emit 64 dependent additions of registers."""
    total = f.load(I64, memory)
    for _step in range(64):
        total = f.op(I64, f'call i64 asm sideeffect "", "=r,0"({total + iteration})', "kept")
    f.store(total, memory)


def measure(isa: Isa, seconds: float) -> list[tuple[str, float]]:
    """Return (name, cycles per instruction) of all loops."""
    memory = aligned(np.zeros(MEMORY, np.uint8))
    clock, loops = loop(isa, memory, chain, 64), cases(isa, memory)
    turns: dict[str, list[float]] = {name: [] for name in loops}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(len(times) >= 5 for times in turns.values()):
        for name, one in loops.items():
            before = _seconds(clock) / clock.times
            turns[name].append(_seconds(one) / one.times / before)
    return [(name, median(times)) for name, times in turns.items()]


def _seconds(one: Loop) -> float:
    start = time.thread_time_ns()
    one.run()
    return (time.thread_time_ns() - start) * 1e-9


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.measure.tiles", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of the measurement (default 3)")
    options = parser.parse_args(arguments)
    isa = best_isa(detect().features)
    if isa.matrix is None:
        raise SystemExit(f"{isa.name} has no matrix unit: {detect().tile_refusal or 'the CPU lists none'}")
    print(f"On {machine()}, {isa.name}:\n")
    figures = measure(isa, options.seconds)
    print(markdown_table(("what", "cycles"), [(name, f"{cycles:.1f}") for name, cycles in figures]))


if __name__ == "__main__":
    main(sys.argv[1:])
