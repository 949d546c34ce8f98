"""Nest programs: the computation of each element of a result in terms of the surrounding loops.

    y[i, j] = sum over k of a[i, k] * b[k, j]

        0: read f32 a       1: read f32 b       2: mul f32 (0, 1)       3: reduce f32 (2) sum       result: 3

A program is a list of operations that refer to earlier ones. It fixes neither vectors nor the order of loops. A *read*
is affine: its operand is a view over the loops, with a stride for each. A *pick* reads at computed indices. A *reduce*
is over all inner loops.

A *cycle* is a do-while loop: its steps repeat while a test holds. Within the steps a *phi* is the value before the
step: the start in the first iteration, then the previous step's. An *exit* is the value after the last step.

    0: start    1: phi i64 (0) cycle    2: the step, in terms of 1    3: the test, of 2    4: exit i64 (1, 2, 3) cycle

A step must not change values for which the test fails: the elements of a vector may iterate together.

The kind of an operation is its arithmetic: f32, f64, i32, i64, u64, or i1 for booleans. Integers wrap; narrower ones
are widened by reads and truncated by stores.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from infer_server.engines.ir.symbolic import as_int, is_symbolic, structure

Number = int | float | bool
# The kind that a stored dtype is computed in.
KINDS: Mapping[str, str] = {
    "float32": "f32", "float16": "f32", "bfloat16": "f32", "float64": "f64", "bool": "i1", "int8": "i32",
    "int16": "i32", "int32": "i32", "uint8": "i32", "uint16": "i32", "uint32": "i64", "int64": "i64", "uint64": "u64"}
FLOATING = ("f32", "f64")
ITEM = -1               # the loop over the items of a batch

# Operations whose result has the kind of their arguments, and those with a boolean result.
ARITHMETIC = ("add", "sub", "mul", "div", "max", "min", "mod", "rem", "and", "or", "xor", "shl", "shr", "neg", "abs",
              "invert", "sqrt", "floor", "ceil", "rint")
COMPARISONS = ("eq", "ne", "lt", "le")
# Kinds of reductions; the last four return the index of the extreme.
REDUCTIONS = ("sum", "product", "max", "min", "first_max", "last_max", "first_min", "last_min")


@dataclass(frozen=True)
class Operation:
    """Operation of a nest program.

    Attributes
    ----------
    op : str
        number, index, item, read, pick, reduce, phi, exit, cast, bits, where, a function of the epilogue, or one of
        ARITHMETIC and COMPARISONS.
    kind : str
        Kind of the result.
    args : tuple of int
        Numbers of the operations that it uses.
    what : number, str or None
        The number, loop, operand, kind of reduction, or cycle.
    """
    op: str
    kind: str
    args: tuple[int, ...] = ()
    what: Number | str | None = None

    def __str__(self) -> str:
        return " ".join(map(str, (self.op, self.kind, *self.args, *(() if self.what is None else (self.what,)))))


@dataclass(frozen=True)
class Cycle:
    """Cycle as numbers of operations.

    Attributes
    ----------
    phis, steps, exits : tuple of int
        One of each per value.
    test : int
        The condition to continue.
    body : tuple of int
        Operations that change between iterations.
    """
    phis: tuple[int, ...]
    steps: tuple[int, ...]
    test: int
    exits: tuple[int, ...]
    body: tuple[int, ...]


@dataclass(frozen=True)
class NestProgram:
    """Operations, and the numbers of those whose values are stored."""
    operations: tuple[Operation, ...]
    results: tuple[int, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.operations)) + f" -> {', '.join(map(str, self.results))}"

    def needed(self, roots: Collection[int]) -> set[int]:
        """Return the given operations and all that they depend on."""
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            if (one := waiting.pop()) not in found:
                found.add(one)
                waiting += self.operations[one].args
        return found

    @cached_property
    def cycles(self) -> Mapping[int, Cycle]:
        """Map the number of each cycle to its operations."""
        exits: dict[int, list[int]] = {}
        for number, one in enumerate(self.operations):
            if one.op == "exit":
                exits.setdefault(int(one.what or 0), []).append(number)
        return {cycle: self._cycle(numbers) for cycle, numbers in exits.items()}

    def _cycle(self, exits: Sequence[int]) -> Cycle:
        phis, steps, (test, *_) = zip(*(self.operations[one].args for one in exits), strict=True)
        varying = set(phis)
        for number in sorted(self.needed((*steps, test))):
            if varying.intersection(self.operations[number].args):
                varying.add(number)
        return Cycle(phis, steps, test, tuple(exits), tuple(sorted(varying.difference(phis))))

    @property
    def chased(self) -> set[int]:
        """Picks whose results are indices of other picks, such as nodes of trees."""
        picks = [number for number, one in enumerate(self.operations) if one.op == "pick"]
        return {one for number in picks for one in self.needed(self.operations[number].args).intersection(picks)}


@dataclass(frozen=True)
class Linear:
    """Index that is affine in the loops: offset + sum of coefficient * loop."""
    offset: int
    steps: tuple[tuple[int, int], ...] = ()     # (loop, coefficient), in order

    def plus(self, other: Linear, times: int = 1) -> Linear:
        steps = dict(self.steps)
        for loop, step in other.steps:
            steps[loop] = steps.get(loop, 0) + times * step
        return Linear(self.offset + times * other.offset, tuple(sorted((k, v) for k, v in steps.items() if v)))

    def times(self, factor: int) -> Linear:
        return Linear(self.offset * factor, tuple((loop, step * factor) for loop, step in self.steps if factor))


@dataclass(frozen=True, eq=False)
class Term:
    """Operation of a program under construction. Its operators append operations; they accept Terms or numbers."""
    writer: Writer = field(repr=False)
    number: int
    kind: str
    linear: Linear | None = None        # the affine function of the loops, if this i64 is one

    def binary(self, op: str, other: Term | Number, kind: str = "") -> Term:
        other = self.like(other)
        assert other.kind == self.kind, f"{op} of {self.kind} and {other.kind}"
        return self.writer.add(op, kind or self.kind, self, other)

    def like(self, other: Term | Number) -> Term:
        """Return `other` as a Term of this kind."""
        return other if isinstance(other, Term) else self.writer.constant(other, self.kind)

    def __add__(self, other: Term | Number) -> Term:
        other = self.like(other)
        if self.linear and other.linear:
            return self.writer.along(self.linear.plus(other.linear))
        return self.binary("add", other)

    def __sub__(self, other: Term | Number) -> Term:
        other = self.like(other)
        if self.linear and other.linear:
            return self.writer.along(self.linear.plus(other.linear, -1))
        return self.binary("sub", other)

    def __mul__(self, other: Term | Number) -> Term:
        other = self.like(other)
        for one, factor in ((self, other), (other, self)):
            if one.linear and factor.linear and not factor.linear.steps:
                return self.writer.along(one.linear.times(factor.linear.offset))
        return self.binary("mul", other)

    def __truediv__(self, other: Term | Number) -> Term:
        return self.binary("div", other)

    def __floordiv__(self, other: int) -> Term:
        """Divide a non-negative index."""
        return self if other == 1 else self.binary("div", other)

    def __mod__(self, other: Term | Number) -> Term:
        """Return the remainder with the sign of the divisor."""
        return self.binary("mod", other)

    def __neg__(self) -> Term:
        return self.writer.add("neg", self.kind, self)

    def __and__(self, other: Term | Number) -> Term:
        return self.binary("and", other)

    def __or__(self, other: Term | Number) -> Term:
        return self.binary("or", other)

    def __invert__(self) -> Term:
        return self.writer.add("invert", self.kind, self)

    def __lt__(self, other: Term | Number) -> Term:
        return self.binary("lt", other, "i1")

    def __le__(self, other: Term | Number) -> Term:
        return self.binary("le", other, "i1")

    def __gt__(self, other: Term | Number) -> Term:
        return self.like(other) < self

    def __ge__(self, other: Term | Number) -> Term:
        return self.like(other) <= self

    def equals(self, other: Term | Number) -> Term:
        return self.binary("eq", other, "i1")

    def differs(self, other: Term | Number) -> Term:
        return self.binary("ne", other, "i1")

    def at_least(self, other: Term | Number) -> Term:
        """Return the larger operand, `other` if this one is NaN."""
        return self.binary("max", other)

    def at_most(self, other: Term | Number) -> Term:
        return self.binary("min", other)

    def within(self, extent: int) -> Term:
        """Clamp to the indices of an axis."""
        return self.at_least(0).at_most(extent - 1)

    def unary(self, op: str) -> Term:
        return self.writer.add(op, self.kind, self)

    def to(self, kind: str) -> Term:
        """Convert to another kind; floats are truncated to integers."""
        return self if kind == self.kind else self.writer.add("cast", kind, self)

    def bits(self, kind: str) -> Term:
        """Reinterpret the bits as another kind."""
        return self.writer.add("bits", kind, self)


class Writer:
    """Builder of a nest program; equal operations are shared.

    Parameters
    ----------
    loops : sequence of int
        Extents of the outer loops, the axes of the result.
    reduced : sequence of int
        Extents of the inner loops.
    """

    def __init__(self, loops: Sequence[int], reduced: Sequence[int] = ()) -> None:
        self.loops, self.reduced = tuple(map(as_int, loops)), tuple(map(as_int, reduced))
        self._operations: list[Operation] = []
        self._numbers: dict[Hashable, int] = {}         # operation, or its structure -> its number
        self._cycles = 0

    # ---- numbers and indices
    def constant(self, number: Number, kind: str) -> Term:
        return self._add(Operation("number", kind, (), number), Linear(as_int(number)) if kind == "i64" else None)

    def index(self, loop: int) -> Term:
        return self.along(Linear(0, ((loop, 1),)))

    def along(self, linear: Linear) -> Term:
        """Return an affine index as a sum of its parts."""
        parts = [self._scaled(loop, step) for loop, step in linear.steps]
        if linear.offset or not parts:
            parts.append(self._add(Operation("number", "i64", (), linear.offset)))
        total, *others = parts
        for other in others:
            total = self.add("add", "i64", total, other)
        return Term(self, total.number, "i64", linear)

    def _scaled(self, loop: int, step: int) -> Term:
        one = self._add(Operation("item", "i64") if loop == ITEM else Operation("index", "i64", (), loop))
        return one if step == 1 else self.add("mul", "i64", one, self._add(Operation("number", "i64", (), step)))

    def bounds(self, term: Term) -> tuple[int, int] | None:
        """Return the bounds of an affine index, or None if it is not affine or includes the item."""
        if term.linear is None or any(loop == ITEM for loop, _ in term.linear.steps):
            return None
        extents = (*self.loops, *self.reduced)
        ends = [(extents[loop] - 1) * step for loop, step in term.linear.steps]
        offset = term.linear.offset
        return offset + sum(min(end, 0) for end in ends), offset + sum(max(end, 0) for end in ends)

    # ---- operations
    def add(self, op: str, kind: str, *args: Term) -> Term:
        return self._add(Operation(op, kind, tuple(arg.number for arg in args)))

    def read(self, operand: int, kind: str) -> Term:
        return self._add(Operation("read", kind, (), operand))

    def pick(self, operand: int, kind: str, indices: Sequence[Term]) -> Term:
        return self._add(Operation("pick", kind, tuple(index.number for index in indices), operand))

    def reduce(self, how: str, term: Term) -> Term:
        """Reduce over all inner loops. The index of an extreme is row-major over them."""
        return self._add(Operation("reduce", "i64" if "_" in how else term.kind, (term.number,), how))

    def repeat_while(self, starts: Sequence[Term], step: Callable[[list[Term]], list[Term]],
                     test: Callable[[list[Term]], Term]) -> list[Term]:
        """Repeat a step at least once, and as long as a test of its values holds.

        Parameters
        ----------
        starts: the values before the first step.
        step: writes one step of all values, without reductions. It must not change values that fail the test.
        test: writes the condition, an i1, for the values after a step.

        Returns
        -------
        The values after the last step, one for each start.
        """
        self._cycles += 1
        cycle = self._cycles
        phis = [self._add(Operation("phi", start.kind, (start.number,), cycle)) for start in starts]
        steps = step(phis)
        again = test(steps)
        return [self._add(Operation("exit", phi.kind, (phi.number, after.number, again.number), cycle))
                for phi, after in zip(phis, steps, strict=True)]

    def where(self, test: Term, a: Term | Number, b: Term | Number) -> Term:
        first = a if isinstance(a, Term) else b
        assert isinstance(first, Term), "two numbers to choose from are of no kind"
        return self.add("where", first.kind, test, first.like(a), first.like(b))

    def both(self, tests: Sequence[Term]) -> Term:
        """Return the conjunction of tests."""
        first, *others = tests
        for other in others:
            first = first & other
        return first

    def program(self, *results: Term) -> NestProgram:
        """Return the program for these results, with dead operations removed."""
        whole = NestProgram(tuple(self._operations), tuple(result.number for result in results))
        kept = sorted(whole.needed(whole.results))
        renumbered = {old: new for new, old in enumerate(kept)}
        operations = tuple(Operation(one.op, one.kind, tuple(renumbered[arg] for arg in one.args), one.what)
                           for one in (whole.operations[old] for old in kept))
        return NestProgram(operations, tuple(renumbered[result] for result in whole.results))

    def _add(self, operation: Operation, linear: Linear | None = None) -> Term:
        key = structure(operation) if is_symbolic(operation.what) else operation
        number = self._numbers.setdefault(key, len(self._operations))
        if number == len(self._operations):
            self._operations.append(operation)
        return Term(self, number, operation.kind, linear)


Formula = Callable[..., Term]
