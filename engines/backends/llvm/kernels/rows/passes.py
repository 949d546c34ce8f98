"""Framework of kernels that make several passes over a row (softmax, norms, reductions), vectorised along it.

A row program is written like its definition, with passes as functions of one vector:

    peak = row.reduce("max", row.x)
    total = row.reduce("sum", lambda at: exp(row.x(at) - peak))
    row.store(lambda at: exp(row.x(at) - peak) / total)

`reduce_row` sums in the order that problems/rows.py defines, on every vector width.
"""
from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import each_row, offset
from infer_server.engines.backends.llvm.kernels.common.pixels import PANEL, load_channels, store_channels
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, Window, begin_kernel
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I1, I64, overload, vector
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.rows import NEUTRAL, PARTIALS, RowProblem
from infer_server.engines.lowering.problems.view import View, joined

R = TypeVar("R", bound=RowProblem)
STRANDS = 4             # vectors of a row whose instructions are interleaved before a reduction
READ_TOGETHER = 32      # elements of a symbolic rest that are read at a time, so that reads end in a buffer's SLACK


@dataclass(frozen=True)
class RowVector:
    """Position of a vector in a row: its first column and the number of its lanes that are elements.

    A run-time count is signed and may exceed the lanes or be negative; memory is then read as if all lanes were
    elements.
    """
    column: Value
    count: int | Value

    def lanes(self, isa: Isa) -> int:
        """Return the number of lanes that are read."""
        return isa.lanes if isinstance(self.count, Value) else self.count


class RowCode:
    """One row: `x` loads and runs the prologue, `store` runs the epilogue.

    scratch: float32 memory that outlives a pass, of the size that the kernel declares.
    """

    def __init__(self, f: Function, isa: Isa, problem: RowProblem, sources: list[Value], prologue: Value,
                 operands: list[Value], program: Value, y: Value, scratch: Value | None,
                 others: Sequence[Value] = ()) -> None:
        """others: addresses of the problem's outputs after y."""
        self.f, self.isa, self.problem, self.width, self._scratch = f, isa, problem, problem.width, scratch
        self.others = others
        self._sources, self._prologue, self._operands, self._program, self._y = sources, prologue, operands, program, y

    def then(self, problem: RowProblem) -> RowCode:
        """Return the code of a problem that reads the row which was stored as y, and writes the outputs after y.

        The problem has neither constants nor operands. A symbolic width becomes a number: past the end of y there may
        be no memory that can be read.
        """
        return RowCode.bare(self.f, self.isa, problem, self._y, self.others)

    @staticmethod
    def bare(f: Function, isa: Isa, problem: RowProblem, x: Value, outputs: Sequence[Value]) -> RowCode:
        """Return the code of a problem without constants and operands, with a number as its width (see `then`)."""
        y, *others = outputs
        code = RowCode(f, isa, problem, [x], x, [], x, y, None, others)     # no constants are read at x
        code.width = operator.index(code.width)
        return code

    def x(self, at: RowVector) -> Value:
        """Return float32 elements; lanes past the row are undefined."""
        prologue, views = self.problem.prologue, self.problem.sources
        values = [self._load(view, source, at) for view, source in zip(views, self._sources, strict=True)]
        return prologue.run(self.isa, None, values, self._constants(prologue, self._prologue, at))

    def save(self, value: Value, at: RowVector, shift: int = 0) -> Value:
        """Store a vector in scratch for a later pass, `shift` elements (whole vectors) further on."""
        self.f.store(value, self._scratch_address(at, shift), self.isa.bytes)
        return value

    def load_saved(self, at: RowVector, shift: int = 0) -> Value:
        """Load a vector that `save` stored."""
        whole = shift % self.isa.lanes == 0 and not isinstance(self.width, SymbolicInt)
        align = self.isa.bytes if whole else 4
        return self.f.load(self.isa.floats, self._scratch_address(at, shift), align, "kept")

    def _scratch_address(self, at: RowVector, shift: int) -> Value:
        assert self._scratch is not None, f"{self.problem.family} has no scratch"
        return self._scratch + at.column * 4 + shift * 4

    def visit(self, body: Callable[[RowVector], Value]) -> None:
        """Run a pass whose body has its own effects."""
        for _, vectors in strips(self.f, self.isa, self.width, 1, {}):
            for at in vectors:
                body(at)

    def store(self, body: Callable[[RowVector], Value]) -> None:
        """Store y = program(body(at)) over the row."""
        for column, count in self.f.tiles("column", self.width, PANEL * self.isa.lanes, split_tail=True):
            lanes = Lanes(self.isa, count, packed=False)
            values = [self._finished(body(at), at) for at in vectors(self.isa, column, count)]
            values += values[:1] * (lanes.vectors - len(values))        # pad three vectors to four; it is not stored
            store_channels(lanes, self.problem.y, [values], [offset(self._y, [column], [self.problem.y.strides[-1]])])

    def store_one(self, value: Value) -> None:
        """Store y = program(value), one element."""
        result = self._finished(value, RowVector(self._y.f.constant(0, "i64"), 1))
        store_channels(Lanes(self.isa, 1, packed=False), self.problem.y, [[result]], [self._y])

    def reduce(self, kind: str, body: Callable[[RowVector], Value]) -> Value:
        """Return the sum, max or min of body over the row, in all lanes."""
        return reduce_row(self.f, self.isa, self.width, kind, body)

    def _finished(self, value: Value, at: RowVector) -> Value:
        operands = [self._load(view, a, at) for view, a in zip(self.problem.operands, self._operands, strict=True)]
        program = self.problem.program
        return program.run(self.isa, value, operands, self._constants(program, self._program, at))

    def _load(self, view: View, address: Value, at: RowVector) -> Value:
        lanes = Lanes(self.isa, at.lanes(self.isa), packed=False)
        return load_channels(lanes, view, offset(address, [at.column], [view.strides[-1]]))[0]

    def _constants(self, program: EpilogueProgram, address: Value, at: RowVector) -> list[Value]:
        pitch = 4 * _pitch(self.problem.constants_width)
        address = address + (at.column * 4 if self.problem.constants_width > 1 else 0)
        align = 4 if isinstance(self.width, SymbolicInt) else self.isa.bytes      # the tail of a symbolic row is narrow
        return [self.f.load(self.isa.floats, address + c * pitch, align, "constant") for c in range(program.constants)]


def reduce_row(f: Function, isa: Isa, width: int, kind: str, body: Callable[[RowVector], Value]) -> Value:
    """Return the sum, max or min of body over `width` elements, in all lanes."""
    return across_lanes(isa, kind, reduce_vectors(f, isa, width, kind, body))


def reduce_vectors(f: Function, isa: Isa, width: int, kind: str, body: Callable[[RowVector], Value]) -> Value:
    """Return the partial results of each lane."""
    neutral, together = f.constant(NEUTRAL[kind], isa.floats), min(STRANDS, READ_TOGETHER // isa.lanes)
    partial = dict.fromkeys(range(PARTIALS // isa.lanes), neutral)
    for start, vectors in strips(f, isa, width, together, partial):
        for first in range(0, len(vectors), STRANDS):
            values = []
            with f.interleaved(STRANDS) as begin:
                for at in vectors[first:first + STRANDS]:
                    begin()
                    values.append(live(isa, body(at), at.count, NEUTRAL[kind]))
            for i, value in enumerate(values, start + first):
                partial[i] = combine(isa, kind, partial[i], value)
    values = list(partial.values())
    while len(values) > 1:
        half = len(values) // 2
        values = [combine(isa, kind, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def strips(f: Function, isa: Isa, width: int, together: int,
           carried: dict[Any, Value]) -> Iterator[tuple[int, list[RowVector]]]:
    """Yield (number of the first vector, vectors) in a loop over strips of PARTIALS elements, then for the rest.

    If the rest is symbolic, it is yielded as groups of `together` vectors, in code that runs if the group has elements.
    """
    step = PARTIALS // isa.lanes
    if not isinstance(width, SymbolicInt):
        for column, count in f.tiles("column", width, PARTIALS, carried=carried):
            yield 0, vectors(isa, column, count)
        return
    rest = f.constant(width % PARTIALS, I64)
    end = f.constant(width, I64) - rest
    for column in f.range("column", end.like(0), end, PARTIALS, carried=carried):
        yield 0, vectors(isa, column, PARTIALS)
    for first in range(0, step, together):
        with f.when_carrying(rest.compare("ugt", first * isa.lanes), carried):
            some = range(first, min(first + together, step))
            yield first, [RowVector(end + i * isa.lanes, rest - i * isa.lanes) for i in some]


def across_lanes(isa: Isa, kind: str, result: Value) -> Value:
    """Return the sum, max or min of the lanes, in all lanes; for int32 only the sum."""
    distance = isa.lanes // 2
    while distance:
        others = result.f.shuffle(result, None, [i ^ distance for i in range(isa.lanes)], "others")
        result = combine(isa, kind, result, others)
        distance //= 2
    return result


def vectors(isa: Isa, column: Value, count: int) -> list[RowVector]:
    """Return `count` elements from a column on, as vectors."""
    return [RowVector(column + first, min(isa.lanes, count - first)) for first in range(0, count, isa.lanes)]


def live(isa: Isa, value: Value, count: int | Value, neutral: float) -> Value:
    """Replace the lanes from `count` on by the neutral element."""
    if isinstance(count, Value):
        f, lanes = value.f, vector(isa.lanes, I64)
        vectors = Value(f, lanes, f"<{', '.join(f'{I64} {lane}' for lane in range(isa.lanes))}>")
        return f.select(vectors.compare("slt", f.splat(count, isa.lanes)), value, value.like(neutral))
    if count == isa.lanes:
        return value
    mask = ", ".join(f"{I1} {int(lane < count)}" for lane in range(isa.lanes))
    return value.f.select(Value(value.f, vector(isa.lanes, I1), f"<{mask}>"), value, value.like(neutral))


def combine(isa: Isa, kind: str, a: Value, b: Value) -> Value:
    if kind == "largest":
        ints = a.f.call(isa.ints, f"llvm.smax.{overload(isa.ints)}", isa.bits(a), isa.bits(b), hint="largest")
        return isa.from_bits(ints)
    return a + b if kind == "sum" else isa.max(a, b) if kind == "max" else isa.min(a, b)


class OverRows(Kernel[R]):
    """Base class of kernels whose grid rows are the problem's rows."""

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.sources[0].shape[:-1]))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        problem, shape = self.problem, self.problem.sources[0].shape
        if len(shape) == 1:
            return super().windows(isa, tactic)
        return [Window.along(view, rows=math.prod(shape[1:-1])) for view in (*problem.inputs, *problem.outputs)]

    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Pack the constants of prologue and program, each as [constant][index], rounded up to whole vectors."""
        return tuple(self._table(constants.get(key, ())) for key in ("prologue", "program"))

    def _table(self, constants: Sequence[Array]) -> Array:
        width = self.problem.constants_width
        table = np.zeros((len(constants), _pitch(width)), np.float32)
        for row, constant in zip(table, constants, strict=True):
            row[:None if width == 1 else width] = constant
        return table.ravel()


class RowKernel(OverRows[R]):
    """Base class of kernels that compute a row by the passes of `emit_row`."""

    @property
    def scratch(self) -> int:
        """Return the elements of a row that are kept from one pass to another."""
        return 0

    @abstractmethod
    def emit_row(self, row: RowCode) -> None:
        """Emit the passes over one row."""

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        tensors, count = (*problem.inputs, *problem.outputs), len(problem.inputs)
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(tensors) + 2)
        prologue, program = addresses[count:count + 2]
        views = joined([_row_view(view, problem.width) for view in tensors], keep_last=True)
        scratch = None
        if self.scratch:    # allocated in the entry block; in the loop the stack would grow with each row
            scratch = f.alloca(4 * _pitch(self.scratch) + ALIGNMENT, ALIGNMENT, "scratch")
        split, ends = len(problem.sources), addresses[:count] + addresses[count + 2:]
        for starts in each_row(f, begin, end, ends, views, views[0].shape[:-1]):
            self.emit_row(RowCode(f, isa, problem, starts[:split], prologue, starts[split:count], program,
                                  starts[count], scratch, starts[count + 1:]))


def _row_view(view: View, width: int) -> View:
    """Broadcast a view with one element per row to the width of the row."""
    if view.shape[-1] == width:
        return view
    return View(view.dtype, (*view.shape[:-1], width), (*view.strides[:-1], 0), view.item)


def _pitch(width: int) -> int:
    """Return the floats from one constant to the next."""
    return -(-width // PARTIALS) * PARTIALS
