"""The kernel of a depthwise convolution.

    for block of output rows: for panel of channels: for tile of output columns: a call of the micro-kernel:
      for column of x that the tile reads:
        for group of its rows:                              int8: four rows, floats: one
          quads = the rows interleaved byte by byte         shared by all outputs that read this column
          for output of the tile that reads this column:
            acc[output] = dot4(acc[output], quads, w)
        outputs whose last column this was: program, store

All is unrolled, so accumulators roll: as many outputs are in registers as windows overlap. Neighbouring output rows
share the rows of x that both read, and their interleaving; an output row meets zero weights for those it does not read.

Floats have nothing to interleave, and each output's sum is a chain of taps, of which too few columns at a time fit the
processor's window to keep it busy. So float32 also has tiles of as many outputs as there are registers, which meet a
tap together; a widened type would be widened again for each of them.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import PTR, Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import hidden, item_addresses, offset
from engines.backends.llvm.kernels.common.arithmetic import FP32, INT8, Arithmetic, Operand
from engines.backends.llvm.kernels.common.pixels import (
    load_channels,
    load_vector,
    panels,
    panels_between,
    store_channels,
)
from engines.backends.llvm.kernels.contraction.widen import widened
from engines.backends.llvm.kernels.depthwise.columns import column_work, load_column
from engines.backends.llvm.kernels.kernel import (
    ALIGNMENT,
    Grid,
    Kernel,
    Tactic,
    Window,
    begin_kernel,
    pack_channels,
    solves,
)
from engines.backends.llvm.tuning.cost import CALL, Work, epilogue, pieces
from engines.lowering.problems.convolution import Depthwise
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View


@dataclass(frozen=True)
class DepthwiseTile(Tactic):
    """rows x cols outputs of `vectors` of channels are a micro-kernel."""
    rows: int
    cols: int
    vectors: int
    by_tap: bool = False    # float32: all outputs meet one tap after the other; else one column of x after the other

    @property
    def packed_rows(self) -> int:
        """Output rows that have weights of their own, zeros for rows of x that they do not read."""
        return 1 if self.by_tap else self.rows

    def __str__(self) -> str:
        return f"tile {self.rows}x{self.cols}x{self.vectors}{' by tap' if self.by_tap else ''}"


@solves(Depthwise)
class DepthwiseKernel(Kernel[Depthwise]):
    """Weights are packed [panel][output row][group of rows][tap column][vector], as the arithmetic reads them."""

    @property
    def arithmetic(self) -> Arithmetic:
        """A lane's step is a channel of as many rows of x as it has elements."""
        return INT8 if self.problem.precision == "int8" else FP32

    @property
    def packed(self) -> bool:
        """The interleaving of bytes makes packed order."""
        return self.problem.precision == "int8"

    def rows_read_by(self, i: int) -> set[int]:
        """Rows of x that output row i reads, from the first tap of row 0 on."""
        problem = self.problem
        return {i * problem.stride[0] + p * problem.dilation[0] for p in range(problem.taps[0])}

    def row_groups(self, rows: int) -> list[list[int]]:
        """The rows of x that `rows` neighbouring output rows read, as they are loaded together."""
        read = sorted(set().union(*map(self.rows_read_by, range(rows))))
        return [read[first:first + self.arithmetic.elements] for first in range(0, len(read), self.arithmetic.elements)]

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[DepthwiseTile]:
        problem, (height, width, _) = self.problem, self.problem.y.shape
        widest = isa.vectors_for(problem.channels)
        # Output rows share loads only if the rows of x that they read are neighbours too.
        together = (2, 1) if problem.dilation[0] == 1 and height > 1 else (1,)
        fitting = [(rows, vectors) for vectors in (4, 2, 1) for rows in together if vectors <= widest
                   and self.sums(rows, vectors) <= isa.registers - self._other_registers(isa, rows, vectors)]
        # The most vectors that fit share most; one step below may suit the number of channels better.
        best = sorted({vectors for _, vectors in fitting}, reverse=True)[:2]
        shapes = [(rows, vectors) for rows, vectors in fitting if vectors in best] or [(1, 1)]
        found = dict.fromkeys(DepthwiseTile(rows, min(cols, width), vectors)
                              for rows, vectors in shapes for cols in (14, 7))
        return (*found, *self._by_tap(isa))

    def _by_tap(self, isa: Isa) -> Sequence[DepthwiseTile]:
        """Tiles of as many outputs as leave registers for a tap's weights, and of half as many."""
        if self.problem.precision != "fp32":
            return ()
        found: dict[DepthwiseTile, None] = {}
        widest, (height, width, _) = isa.vectors_for(self.problem.channels), self.problem.y.shape
        # Up to a cache line of channels: more are no better, and leave room for fewer outputs.
        for vectors in (v for v in (1, 2, 4) if v <= widest and v * isa.bytes <= ALIGNMENT):
            most = (isa.registers - 2) // vectors - (isa.lanes == 4)
            for rows in (1, 2):
                across = -(-width // (most // rows))
                if rows <= height:
                    found[DepthwiseTile(rows, -(-width // across), vectors, by_tap=True)] = None
        return tuple(found)

    def sums(self, rows: int, vectors: int) -> int:
        """Accumulators in use at once: of all windows that overlap in a column."""
        problem = self.problem
        return -(-((problem.taps[1] - 1) * problem.dilation[1] + 1) // problem.stride[1]) * rows * vectors

    def _other_registers(self, isa: Isa, rows: int, vectors: int) -> int:
        """What a column needs beside the accumulators: its operands, a few in passing, and weights that no
        instruction takes from memory."""
        operands = len(self.row_groups(rows)) * self.operand_registers(isa)
        return vectors * (operands + (isa.lanes == 4)) + 4

    def operand_registers(self, isa: Isa) -> int:
        """Registers of a vector of channels of a group of rows."""
        return isa.ready_bytes // isa.bytes if self.packed else 1

    def cost(self, isa: Isa, tactic: DepthwiseTile) -> float:
        height, width, channels = self.problem.y.shape
        return sum(self._tile_cost(isa, rows, cols, isa.vectors_for(some), tactic.by_tap) * down * across * panels
                   for rows, down in pieces(height, tactic.rows)
                   for cols, across in pieces(width, tactic.cols)
                   for some, panels in pieces(channels, tactic.vectors * isa.lanes))

    def _tile_cost(self, isa: Isa, rows: int, cols: int, vectors: int, by_tap: bool) -> float:
        problem = self.problem
        end = epilogue(len(problem.program.instructions), len(problem.operands), vectors, rows)
        end *= rows * cols * vectors
        if by_tap:
            taps = math.prod(problem.taps) * vectors
            return (Work(taps * rows * cols, 0, taps * (rows * cols + 1)) + end).cycles + CALL
        groups = self.row_groups(rows)
        met = sum(not self.rows_read_by(i).isdisjoint(group) for group in groups for i in range(rows))
        parts = -(-self.arithmetic.weight_bytes(isa) // isa.bytes)      # instructions of a dot product
        dots = met * cols * problem.taps[1] * vectors * parts
        work = Work(dots, dots if parts > 1 else 0, dots)
        work += column_work(self.arithmetic, isa, vectors, sum(map(len, groups))) * len(self.columns_read(cols))
        work += Work(loads=problem.program.constants * vectors) * cols
        return (work + end).cycles + CALL

    def columns_read(self, cols: int) -> list[int]:
        """The columns of x that `cols` neighbouring output columns read, from the first tap of column 0 on."""
        problem = self.problem
        return sorted({j * problem.stride[1] + q * problem.dilation[1]
                       for j in range(cols) for q in range(problem.taps[1])})

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
        problem, arithmetic, channels = self.problem, self.arithmetic, self.problem.channels
        weights = np.asarray(constants["weights"]).reshape(channels, *problem.taps)
        groups = self.row_groups(tactic.packed_rows)
        read = [row for group in groups for row in group]
        # [channel][output row][group of rows][row of the group][tap column]; a last channel is for lanes without one
        spread = np.zeros((channels + 1, tactic.packed_rows, len(groups) * arithmetic.elements, problem.taps[1]),
                          weights.dtype)
        for i in range(tactic.packed_rows):
            for p in range(problem.taps[0]):
                spread[:-1, i, read.index(i * problem.stride[0] + p * problem.dilation[0])] = weights[:, p]
        spread = arithmetic.store_weights(spread.reshape(*spread.shape[:2], -1, arithmetic.elements, problem.taps[1]))
        order = panels(isa, channels, self.packed, tactic.vectors * isa.lanes)
        parts = [arithmetic.ready(isa, spread[np.minimum(panel, channels)].transpose(2, 3, 5, 0, 1, 4)).ravel()
                 for panel in order]
        return np.concatenate(parts), pack_channels(constants["program"], channels, order)

    def expansions(self, isa: Isa, tactic: DepthwiseTile) -> Mapping[int, Problem]:
        return widened(isa) if self.problem.precision == "int8" else {}

    def emit(self, module: Module, name: str, isa: Isa, tactic: DepthwiseTile) -> None:
        _Emitter(self, module, name, isa, tactic).emit()


class _Emitter:
    def __init__(self, kernel: DepthwiseKernel, module: Module, name: str, isa: Isa, tile: DepthwiseTile) -> None:
        self.kernel, self.module, self.name, self.isa, self.tile = kernel, module, name, isa, tile
        self.problem, self.arithmetic = kernel.problem, kernel.arithmetic
        self.groups = len(kernel.row_groups(tile.packed_rows))

    # ---- the loops around
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
        """One block of output rows of one panel; the last block may have fewer."""
        problem, tile = self.problem, self.tile
        whole, tail = divmod(problem.y.shape[0], tile.rows)
        at = [a + start * view.size for a, view in zip(at, self._views(), strict=True)]
        vectors = tile.packed_rows * self.groups * problem.taps[1]         # of weights, for a vector of channels
        weights = weights + start * (vectors * self.arithmetic.weight_bytes(self.isa) // self.isa.lanes)
        constants = constants + start * (4 * problem.program.constants)
        for rows, test in ((tile.rows, block.below(whole)), (tail, block.compare("eq", whole))):
            if rows and (rows == tile.rows or whole):
                with f.when(test):
                    self._columns(f, at, weights, constants, rows, channels)

    def _columns(self, f: Function, at: list[Value], weights: Value, constants: Value, rows: int,
                 channels: int) -> None:
        for j, cols in f.tiles("column", self.problem.y.shape[1], self.tile.cols):
            x, *others = self._moved(at, 0, j)
            f.run(self._microkernel(rows, cols, channels), x, weights, constants, *others)

    def _views(self) -> tuple[View, ...]:
        return (*self.problem.inputs, self.problem.y)

    def _moved(self, at: list[Value], i: Value | int, j: Value | int) -> list[Value]:
        """At output pixel (i, j) from here."""
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
        reads = self.kernel.columns_read(cols)
        ahead = 1 + self._loads_ahead(lanes.vectors, rows)
        loaded = [self._load(f, lanes, column, rows) for column in reads[:ahead - 1]]
        for number, column in enumerate(reads):
            f.write(f"; column {column}")
            loaded += [self._load(f, lanes, following, rows) for following in reads[number:][ahead - 1:ahead]]
            users = [(j, q) for j in range(cols) for q in range(problem.taps[1])
                     if j * problem.stride[1] + q * problem.dilation[1] == column]
            self._column(f, lanes, acc, loaded.pop(0), rows, users)
            for j, q in users:
                if q == problem.taps[1] - 1:
                    self._finish(f, lanes, acc, [(i, j) for i in range(rows)])
        return name

    def _taps(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]]) -> None:
        """One tap after the other into all outputs: as many sums that do not wait for each other as there are.

        x comes from memory with each product, so its address is hidden anew for each tap, or LLVM would keep what
        several taps read in registers and spill the sums.
        """
        problem, arithmetic = self.problem, self.arithmetic
        row, pixel, _ = problem.x.strides
        size = arithmetic.weight_bytes(self.isa)
        for q in range(problem.taps[1]):
            for p in range(problem.taps[0]):
                f.write(f"; tap ({p}, {q})")
                x = hidden(f.parameters["x"]) + (p * problem.dilation[0] * row + q * problem.dilation[1] * pixel)
                at = f.parameters["w"] + (p * problem.taps[1] + q) * lanes.vectors * size
                weights = [f.load(self.isa.floats, at + v * size, self.isa.bytes, "weights")
                           for v in range(lanes.vectors)]
                for i, j in outputs:
                    here = x + (i * problem.stride[0] * row + j * problem.stride[1] * pixel)
                    values = lanes.load(problem.x.dtype, here)
                    for v, value in enumerate(values):
                        acc[(i, j), v] = self.isa.fma(value, weights[v], acc[(i, j), v])

    def _loads_ahead(self, vectors: int, rows: int) -> int:
        """Columns that are loaded and interleaved before their turn, if there are registers for one: from the load to
        the last store is a longer way than a processor looks ahead."""
        operands = self.groups * vectors * self.kernel.operand_registers(self.isa)
        return int(self.kernel.sums(rows, vectors) + 2 * operands + 2 <= self.isa.registers)

    def _load(self, f: Function, lanes: Lanes, column: int, rows: int) -> list[list[Operand]]:
        """[group of rows][vector] of one column of x."""
        x = self.problem.x
        start = f.parameters["x"] + column * x.strides[1]
        return [load_column(self.arithmetic, lanes, x.dtype, [start + row * x.strides[0] for row in group])
                for group in self.kernel.row_groups(rows)]

    def _column(self, f: Function, lanes: Lanes, acc: dict[Any, Value], operands: list[list[Operand]], rows: int,
                users: list[tuple[int, int]]) -> None:
        """One column of x into the accumulators of the output columns and tap columns that meet there."""
        problem, isa, arithmetic = self.problem, self.isa, self.arithmetic
        # Hidden anew for each column, or LLVM would keep all weights in registers and spill the accumulators.
        weights, size = hidden(f.parameters["w"]), arithmetic.weight_bytes(isa)
        for group, (members, values) in enumerate(zip(self.kernel.row_groups(rows), operands, strict=True)):
            for i in range(rows):
                if self.kernel.rows_read_by(i).isdisjoint(members):
                    continue
                for j, q in users:
                    at = ((i * self.groups + group) * problem.taps[1] + q) * lanes.vectors
                    for v in range(lanes.vectors):
                        met = arithmetic.weights(isa, weights + (at + v) * size)
                        acc[(i, j), v] = arithmetic.dot(isa, acc[(i, j), v], values[v], met)

    def _finish(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]]) -> None:
        """Program and store. The outputs share each constant, which is loaded only when its vector's turn comes."""
        problem = self.problem
        constants = hidden(f.parameters["constants"])
        others, targets = [], []
        for i, j in outputs:
            at = [f.parameters[f"operand{n}"] + (i * view.strides[0] + j * view.strides[1])
                  for n, view in enumerate(problem.operands)]
            others.append([load_channels(lanes, view, a) for view, a in zip(problem.operands, at, strict=True)])
            targets.append(f.parameters["y"] + (i * problem.y.strides[0] + j * problem.y.strides[1]))
        pixels: list[list[Value]] = [[] for _ in outputs]
        for v in range(lanes.vectors):
            numbers = load_vector(lanes, constants, problem.program.constants, v)
            for output, operands, pixel in zip(outputs, others, pixels, strict=True):
                total = self.arithmetic.finish(self.isa, acc.pop((output, v)))
                pixel.append(problem.program.run(self.isa, total, [operand[v] for operand in operands], numbers))
        store_channels(lanes, problem.y, pixels, targets)
