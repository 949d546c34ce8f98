"""Programs of several passes over a row, for softmax, norms and reductions: vectorised along the innermost axis.

A row program is written as its definition: its passes are functions of one vector.

    peak = row.reduce("max", row.x)
    total = row.reduce("sum", lambda at: exp(row.x(at) - peak))
    row.store(lambda at: exp(row.x(at) - peak) / total)

`reduce_row` sums in the order that problems/rows.py lays down, whatever the lanes.
"""
from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import each_row, offset
from engines.backends.llvm.kernels.common.pixels import PANEL, load_channels, store_channels
from engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, Window, begin_kernel
from engines.codegen.extents import Extent
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.types import I1, I64, vector
from engines.lowering.epilogue.program import EpilogueProgram
from engines.lowering.problems.problem import Array
from engines.lowering.problems.rows import NEUTRAL, PARTIALS, RowProblem
from engines.lowering.problems.view import View, joined

R = TypeVar("R", bound=RowProblem)
STRANDS = 4             # vectors of a row whose instructions take turns, on their way to a reduction


@dataclass(frozen=True)
class At:
    """A vector of a row: its first column, and how many of its lanes are elements; where that is known at run time
    only, as many as this signed number has, and memory is read as if all of them were."""
    column: Value
    count: int | Value

    def lanes(self, isa: Isa) -> int:
        """How many are read."""
        return isa.lanes if isinstance(self.count, Value) else self.count


class Row:
    """One row: `x` is what the prologue makes of the sources, `store` runs the epilogue.

    scratch: float32 memory that outlives a pass, as many as the kernel asks for.
    """

    def __init__(self, f: Function, isa: Isa, problem: RowProblem, sources: list[Value], prologue: Value,
                 operands: list[Value], program: Value, y: Value, scratch: Value | None) -> None:
        self.f, self.isa, self.problem, self.width, self._scratch = f, isa, problem, problem.width, scratch
        self._sources, self._prologue, self._operands, self._program, self._y = sources, prologue, operands, program, y

    def x(self, at: At) -> Value:
        """float32 elements; lanes past the row hold nothing of meaning."""
        prologue, views = self.problem.prologue, self.problem.sources
        values = [self._load(view, source, at) for view, source in zip(views, self._sources, strict=True)]
        return prologue.run(self.isa, None, values, self._constants(prologue, self._prologue, at))

    def keep(self, value: Value, at: At, shift: int = 0) -> Value:
        """Remember a vector until a later pass asks for it, `shift` elements (whole vectors) further on."""
        self.f.store(value, self._kept_at(at, shift), self.isa.bytes)
        return value

    def kept(self, at: At, shift: int = 0) -> Value:
        whole = shift % self.isa.lanes == 0 and not isinstance(self.width, Extent)
        align = self.isa.bytes if whole else 4
        return self.f.load(self.isa.floats, self._kept_at(at, shift), align, "kept")

    def _kept_at(self, at: At, shift: int) -> Value:
        assert self._scratch is not None, f"{self.problem.family} has no scratch"
        return self._scratch + at.column * 4 + shift * 4

    def visit(self, body: Callable[[At], Value]) -> None:
        """A pass for what the body does by itself."""
        for _, places in strips(self.f, self.isa, self.width, 1, {}):
            for at in places:
                body(at)

    def store(self, body: Callable[[At], Value]) -> None:
        """y = program(body(at)), over the row."""
        for column, count in self.f.tiles("column", self.width, PANEL * self.isa.lanes, anyhow=True):
            lanes = Lanes(self.isa, count, packed=False)
            values = [self._finished(body(at), at) for at in vectors(self.isa, column, count)]
            values += values[:1] * (lanes.vectors - len(values))        # of three vectors, the fourth is not stored
            store_channels(lanes, self.problem.y, [values], [offset(self._y, [column], [self.problem.y.strides[-1]])])

    def store_one(self, value: Value) -> None:
        """y, one element, = program(value)."""
        result = self._finished(value, At(self._y.f.constant(0, "i64"), 1))
        store_channels(Lanes(self.isa, 1, packed=False), self.problem.y, [[result]], [self._y])

    def reduce(self, kind: str, body: Callable[[At], Value]) -> Value:
        """The sum, max or min of body over the row, in all lanes."""
        return reduce_row(self.f, self.isa, self.width, kind, body)

    def _finished(self, value: Value, at: At) -> Value:
        operands = [self._load(view, a, at) for view, a in zip(self.problem.operands, self._operands, strict=True)]
        program = self.problem.program
        return program.run(self.isa, value, operands, self._constants(program, self._program, at))

    def _load(self, view: View, address: Value, at: At) -> Value:
        lanes = Lanes(self.isa, at.lanes(self.isa), packed=False)
        return load_channels(lanes, view, offset(address, [at.column], [view.strides[-1]]))[0]

    def _constants(self, program: EpilogueProgram, address: Value, at: At) -> list[Value]:
        pitch = 4 * _pitch(self.problem.constants_width)
        place = address + (at.column * 4 if self.problem.constants_width > 1 else 0)
        return [self.f.load(self.isa.floats, place + c * pitch, self.isa.bytes, "constant")
                for c in range(program.constants)]


def reduce_row(f: Function, isa: Isa, width: int, kind: str, body: Callable[[At], Value]) -> Value:
    """The sum, max or min of body over `width` elements, in all lanes."""
    neutral = f.constant(NEUTRAL[kind], isa.floats)
    partial = dict.fromkeys(range(PARTIALS // isa.lanes), neutral)
    for start, places in strips(f, isa, width, STRANDS, partial):
        for first in range(0, len(places), STRANDS):
            values = []
            with f.interleaved(STRANDS) as begin:
                for at in places[first:first + STRANDS]:
                    begin()
                    values.append(live(isa, body(at), at.count, NEUTRAL[kind]))
            for i, value in enumerate(values, start + first):
                partial[i] = combine(isa, kind, partial[i], value)
    values = list(partial.values())
    while len(values) > 1:
        half = len(values) // 2
        values = [combine(isa, kind, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
    return across_lanes(isa, kind, values[0])


def strips(f: Function, isa: Isa, width: int, together: int,
           carried: dict[Any, Value]) -> Iterator[tuple[int, list[At]]]:
    """A row's vectors, as many as PARTIALS elements fill, in a loop; then those that are left: (the number among them
    of the first, vectors). Where how many are left is known at run time only, so many `together` as there are."""
    step = PARTIALS // isa.lanes
    if not isinstance(width, Extent):
        for column, count in f.tiles("column", width, PARTIALS, carried=carried):
            yield 0, vectors(isa, column, count)
        return
    rest = f.constant(width % PARTIALS, I64)
    end = f.constant(width, I64) - rest
    for column in f.range("column", end.like(0), end, PARTIALS, carried=carried):
        yield 0, vectors(isa, column, PARTIALS)
    for first in range(0, step, together):
        with f.chosen(rest.compare("ugt", first * isa.lanes), carried):
            some = range(first, min(first + together, step))
            yield first, [At(end + i * isa.lanes, rest - i * isa.lanes) for i in some]


def across_lanes(isa: Isa, kind: str, result: Value) -> Value:
    """The sum, max or min of the lanes, in all of them; of int32 the sum."""
    distance = isa.lanes // 2
    while distance:
        others = result.f.shuffle(result, None, [i ^ distance for i in range(isa.lanes)], "others")
        result = combine(isa, kind, result, others)
        distance //= 2
    return result


def vectors(isa: Isa, column: Value, count: int) -> list[At]:
    """`count` elements from a column on, by vectors."""
    return [At(column + first, min(isa.lanes, count - first)) for first in range(0, count, isa.lanes)]


def live(isa: Isa, value: Value, count: int | Value, neutral: float) -> Value:
    """The value, neutral in the lanes from `count` on."""
    if isinstance(count, Value):
        f, lanes = value.f, vector(isa.lanes, I64)
        places = Value(f, lanes, f"<{', '.join(f'{I64} {lane}' for lane in range(isa.lanes))}>")
        return f.select(places.compare("slt", f.splat(count, isa.lanes)), value, value.like(neutral))
    if count == isa.lanes:
        return value
    mask = ", ".join(f"{I1} {int(lane < count)}" for lane in range(isa.lanes))
    return value.f.select(Value(value.f, vector(isa.lanes, I1), f"<{mask}>"), value, value.like(neutral))


def combine(isa: Isa, kind: str, a: Value, b: Value) -> Value:
    return a + b if kind == "sum" else isa.max(a, b) if kind == "max" else isa.min(a, b)


class OverRows(Kernel[R]):
    """A row of the grid is one of the problem's."""

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.sources[0].shape[:-1]))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        problem, shape = self.problem, self.problem.sources[0].shape
        if len(shape) == 1:
            return super().windows(isa, tactic)
        return [Window.along(view, rows=math.prod(shape[1:-1])) for view in (*problem.inputs, problem.y)]

    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """-> the prologue's and the program's, each [constant][index], rounded up to whole vectors."""
        return tuple(self._table(constants.get(key, ())) for key in ("prologue", "program"))

    def _table(self, constants: Sequence[Array]) -> Array:
        width = self.problem.constants_width
        table = np.zeros((len(constants), _pitch(width)), np.float32)
        for row, constant in zip(table, constants, strict=True):
            row[:None if width == 1 else width] = constant
        return table.ravel()


class RowKernel(OverRows[R]):
    """Computes a row by the passes of `emit_row`."""

    @property
    def scratch(self) -> int:
        """Elements of a row that it keeps from one pass to another."""
        return 0

    @abstractmethod
    def emit_row(self, row: Row) -> None:
        """The passes over one row."""

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(problem.inputs) + 3)
        *inputs, prologue, program, y = addresses
        rows = [_row_view(view, problem.width) for view in (*problem.inputs, problem.y)]
        views = joined(rows, keep_last=True)
        scratch = None
        if self.scratch:    # in the entry block: elsewhere the stack would grow with each row
            scratch = f.room(4 * _pitch(self.scratch) + ALIGNMENT, ALIGNMENT, "scratch")
        split = len(problem.sources)
        for *starts, target in each_row(f, begin, end, [*inputs, y], views, views[0].shape[:-1]):
            self.emit_row(Row(f, isa, problem, starts[:split], prologue, starts[split:], program, target, scratch))


def _row_view(view: View, width: int) -> View:
    """One element a row, repeated: so that all views have one shape."""
    if view.shape[-1] == width:
        return view
    return View(view.dtype, (*view.shape[:-1], width), (*view.strides[:-1], 0), view.item)


def _pitch(width: int) -> int:
    """Floats from one constant to the next."""
    return -(-width // PARTIALS) * PARTIALS
