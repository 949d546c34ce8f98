"""Depthwise convolution: every channel has its own k x k weights.

    y[n, i, j, c] = program(sum over p, q of x[n, i * stride + p * dilation, j * stride + q * dilation, c] * w[c, p, q])

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

x's address is that of tap (0, 0) of output pixel (0, 0), in a halo of zero points; nothing past the last tap is read.
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
from engines.backends.llvm.kernels.common.access import (
    hidden,
    item_addresses,
    load_channels,
    load_vector,
    offset,
    panels,
    store_channels,
)
from engines.backends.llvm.kernels.common.arithmetic import STORED
from engines.backends.llvm.kernels.contraction.widen import widened
from engines.backends.llvm.kernels.depthwise.columns import COLUMNS, Operand
from engines.backends.llvm.kernels.kernel import (
    ALIGNMENT,
    Grid,
    ImageKernel,
    KernelSpec,
    Tactic,
    Window,
    begin_kernel,
    pack_channels,
)
from engines.backends.llvm.tuning.cost import CALL, Work, epilogue, pieces
from engines.lowering.epilogue.functions import fma
from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import Array
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


@dataclass(frozen=True)
class Depthwise(ImageKernel):
    """Views of one item are [rows, columns, channels], as many channels in y as in x."""
    precision: str                  # int8, fp32, bf16, fp16: how x is stored; floats are computed in float32
    taps: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    family = "depthwise"

    @property
    def misfit(self) -> str:
        return super().misfit or ("" if self.x.dtype == STORED[self.precision] else self.x.dtype)

    @property
    def channels(self) -> int:
        return self.y.shape[2]

    @property
    def macs(self) -> int:
        return math.prod(self.y.shape) * math.prod(self.taps)

    @property
    def packed(self) -> bool:
        """The interleaving of bytes makes packed order."""
        return self.precision == "int8"

    def rows_read_by(self, i: int) -> set[int]:
        """Rows of x that output row i reads, from the first tap of row 0 on."""
        return {i * self.stride[0] + p * self.dilation[0] for p in range(self.taps[0])}

    def rows_read(self, rows: int) -> list[int]:
        """... that `rows` neighbouring output rows read."""
        return sorted(set().union(*map(self.rows_read_by, range(rows))))

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[DepthwiseTile]:
        widest = isa.vectors_for(self.channels)
        # Output rows share loads only if the rows of x that they read are neighbours too.
        together = (2, 1) if self.dilation[0] == 1 and self.y.shape[0] > 1 else (1,)
        fitting = [(rows, vectors) for vectors in (4, 2, 1) for rows in together if vectors <= widest
                   and self.sums(rows, vectors) <= isa.registers - self._other_registers(isa, rows, vectors)]
        # The most vectors that fit share most; one step below may suit the number of channels better.
        best = sorted({vectors for _, vectors in fitting}, reverse=True)[:2]
        shapes = [(rows, vectors) for rows, vectors in fitting if vectors in best] or [(1, 1)]
        found = dict.fromkeys(DepthwiseTile(rows, min(cols, self.y.shape[1]), vectors)
                              for rows, vectors in shapes for cols in (14, 7))
        return (*found, *self._by_tap(isa))

    def _by_tap(self, isa: Isa) -> Sequence[DepthwiseTile]:
        """Tiles of as many outputs as leave registers for a tap's weights, and of half as many."""
        if self.precision != "fp32":
            return ()
        found: dict[DepthwiseTile, None] = {}
        # Up to a cache line of channels: more are no better, and leave room for fewer outputs.
        for vectors in (v for v in (1, 2, 4) if v <= isa.vectors_for(self.channels) and v * isa.bytes <= ALIGNMENT):
            most = (isa.registers - 2) // vectors - (isa.lanes == 4)
            for rows in (1, 2):
                cols = most // rows
                across = -(-self.y.shape[1] // cols)
                if rows <= self.y.shape[0]:
                    found[DepthwiseTile(rows, -(-self.y.shape[1] // across), vectors, by_tap=True)] = None
        return tuple(found)

    def sums(self, rows: int, vectors: int) -> int:
        """Accumulators in use at once: of all windows that overlap in a column."""
        return -(-((self.taps[1] - 1) * self.dilation[1] + 1) // self.stride[1]) * rows * vectors

    def _other_registers(self, isa: Isa, rows: int, vectors: int) -> int:
        """What a column needs beside the accumulators: its operands, a few in passing, and weights that no
        instruction takes from memory."""
        operands = -(-len(self.rows_read(rows)) // COLUMNS[self.precision].rows)
        operands *= isa.ready_bytes // isa.bytes if self.precision == "int8" else 1
        return vectors * (operands + (isa.lanes == 4)) + 4

    def cost(self, isa: Isa, tactic: DepthwiseTile) -> float:
        return sum(self._tile_cost(isa, rows, cols, isa.vectors_for(channels), tactic.by_tap) * down * across * panels
                   for rows, down in pieces(self.y.shape[0], tactic.rows)
                   for cols, across in pieces(self.y.shape[1], tactic.cols)
                   for channels, panels in pieces(self.channels, tactic.vectors * isa.lanes))

    def _tile_cost(self, isa: Isa, rows: int, cols: int, vectors: int, by_tap: bool) -> float:
        if by_tap:
            taps = math.prod(self.taps) * vectors
            work = Work(taps * rows * cols, 0, taps * (rows * cols + 1))
            return (work + self._endings(rows, cols, vectors)).cycles + CALL
        arithmetic, read = COLUMNS[self.precision], self.rows_read(rows)
        groups = [set(read[at:at + arithmetic.rows]) for at in range(0, len(read), arithmetic.rows)]
        met = sum(not group.isdisjoint(self.rows_read_by(i)) for group in groups for i in range(rows))
        columns = len({j * self.stride[1] + q * self.dilation[1] for j in range(cols) for q in range(self.taps[1])})
        parts = -(-arithmetic.weight_bytes(isa) // isa.bytes)       # instructions of a dot product
        dots = met * cols * self.taps[1] * vectors * parts
        work = Work(dots, dots if parts > 1 else 0, dots)
        work += arithmetic.loading(isa, vectors, len(read)) * columns
        work += Work(loads=self.program.constants * vectors) * cols
        return (work + self._endings(rows, cols, vectors)).cycles + CALL

    def _endings(self, rows: int, cols: int, vectors: int) -> Work:
        """The program on all outputs of a tile."""
        return epilogue(len(self.program.instructions), len(self.operands), vectors, rows) * (rows * cols * vectors)

    def grid(self, isa: Isa, tactic: DepthwiseTile) -> Grid:
        return Grid(-(-self.y.shape[0] // tactic.rows), columns=-(-self.channels // (tactic.vectors * isa.lanes)))

    def windows(self, isa: Isa, tactic: DepthwiseTile) -> Sequence[Window]:
        rows = tactic.rows
        read = (rows - 1) * self.stride[0] + (self.taps[0] - 1) * self.dilation[0] + 1
        return [Window.along(self.x, step=rows * self.stride[0], count=read),
                *(Window.along(view, step=rows, count=rows) for view in (*self.operands, self.y))]

    def packing(self, tactic: DepthwiseTile) -> tuple[int, int]:
        return tactic.packed_rows, tactic.vectors

    def emit(self, module: Module, name: str, isa: Isa, tactic: DepthwiseTile) -> None:
        _Emitter(self, module, name, isa, tactic).kernel()

    # ---- constants
    def pack(self, isa: Isa, tactic: DepthwiseTile, constants: Mapping[str, Any]) -> tuple[Array, Array]:
        """"weights": [channels, 1, *taps] (s8 or float) -> [panel][output row][group of rows][tap column][vector],
        as the arithmetic reads them; "program": float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        arithmetic = COLUMNS[self.precision]
        weights = np.asarray(constants["weights"]).reshape(self.channels, *self.taps)
        read, places = self.rows_read(tactic.packed_rows), arithmetic.rows
        padded = -(-len(read) // places) * places
        spread = np.zeros((self.channels + 1, tactic.packed_rows, padded, self.taps[1]), weights.dtype)
        for i in range(tactic.packed_rows):
            for p in range(self.taps[0]):
                spread[:-1, i, read.index(i * self.stride[0] + p * self.dilation[0])] = weights[:, p]
        # [channel][output row][group][row of the group][tap column]
        spread = spread.reshape(*spread.shape[:2], -1, places, self.taps[1])
        order = panels(isa, self.channels, self.packed, tactic.vectors * isa.lanes)
        parts = [arithmetic.ready(isa, spread[np.minimum(panel, self.channels)].transpose(2, 3, 5, 0, 1, 4))
                 for panel in order]
        return np.concatenate(parts), pack_channels(constants["program"], self.channels, order)

    def made(self, isa: Isa, tactic: DepthwiseTile) -> Mapping[int, KernelSpec]:
        return widened(isa) if self.precision == "int8" else {}

    # ---- meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        integers = self.precision == "int8"
        wide: Any = x.astype(np.int64) if integers else load_meaning(self.x.dtype, x)
        weights: Any = np.asarray(constants["weights"]).reshape(self.channels, *self.taps)
        acc: Any = np.zeros((len(x), *self.y.shape), np.int64 if integers else np.float32)
        for q in range(self.taps[1]):       # column by column: the order in which the kernel adds floats
            for p in range(self.taps[0]):
                tap = wide[:, p * self.dilation[0]:, q * self.dilation[1]:][:, ::self.stride[0], ::self.stride[1]]
                tap = tap[:, :self.y.shape[0], :self.y.shape[1]]
                w = weights[:, p, q]
                acc = acc + tap * w.astype(np.int64) if integers else fma(tap, w.astype(np.float32), acc)
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        result = self.program.meaning(acc.astype(np.float32), others, constants["program"])
        return (store_meaning(self.y.dtype, result),)


class _Emitter:
    def __init__(self, spec: Depthwise, module: Module, name: str, isa: Isa, tile: DepthwiseTile) -> None:
        self.spec, self.module, self.name, self.isa, self.tile = spec, module, name, isa, tile
        self.arithmetic = COLUMNS[spec.precision]
        self.groups = -(-len(spec.rows_read(tile.packed_rows)) // self.arithmetic.rows)

    # ---- the loops around
    def kernel(self) -> None:
        spec, tile = self.spec, self.tile
        f, addresses, (begin, end, first, last) = begin_kernel(self.module, self.name, 1 + len(spec.operands) + 3)
        *inputs, weights, constants, y = addresses
        blocks, width = -(-spec.y.shape[0] // tile.rows), tile.vectors * self.isa.lanes
        whole, tail = divmod(spec.channels, width)
        for row in f.range("rows", begin, end):
            at = item_addresses([*inputs, y], self._views(), row.divided(blocks))
            block = row.remainder(blocks)
            at = self._moved(at, block * tile.rows, 0)
            for panel in f.range("panel", first, last.at_most(whole)):
                self._rows(f, at, weights, constants, block, panel * width, width)
            if tail:
                with f.when(last.compare("ugt", whole)):
                    self._rows(f, at, weights, constants, block, last.like(whole * width), tail)

    def _rows(self, f: Function, at: list[Value], weights: Value, constants: Value, block: Value, start: Value,
              channels: int) -> None:
        """One block of output rows of one panel; the last block may have fewer."""
        spec, tile = self.spec, self.tile
        whole, tail = divmod(spec.y.shape[0], tile.rows)
        at = [a + start * view.size for a, view in zip(at, self._views(), strict=True)]
        weights = weights + start * (self._panel_bytes(1) // self.isa.lanes)
        constants = constants + start * (4 * spec.program.constants)
        for rows, test in ((tile.rows, block.below(whole)), (tail, block.compare("eq", whole))):
            if rows and (rows == tile.rows or whole):
                with f.when(test):
                    self._columns(f, at, weights, constants, rows, channels)

    def _columns(self, f: Function, at: list[Value], weights: Value, constants: Value, rows: int,
                 channels: int) -> None:
        for j, cols in f.tiles("column", self.spec.y.shape[1], self.tile.cols):
            x, *others = self._moved(at, 0, j)
            f.run(self._microkernel(rows, cols, channels), x, weights, constants, *others)

    def _views(self) -> tuple[View, ...]:
        return (*self.spec.inputs, self.spec.y)

    def _moved(self, at: list[Value], i: Value | int, j: Value | int) -> list[Value]:
        """At output pixel (i, j) from here."""
        f = at[0].f
        places = [p if isinstance(p, Value) else f.constant(p, "i64") for p in (i, j)]
        x, *others = at
        strides = [s * t for s, t in zip(self.spec.x.strides, self.spec.stride, strict=False)]
        return [offset(x, places, strides),
                *(offset(a, places, view.strides[:2]) for a, view in zip(others, self._views()[1:], strict=True))]

    def _panel_bytes(self, vectors: int) -> int:
        """Of weights."""
        vectors *= self.tile.packed_rows * self.groups * self.spec.taps[1]
        return vectors * self.arithmetic.weight_bytes(self.isa)

    # ---- the micro-kernel
    def _microkernel(self, rows: int, cols: int, channels: int) -> str:
        name = f"{self.name}_{rows}x{cols}x{channels}"
        if name in self.module.functions:
            return name
        spec, isa, arithmetic = self.spec, self.isa, self.arithmetic
        operands = {f"operand{i}": PTR for i in range(len(spec.operands))}
        f = self.module.function(name, True, x=PTR, w=PTR, constants=PTR, **operands, y=PTR)
        lanes = Lanes(isa, channels, spec.packed)
        outputs = [(i, j) for i in range(rows) for j in range(cols)]
        acc = {(o, v): arithmetic.zero(isa, f.parameters["x"]) for o in outputs for v in range(lanes.vectors)}
        if self.tile.by_tap:
            self._taps(f, lanes, acc, outputs)
            self._finish(f, lanes, acc, outputs)
            return name
        reads = sorted({j * spec.stride[1] + q * spec.dilation[1] for j in range(cols) for q in range(spec.taps[1])})
        ahead = 1 + self._loads_ahead(lanes.vectors, rows)
        loaded = [self._load(f, lanes, column, rows) for column in reads[:ahead - 1]]
        for number, column in enumerate(reads):
            f.write(f"; column {column}")
            loaded += [self._load(f, lanes, following, rows) for following in reads[number:][ahead - 1:ahead]]
            users = [(j, q) for j in range(cols) for q in range(spec.taps[1])
                     if j * spec.stride[1] + q * spec.dilation[1] == column]
            self._column(f, lanes, acc, loaded.pop(0), rows, users)
            for j, q in users:
                if q == spec.taps[1] - 1:
                    self._finish(f, lanes, acc, [(i, j) for i in range(rows)])
        return name

    def _taps(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]]) -> None:
        """One tap after the other into all outputs: as many sums that do not wait for each other as there are.

        x comes from memory with each product, so its address is hidden anew for each tap, or LLVM would keep what
        several taps read in registers and spill the sums.
        """
        spec, arithmetic = self.spec, self.arithmetic
        row, pixel, _ = spec.x.strides
        size = arithmetic.weight_bytes(self.isa)
        for q in range(spec.taps[1]):
            for p in range(spec.taps[0]):
                f.write(f"; tap ({p}, {q})")
                x = hidden(f.parameters["x"]) + (p * spec.dilation[0] * row + q * spec.dilation[1] * pixel)
                at = f.parameters["w"] + (p * spec.taps[1] + q) * lanes.vectors * size
                weights = [f.load(self.isa.floats, at + v * size, self.isa.bytes, "weights")
                           for v in range(lanes.vectors)]
                for i, j in outputs:
                    values = lanes.load(spec.x.dtype, x + (i * spec.stride[0] * row + j * spec.stride[1] * pixel))
                    for v, value in enumerate(values):
                        acc[(i, j), v] = self.isa.fma(value, weights[v], acc[(i, j), v])

    def _loads_ahead(self, vectors: int, rows: int) -> int:
        """Columns that are loaded and interleaved before their turn, if there are registers for one: from the load to
        the last store is a longer way than a processor looks ahead."""
        operands = self.groups * vectors * (self.isa.ready_bytes // self.isa.bytes if self.spec.packed else 1)
        return int(self.spec.sums(rows, vectors) + 2 * operands + 2 <= self.isa.registers)

    def _groups(self, rows: int) -> list[list[int]]:
        """The rows of x that `rows` output rows read, as they are loaded together."""
        read = self.spec.rows_read(rows)
        return [read[first:first + self.arithmetic.rows] for first in range(0, len(read), self.arithmetic.rows)]

    def _load(self, f: Function, lanes: Lanes, column: int, rows: int) -> list[list[Operand]]:
        """[group of rows][vector] of one column of x."""
        x = self.spec.x
        start = f.parameters["x"] + column * x.strides[1]
        return [self.arithmetic.load(lanes, x.dtype, [start + row * x.strides[0] for row in members])
                for members in self._groups(rows)]

    def _column(self, f: Function, lanes: Lanes, acc: dict[Any, Value], operands: list[list[Operand]], rows: int,
                users: list[tuple[int, int]]) -> None:
        """One column of x into the accumulators of the output columns and tap columns that meet there."""
        spec, isa, arithmetic = self.spec, self.isa, self.arithmetic
        # Hidden anew for each column, or LLVM would keep all weights in registers and spill the accumulators.
        weights, size = hidden(f.parameters["w"]), arithmetic.weight_bytes(isa)
        for group, (members, values) in enumerate(zip(self._groups(rows), operands, strict=True)):
            for i in range(rows):
                if spec.rows_read_by(i).isdisjoint(members):
                    continue
                for j, q in users:
                    at = ((i * self.groups + group) * spec.taps[1] + q) * lanes.vectors
                    for v in range(lanes.vectors):
                        acc[(i, j), v] = arithmetic.dot(isa, acc[(i, j), v], values[v], weights + (at + v) * size)

    def _finish(self, f: Function, lanes: Lanes, acc: dict[Any, Value], outputs: list[tuple[int, int]]) -> None:
        """Program and store. The outputs share each constant, which is loaded only when its vector's turn comes."""
        spec = self.spec
        constants = hidden(f.parameters["constants"])
        others, targets = [], []
        for i, j in outputs:
            at = [f.parameters[f"operand{n}"] + (i * view.strides[0] + j * view.strides[1])
                  for n, view in enumerate(spec.operands)]
            others.append([load_channels(lanes, view, a) for view, a in zip(spec.operands, at, strict=True)])
            targets.append(f.parameters["y"] + (i * spec.y.strides[0] + j * spec.y.strides[1]))
        pixels: list[list[Value]] = [[] for _ in outputs]
        for v in range(lanes.vectors):
            numbers = load_vector(lanes, constants, spec.program.constants, v)
            for output, operands, pixel in zip(outputs, others, pixels, strict=True):
                total = self.arithmetic.finish(self.isa, acc.pop((output, v)))
                pixel.append(spec.program.run(self.isa, total, [operand[v] for operand in operands], numbers))
        store_channels(lanes, spec.y, pixels, targets)
