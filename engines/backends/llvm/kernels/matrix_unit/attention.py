"""Attention on a matrix unit: both products by tile registers, the softmax between them by vectors.

    for head:                                   k' and v are packed once a call
      for block of queries:
        sums of the scores of 16 queries        tiles -> int32 or float32, in scratch
        for group of 16 queries:
          scores x, p, 1 / sum of p             by vectors; between its rows the sums of the next group, by tiles
          for panel of v:                       tiles -> scratch -> sums / sum of p -> program -> y

In INT8 the sums of scores begin with the terms of q's zero point: they are loaded into all rows of the accumulators.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.codegen.tiles import Tiles
from infer_server.engines.backends.llvm.kernels.common.access import offset
from infer_server.engines.backends.llvm.kernels.common.pixels import load_channels
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.backends.llvm.kernels.matmul import attention
from infer_server.engines.backends.llvm.kernels.matmul.attention import AttentionEmitter, AttentionKernel, Head
from infer_server.engines.backends.llvm.kernels.matmul.operands import Right, product_arithmetic
from infer_server.engines.backends.llvm.kernels.matmul.softmax import AttentionSoftmax
from infer_server.engines.backends.llvm.kernels.matrix_unit.factors import (
    LINE,
    ROWS,
    StoredSums,
    TileLeft,
    TileProduct,
    TileRight,
    instruction,
    pieces,
    tile_cycles,
)
from infer_server.engines.backends.llvm.kernels.matrix_unit.softmax import GroupSoftmax
from infer_server.engines.backends.llvm.kernels.rows.passes import RowVector
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I64, PTR
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.view import SIZES

LEAST_QUERIES = 5       # fewer rows leave most of a register empty
ACCUMULATORS = 4
# parameters of the softmax for the scores of the next group
WOVEN = {"mask": PTR, "q": PTR, "pitch": I64, "k": PTR, "start": PTR, "next": PTR, "ahead": I64}


@dataclass(frozen=True)
class AmxTiles(attention.Tiles):
    """Tactic of attention on a matrix unit: `scores` and `mix` are a register of queries by a panel."""

    def __str__(self) -> str:
        return f"amx block {self.block}"


@solves(Attention)
class MatrixUnitAttention(AttentionKernel):
    """Attention on a matrix unit; grid and constants are those of AttentionKernel."""

    def applies(self, isa: Isa) -> bool:
        return bool(instruction(self.problem.precision, isa))

    def tactics(self, isa: Isa) -> Sequence[AmxTiles]:
        problem = self.problem
        if not self.applies(isa) or problem.queries < LEAST_QUERIES:
            return ()
        scores, mix = (ROWS, 1), (ROWS, isa.vectors_for(problem.v.shape[-1]))
        return tuple(dict.fromkeys(AmxTiles(scores, mix, self._block(ROWS, n)) for n in (2, 1)))

    def cost(self, isa: Isa, tactic: attention.Tiles) -> float:
        """Return the cycles of both products; the softmax takes as long as that of AttentionKernel."""
        problem = self.problem
        size = SIZES[product_arithmetic(problem.precision, isa).dtype]
        queries, keys = problem.queries, problem.keys
        return problem.heads * (tile_cycles(queries, problem.q.shape[-1] * size, keys)
                                + tile_cycles(queries, keys * size, problem.v.shape[-1]))

    def emit(self, module: Module, name: str, isa: Isa, tactic: attention.Tiles) -> None:
        _TileAttentionEmitter(self.problem, module, name, isa, tactic).emit()


def _tiled(right: Right) -> TileRight:
    return TileRight(**{field.name: getattr(right, field.name) for field in fields(right)})


class _TileAttentionEmitter(AttentionEmitter):
    """Emitter of one kernel. Both products have registers of their own, so that it configures them once."""

    def __init__(self, problem: Attention, module: Module, name: str, isa: Isa, tiles: attention.Tiles) -> None:
        super().__init__(problem, module, name, isa, tiles)
        self.left = TileLeft(self.q.matrix, self.arithmetic, isa)
        rights = [_tiled(right) for right in (self.k, self.v)]
        self.k, self.v = rights
        # elements of a row of p that no softmax writes
        self.gap = rights[1].blocks.padded * self.arithmetic.elements - -(-problem.keys // isa.lanes) * isa.lanes
        self.by_keys, self.by_values = (TileProduct(right, instruction(problem.precision, isa), [a], [a + 1])
                                 for right, a in zip(rights, (ACCUMULATORS, ACCUMULATORS + 2), strict=True))

    def sizes(self) -> dict[str, int]:
        copied = ROWS if self.left.direct else -(-self.tiles.block // ROWS) * ROWS
        return super().sizes() | {
            "x": 2 * ROWS * self.pitch * 4, "p": ROWS * self.weight_pitch, "q": self.left.copied_bytes(copied),
            "peaks": ROWS * 4, "totals": ROWS * self.isa.bytes, "inverse": ROWS * 4,
            "added": ROWS * 4 * self.adds_zero, "sums": ROWS * self._sums_pitch}

    @property
    def _sums_pitch(self) -> int:
        """Return the bytes of a row of sums of the second product."""
        return self.v.vectors * LINE

    # ---- outer loops
    def enter(self, f: Function) -> None:
        """Configure the registers, and clear what the second product reads of p beyond the keys."""
        Tiles(f).configure({**self.by_keys.shapes(ACCUMULATORS), **self.by_values.shapes(ACCUMULATORS)})
        if not self.exact and (isinstance(self.gap, SymbolicInt) or self.gap > 0):
            size = f.constant(self.sizes()["p"], I64)
            for at in f.range("cleared", size.like(0), size, LINE):
                f.store(f.constant(0, self.isa.ints), self.at["p"] + at, LINE)

    def leave(self, f: Function) -> None:
        Tiles(f).release()

    def queries(self, f: Function, head: Head, first: Value, count: int) -> None:
        """Emit `count` queries from `first` on, in groups of 16; the scores of a group are made ahead."""
        whole, rest, copied = count // ROWS, count % ROWS, self.at["q"]
        source, direct = self.left.matrix.at(head.q, first, 0), self.left.direct
        if not direct:
            self.left.copy(source, count, copied, self.zeros[0])
        elif isinstance(rest, SymbolicInt) or rest:
            self.left.copy(source + (count - rest) * self.left.matrix.strides[0], rest, copied, self.zeros[0])
        complete, groups = f.constant(whole, I64), f.constant(-(-count // ROWS), I64)

        def rows_of(group: Value) -> tuple[Value, Value]:
            """Return the address of a group's rows, and their pitch."""
            pitch = f.constant(self.left.copied_pitch, I64)
            if not direct:
                return copied + group * (ROWS * self.left.copied_pitch), pitch
            here, whole_group = source + group * (ROWS * self.left.matrix.strides[0]), group.below(complete)
            return (f.select(whole_group, here, copied),
                    f.select(whole_group, pitch.like(self.left.matrix.strides[0]), pitch))

        start, units = self.at["start"], f.constant(self._units, I64)
        f.run(self._group_scores(), *rows_of(groups.like(0)), self.at["k"], start, self.at["x"], units)
        for group in f.range("group", groups.like(0), groups):
            following = group + 1
            ahead = f.select(following.below(groups), units, units.like(0))
            here = first + group * ROWS
            rows = (f.constant(count, I64) - group * ROWS).at_most(ROWS)
            f.run(self.softmax(**WOVEN), self._group(group), *self.softmax_arguments()[1:], rows,
                  self._mask_of(head, here), *rows_of(following), self.at["k"], start, self._group(following), ahead)
            with f.when(group.below(complete)):
                self._mix_of(f, head, here, ROWS)
            if isinstance(rest, SymbolicInt) or rest:
                with f.when(group.compare("eq", complete)):
                    self._mix_of(f, head, here, rest)

    @property
    def _units(self) -> int:
        """Return the registers of keys."""
        return -(-self.k.padded_columns // self.isa.lanes)

    def _group(self, number: Value) -> Value:
        """Return the address of the scores of a group: those of two groups are in memory."""
        return self.at["x"] + (number & 1) * (ROWS * 4 * self.pitch)

    def _mask_of(self, head: Head, query: Value) -> Value:
        """Return the address of a query's mask, or one that is not read."""
        mask = self.problem.mask
        return offset(head.mask, [query], mask.strides[-2:-1]) if mask and head.mask else self.numbers

    def _mix_of(self, f: Function, head: Head, first: Value, count: int) -> None:
        """Emit the weighted means of up to 16 queries."""
        problem = self.problem
        y = offset(head.y, [first], problem.y.strides[-2:-1])
        for e, columns in f.tiles("panel of values", problem.v.shape[-1], self.v.width):
            constants = self.constants + e * (4 * problem.program.constants)
            f.run(self._values(columns), self.at["p"], self.panel(self.v, head.v, "v", e), self.at["sums"])
            for start, size in pieces(f, count, ROWS):
                f.run(self._means(size, columns), self.at["sums"] + start * self._sums_pitch,
                      self.at["inverse"] + start * 4, self.at["added"] + start * 4, constants,
                      offset(y, [start], problem.y.strides[-2:-1]) + e * problem.y.strides[-1])

    # ---- the micro-kernels
    def _values(self, columns: int) -> str:
        """Return the name of the function that computes the sums of p by a panel of values."""
        name, f = self.function(f"values_{columns}", p=PTR, v=PTR, sums=PTR)
        if f is not None:
            p, v, sums = (f.parameters[key] for key in ("p", "v", "sums"))
            self.by_values.emit(p, self.weight_pitch, v, (1, columns), None, (sums, self._sums_pitch))
        return name

    def _group_scores(self) -> str:
        """Return the name of the function that computes the sums of the scores of a group."""
        name, f = self.function("scores", q=PTR, pitch=I64, k=PTR, start=PTR, x=PTR, units=I64)
        if f is not None:
            *addresses, units = f.parameters.values()
            for unit in f.range("unit", units.like(0), units):
                self._unit(addresses, unit)
        return name

    def _unit(self, addresses: Sequence[Value], unit: Value) -> None:
        """Emit the sums of 16 queries by 16 keys. addresses: of queries, their pitch, keys, start and sums."""
        q, pitch, k, start, x = addresses
        self.by_keys.emit(q, pitch, k + unit * self.k.panel_bytes, (1, self.isa.lanes),
                         start + unit * LINE if self.exact else None, (x + unit * LINE, 4 * self.pitch))

    def row_softmax(self) -> GroupSoftmax:
        return GroupSoftmax(**vars(super().row_softmax()))

    def weights(self, softmax: AttentionSoftmax, parameters: Mapping[str, Value]) -> None:
        """Emit p and its sums; before each row, a share of the next group's scores."""
        def each(row: Value) -> None:
            units = parameters["ahead"]
            for unit in row.f.range("ahead", (row * units).divided(ROWS), ((row + 1) * units).divided(ROWS)):
                self._unit([parameters[name] for name in ("q", "pitch", "k", "start", "next")], unit)

        x, peaks, p, totals, rows = (parameters[name] for name in ("x", "peaks", "p", "totals", "rows"))
        softmax.weights(x, peaks, p, totals, rows, each)

    def peaks(self, softmax: AttentionSoftmax, parameters: Mapping[str, Value]) -> None:
        """Emit the conversion of sums to scores, and the peaks of their rows."""
        isa, mask = self.isa, self.problem.mask
        x, peaks, totals, rows, numbers, masks = (
            parameters[name] for name in ("x", "peaks", "totals", "rows", "numbers", "mask"))
        scale = x.f.splat(x.f.load(FLOAT, numbers, hint="scale"), isa.lanes)
        type_ = isa.ints if self.exact else isa.floats

        def score(row: Value, at: RowVector) -> Value:
            address = x + row * (4 * self.pitch) + at.column * 4
            value = self.arithmetic.finish(isa, x.f.load(type_, address, isa.bytes, "sum"))
            if mask:
                lanes = Lanes(isa, at.lanes(isa), packed=False)
                added, = load_channels(lanes, mask, offset(masks, [row, at.column], mask.strides[-2:]))
                value = isa.fma(value, scale, added)
            else:
                value = value * scale
            x.f.store(value, address, isa.bytes)
            return value

        self.row_softmax().group_peaks(peaks, totals, rows, score)

    def _means(self, rows: int, columns: int) -> str:
        """Return the name of the function that computes y from the sums of a tile."""
        name, f = self.function(f"means_{rows}x{columns}", sums=PTR, inverse=PTR, added=PTR, constants=PTR, y=PTR)
        if f is not None:
            sums = StoredSums(self.isa, f.parameters["sums"], self._sums_pitch, (rows, columns), self.exact,
                              lambda m, value: self.arithmetic.finish(self.isa, value))
            self.means(Lanes(self.isa, columns, packed=False), rows, sums, f.parameters)
        return name
