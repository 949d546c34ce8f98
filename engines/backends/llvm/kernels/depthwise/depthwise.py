"""Kernel of a depthwise convolution.

    for block of output rows: for panel of channels: for tile of output columns: a call of the micro-kernel:
      for column of x that the tile reads:
        for group of pixels that begins here:               steps.py: the operand of one product
          operand = the pixels interleaved                  shared by all outputs that read them here
          for output of the tile that reads them here:
            acc[output] = dot(acc[output], operand, w)
        outputs whose last column this was: program, store

All is unrolled, and accumulators roll: only as many outputs are in registers as windows overlap. Neighbouring output
rows share the rows of x that both read, and their interleaving.

Floats need no interleaving, and each output's sum is a chain of taps, of which the out-of-order window holds too few to
hide the latency. So float32 also has tiles with as many outputs as there are registers, which take one tap after the
other; a narrower type would be widened again for each output. Large kernels have these tiles only, with taps in a loop;
INT8, whose pixels are interleaved for several taps, has smaller tiles for them.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import hidden, item_addresses, offset
from infer_server.engines.backends.llvm.kernels.common.arithmetic import FP32, INT8, INT16, Arithmetic
from infer_server.engines.backends.llvm.kernels.common.cost import CALL, LINE, Work, epilogue, pieces, reading
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    load_channels,
    load_vector,
    panels,
    panels_between,
    store_channels,
)
from infer_server.engines.backends.llvm.kernels.contraction.widen import widened
from infer_server.engines.backends.llvm.kernels.depthwise.columns import (
    Columns,
    integer_arithmetic,
    pixel_work,
    step_work,
)
from infer_server.engines.backends.llvm.kernels.depthwise.steps import (
    Group,
    Product,
    TapStep,
    columns_read,
    groups_of,
    last_column,
    products_of,
    rows_read,
    steps_of,
)
from infer_server.engines.backends.llvm.kernels.kernel import (
    ALIGNMENT,
    Grid,
    Kernel,
    Tactic,
    Window,
    begin_kernel,
    pack_channels,
    solves,
)
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import PTR
from infer_server.engines.lowering.problems.convolution import Depthwise
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View

IN_PASSING = 4          # registers in addition to the sums; a few spills cost less than smaller tiles
SHARED_CONSTANTS = 2    # most constants of a program that outputs which end together share
UNROLLED = 81           # most taps that are unrolled; code for more takes minutes to compile
UNROLLED_HALVES = 200   # ... in 16-bit types, where a loop over taps widens x for each output: 13x13 compiles in 2 s
MOST_LONG = 64          # most outputs of a tile of a long program: beyond, as for SiLU, each takes up to a third longer
LONGEST = 2048          # most products of an unrolled INT8 tile of a larger kernel
SHORT = 2               # number of such tiles that are tried


@dataclass(frozen=True)
class DepthwiseTile(Tactic):
    """Tactic of a depthwise convolution: rows x cols outputs of `vectors` of channels are a micro-kernel."""
    rows: int
    cols: int
    vectors: int
    by_tap: bool = False    # loop over taps for all outputs at once; else over columns of x

    @property
    def packed_rows(self) -> int:
        """Return the number of output rows with weights of their own."""
        return 1 if self.by_tap else self.rows

    def __str__(self) -> str:
        return f"tile {self.rows}x{self.cols}x{self.vectors}{' by tap' if self.by_tap else ''}"


@solves(Depthwise)
class DepthwiseKernel(Kernel[Depthwise]):
    """Depthwise convolution, vectorised over channels. Weights are packed [panel][step][vector]."""

    def arithmetic(self, isa: Isa) -> Arithmetic:
        """Return the arithmetic; a step of it takes one channel of as many pixels as it has elements."""
        return integer_arithmetic(isa) if self.packed else FP32

    @property
    def packed(self) -> bool:
        """Return True if lanes are in packed order, which the interleaving of bytes gives."""
        return self.problem.precision == "int8"

    def steps(self, isa: Isa, rows: int) -> tuple[TapStep, ...]:
        """Return the steps of `rows` output rows."""
        return steps_of(self.problem, self.arithmetic(isa).elements, rows)

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[DepthwiseTile]:
        problem, (height, width, _) = self.problem, self.problem.y.shape
        if self.is_large and not self.packed:
            return self._by_tap(isa)
        widest = isa.vectors_for(problem.channels)
        # Output rows share loads only if they read adjacent rows of x.
        together = (2, 1) if problem.dilation[0] == 1 and height > 1 else (1,)
        # Interleaving two vectors takes as many instructions as one.
        fitting = [(rows, vectors) for vectors in (4, 2, 1) for rows in together if vectors <= widest
                   and (self.sums(rows, vectors) + IN_PASSING <= isa.registers or (rows, vectors) == (1, 2))]
        # More vectors share more; half as many may suit the number of channels better.
        best = sorted({vectors for _, vectors in fitting}, reverse=True)[:2]
        shapes = [(rows, vectors) for rows, vectors in fitting if vectors in best] or [(1, 1)]
        cols = (14, 7, *(() if not self.is_large else (4, 2, 1)))
        found = dict.fromkeys(tile for rows, vectors in shapes for count in cols
                              if self._is_cached(tile := DepthwiseTile(rows, min(count, width), vectors)))
        return self._short(isa, found) if self.is_large else (*found, *self._by_tap(isa))

    def _is_cached(self, tile: DepthwiseTile) -> bool:
        """Return True if the tile's code, all of it straight, stays in the instruction cache."""
        return not self.problem.program.long or tile.rows * tile.cols * tile.vectors <= MOST_LONG

    def code_size(self, isa: Isa, tactic: DepthwiseTile) -> int:
        height, width, channels = self.problem.y.shape
        return sum(rows * cols * isa.vectors_for(some)
                   for rows, _ in pieces(height, tactic.rows) for cols, _ in pieces(width, tactic.cols)
                   for some, _ in pieces(channels, tactic.vectors * isa.lanes))

    def _short(self, isa: Isa, tiles: Iterable[DepthwiseTile]) -> Sequence[DepthwiseTile]:
        """Return the largest tiles of at most LONGEST products, or the smallest tile if none is that small."""
        parts = isa.ready_bytes // isa.bytes        # instructions of a product
        lengths = {tile: len(self.steps(isa, tile.rows)) * tile.cols * tile.vectors * parts for tile in tiles}
        shortest, *others = sorted(lengths, key=lambda tile: lengths[tile])
        return [tile for tile in reversed(others) if lengths[tile] <= LONGEST][:SHORT] or [shortest]

    @property
    def is_large(self) -> bool:
        halves = self.problem.precision not in ("fp32", "int8")
        return math.prod(self.problem.taps) > (UNROLLED_HALVES if halves else UNROLLED)

    def _by_tap(self, isa: Isa) -> Sequence[DepthwiseTile]:
        """Return tiles that loop over taps, of one and of two rows, with as many outputs as the registers hold."""
        if self.packed or self.problem.precision != "fp32" and not self.is_large:
            return ()
        found: dict[DepthwiseTile, None] = {}
        widest, (height, width, _) = isa.vectors_for(self.problem.channels), self.problem.y.shape
        # At most a cache line of channels: more do not help, and leave registers for fewer outputs.
        for vectors in (v for v in (1, 2, 4) if v <= widest and v * isa.bytes <= ALIGNMENT):
            most = (isa.registers - 2) // vectors - (isa.lanes == 4)
            for rows in (1, 2):
                across = -(-width // (most // rows))
                if rows <= height:
                    found[DepthwiseTile(rows, -(-width // across), vectors, by_tap=True)] = None
        return tuple(found)

    def sums(self, rows: int, vectors: int) -> int:
        """Return the accumulators in use at once: those of all windows that overlap in a column."""
        problem = self.problem
        return -(-((problem.taps[1] - 1) * problem.dilation[1] + 1) // problem.stride[1]) * rows * vectors

    def waiting_registers(self, isa: Isa, rows: int, vectors: int) -> int:
        """Return the registers of pixels that wait for the next columns that they are interleaved with."""
        pixels = sum((group.across - 1) * len(group.rows) for group in groups_of(self.steps(isa, rows)))
        return pixels * self.problem.dilation[1] * max(vectors // 2, 1)

    def cost(self, isa: Isa, tactic: DepthwiseTile) -> float:
        height, width, channels = self.problem.y.shape
        return self._rereading(isa, tactic) + sum(
            self._tile_cost(isa, rows, cols, isa.vectors_for(some), tactic.by_tap) * down * across * panels
            for rows, down in pieces(height, tactic.rows)
            for cols, across in pieces(width, tactic.cols)
            for some, panels in pieces(channels, tactic.vectors * isa.lanes))

    def _rereading(self, isa: Isa, tactic: DepthwiseTile) -> float:
        """Return the cycles of reading rows of x again.

        A row of tiles reads rows of x that overlap with those of the row before. If a panel is narrower than a cache
        line, each panel after the first reads all of them again.
        """
        x = self.problem.x
        rows, parts = len(rows_read(self.problem, 0, tactic.rows)), LINE / (tactic.vectors * isa.lanes * x.size)
        before = 1 - tactic.rows * self.problem.stride[0] / rows
        return reading(rows * math.prod(x.shape[1:]) * x.size,
                       math.ceil(self.problem.y.shape[0] / tactic.rows) * (max(before, 0) + max(parts - 1, 0)))

    def _tile_cost(self, isa: Isa, rows: int, cols: int, vectors: int, by_tap: bool) -> float:
        problem, arithmetic = self.problem, self.arithmetic(isa)
        end = epilogue(len(problem.program.instructions), len(problem.operands), vectors, rows)
        end *= rows * cols * vectors
        if by_tap:
            taps = math.prod(problem.taps) * vectors
            return (Work(taps * rows * cols, 0, taps * (rows * cols + 1)) + end).cycles + CALL
        steps, columns = self.steps(isa, rows), columns_read(problem, cols)
        products = len(steps) * cols * vectors * (isa.ready_bytes // isa.bytes if arithmetic is INT8 else 1)
        work = Work(products, products if arithmetic is INT16 else 0, products)
        pixels = len(rows_read(problem, 0, rows)) * len(columns)
        met = sum(map(len, products_of(problem, steps, rows, cols).values()))
        work += pixel_work(arithmetic, vectors) * pixels + step_work(arithmetic, vectors) * met
        shared = problem.program.constants <= SHARED_CONSTANTS
        work += Work(loads=problem.program.constants * vectors) * cols * (1 if shared else rows)
        return (work + end).cycles + CALL

    def grid(self, isa: Isa, tactic: DepthwiseTile) -> Grid:
        height, _, channels = self.problem.y.shape
        return Grid(-(-height // tactic.rows), columns=-(-channels // (tactic.vectors * isa.lanes)))

    def windows(self, isa: Isa, tactic: DepthwiseTile) -> Sequence[Window]:
        problem, rows = self.problem, tactic.rows
        read = (rows - 1) * problem.stride[0] + (problem.taps[0] - 1) * problem.dilation[0] + 1
        return [Window.along(problem.x, step=rows * problem.stride[0], count=read),
                *(Window.along(view, step=rows, count=rows) for view in (*problem.operands, problem.y))]

    def packing(self, tactic: DepthwiseTile) -> tuple[int, int]:
        return tactic.packed_rows, tactic.vectors

    # ---- constants
    def pack(self, isa: Isa, tactic: DepthwiseTile, constants: Mapping[str, Any]) -> tuple[Array, Array]:
        problem, arithmetic, channels = self.problem, self.arithmetic(isa), self.problem.channels
        weights = np.asarray(constants["weights"]).reshape(channels, *problem.taps)
        steps = self.steps(isa, tactic.packed_rows)
        # The last channel is for lanes without one.
        spread = np.zeros((channels + 1, len(steps), arithmetic.elements), weights.dtype if self.packed else np.float32)
        for number, step in enumerate(steps):
            for element, taps in step.taps(problem).items():
                spread[:-1, number, element] = weights[:, *taps]
        order = panels(isa, channels, self.packed, tactic.vectors * isa.lanes)
        parts = [arithmetic.ready(isa, spread[np.minimum(panel, channels)].transpose(2, 0, 1, 3)).ravel()
                 for panel in order]
        return np.concatenate(parts), pack_channels(constants["program"], channels, order)

    def expansions(self, isa: Isa, tactic: DepthwiseTile) -> Mapping[int, Problem]:
        return widened(isa) if self.problem.precision == "int8" else {}

    def emit(self, module: Module, name: str, isa: Isa, tactic: DepthwiseTile) -> None:
        _DepthwiseEmitter(self, module, name, isa, tactic).emit()


class _DepthwiseEmitter:
    """Emitter of one kernel: the outer loops, and the micro-kernels that they call."""
    def __init__(self, kernel: DepthwiseKernel, module: Module, name: str, isa: Isa, tile: DepthwiseTile) -> None:
        self.kernel, self.module, self.name, self.isa, self.tile = kernel, module, name, isa, tile
        self.problem, self.arithmetic = kernel.problem, kernel.arithmetic(isa)
        self.steps = kernel.steps(isa, tile.packed_rows)

    # ---- outer loops
    def emit(self) -> None:
        problem, tile = self.problem, self.tile
        f, addresses, (begin, end, first, last) = begin_kernel(self.module, self.name, 1 + len(problem.operands) + 3)
        *inputs, weights, constants, y = addresses
        blocks, width = -(-problem.y.shape[0] // tile.rows), tile.vectors * self.isa.lanes
        for row in f.range("rows", begin, end):
            at = item_addresses([*inputs, y], self._views(), row.divided(blocks))
            block = row.remainder(blocks)
            at = self._moved(at, block * tile.rows, 0)
            for start, channels in panels_between(f, first, last, problem.channels, width):
                self._rows(f, at, weights, constants, block, start, channels)

    def _rows(self, f: Function, at: list[Value], weights: Value, constants: Value, block: Value, start: Value,
              channels: int) -> None:
        """Emit one block of output rows of one panel; the last block may have fewer rows."""
        problem, tile = self.problem, self.tile
        whole, tail = divmod(problem.y.shape[0], tile.rows)
        at = [a + start * view.strides[-1] for a, view in zip(at, self._views(), strict=True)]
        weights = weights + start * (len(self.steps) * self.arithmetic.weight_bytes(self.isa) // self.isa.lanes)
        constants = constants + start * (4 * problem.program.constants)
        for rows, test in ((tile.rows, block.below(whole)), (tail, block.compare("eq", whole))):
            if rows and (rows == tile.rows or whole):
                with f.when(test):
                    self._columns(f, at, weights, constants, rows, channels)

    def _columns(self, f: Function, at: list[Value], weights: Value, constants: Value, rows: int,
                 channels: int) -> None:
        for j, cols in f.tiles("column", self.problem.y.shape[1], self.tile.cols, split_tail=True):
            x, *others = self._moved(at, 0, j)
            f.run(self._microkernel(rows, cols, channels), x, weights, constants, *others)

    def _views(self) -> tuple[View, ...]:
        return (*self.problem.inputs, self.problem.y)

    def _moved(self, at: list[Value], i: Value | int, j: Value | int) -> list[Value]:
        """Return the addresses of output pixel (i, j) relative to `at`."""
        f = at[0].f
        pixel = [p if isinstance(p, Value) else f.constant(p, "i64") for p in (i, j)]
        x, *others = at
        strides = [s * t for s, t in zip(self.problem.x.strides, self.problem.stride, strict=False)]
        return [offset(x, pixel, strides),
                *(offset(a, pixel, view.strides[:2]) for a, view in zip(others, self._views()[1:], strict=True))]

    # ---- the micro-kernel
    def _microkernel(self, rows: int, cols: int, channels: int) -> str:
        name = f"{self.name}_{rows}x{cols}x{channels}"
        if name in self.module.functions:
            return name
        problem, isa, arithmetic = self.problem, self.isa, self.arithmetic
        operands = {f"operand{i}": PTR for i in range(len(problem.operands))}
        f = self.module.function(name, True, x=PTR, w=PTR, constants=PTR, **operands, y=PTR)
        lanes = Lanes(isa, channels, self.kernel.packed)
        outputs = [(i, j) for i in range(rows) for j in range(cols)]
        acc = {(o, v): arithmetic.zero(isa, f.parameters["x"]) for o in outputs for v in range(lanes.vectors)}
        if self.tile.by_tap:
            self._taps(f, lanes, acc, outputs)
            self._finish(f, lanes, acc, outputs)
            return name
        x = Columns(problem, arithmetic, lanes, f.parameters["x"], rows, cols)
        products = products_of(problem, self.steps, rows, cols)
        ahead = self._one_ahead(lanes.vectors)
        for number, column in enumerate(products):
            f.write(f"; column {column}")
            for following in list(products)[number:number + 2] if ahead else ():
                for group, v in product(products[following], range(lanes.vectors)):
                    x.operand(group, following, v)
            self._column(f, lanes, acc, x, column, products[column])
            done = [output for output in outputs if last_column(problem, self.steps, output) == column]
            if done:
                self._finish(f, lanes, acc, done)
        return name

    def _taps(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]]) -> None:
        """Emit one tap after the other for all outputs, so that as many sums as possible are independent.

        x is loaded for each product. Its address is made opaque for each tap; otherwise LLVM would keep pixels that
        several taps read in registers, and spill the sums.
        """
        rows, columns = self.problem.taps
        if self.kernel.is_large:
            for column in f.loop("tap column", columns, acc=acc):
                for row in f.loop("tap row", rows, acc=acc):
                    self._tap(f, lanes, acc, outputs, row, column)
            return
        for q, p in product(range(columns), range(rows)):
            f.write(f"; tap ({p}, {q})")
            self._tap(f, lanes, acc, outputs, p, q)

    def _tap(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]], p: Any,
             q: Any) -> None:
        problem, size = self.problem, self.arithmetic.weight_bytes(self.isa)
        row, pixel, _ = problem.x.strides
        x = hidden(f.parameters["x"]) + (p * (problem.dilation[0] * row) + q * (problem.dilation[1] * pixel))
        at = f.parameters["w"] + (p * problem.taps[1] + q) * (lanes.vectors * size)
        weights = [f.load(self.isa.floats, at + v * size, self.isa.bytes, "weights") for v in range(lanes.vectors)]
        for i, j in outputs:
            here = x + (i * problem.stride[0] * row + j * problem.stride[1] * pixel)
            for v, value in enumerate(lanes.load(problem.x.dtype, here)):
                acc[(i, j), v] = self.isa.fma(value, weights[v], acc[(i, j), v])

    def _one_ahead(self, vectors: int) -> bool:
        """Return True if there are registers to load and interleave the next column early, to hide the latency."""
        kernel, isa, rows = self.kernel, self.isa, self.tile.rows
        operands = len(groups_of(self.steps)) * vectors + kernel.waiting_registers(isa, rows, vectors)
        return kernel.sums(rows, vectors) + 2 * operands + 2 <= isa.registers

    def _column(self, f: Function, lanes: Lanes, acc: dict[Any, Value], x: Columns, column: int,
                products: Mapping[Group, Sequence[Product]]) -> None:
        """Add the steps that begin in a column of x to the accumulators of their outputs."""
        isa, arithmetic = self.isa, self.arithmetic
        # Opaque for each column; otherwise LLVM would keep all weights in registers and spill the accumulators.
        weights, size = hidden(f.parameters["w"]), arithmetic.weight_bytes(isa)
        for half in range(0, lanes.vectors, 2):     # two vectors share their interleaving
            for group, v in product(products, range(half, min(half + 2, lanes.vectors))):
                value = x.operand(group, column, v)
                for output, step in products[group]:
                    met = arithmetic.weights(isa, weights + (step * lanes.vectors + v) * size)
                    acc[output, v] = arithmetic.dot(isa, acc[output, v], value, met)

    def _finish(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]]) -> None:
        """Run the program on finished outputs and store them.

        Constants are loaded vector by vector. A few of them are shared by all outputs; more would occupy registers that
        the sums of further columns need, so each output then loads its own.
        """
        problem = self.problem
        first = hidden(f.parameters["constants"])
        shared = self.tile.by_tap or problem.program.constants <= SHARED_CONSTANTS
        constants = [first, *(first if shared else hidden(first) for _ in outputs[1:])]
        others, targets = [], []
        for i, j in outputs:
            at = [f.parameters[f"operand{n}"] + (i * view.strides[0] + j * view.strides[1])
                  for n, view in enumerate(problem.operands)]
            others.append([load_channels(lanes, view, a) for view, a in zip(problem.operands, at, strict=True)])
            targets.append(f.parameters["y"] + (i * problem.y.strides[0] + j * problem.y.strides[1]))
        pixels: list[list[Value]] = [[] for _ in outputs]
        for v in range(lanes.vectors):
            for output, operands, pixel, own in zip(outputs, others, pixels, constants, strict=True):
                numbers = load_vector(lanes, own, problem.program.constants, v)
                total = self.arithmetic.finish(self.isa, acc.pop((output, v)))
                pixel.append(problem.program.run(self.isa, total, [operand[v] for operand in operands], numbers))
        store_channels(lanes, problem.y, pixels, targets)
