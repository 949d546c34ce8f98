"""Loop and Scan: a body that runs again and again. A step has rows of sequences, and what the step before handed on;
what it makes beside that is stacked.

Most bodies gather rows of tensors from around and are one segment beside that. Such a body runs in place: its segment
is bound to a context, and what is copied from where to where is found out once for that context; a step copies a few
rows into the context's inputs, and runs it. Any other body is a region like others, with new values at each step.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import numpy as np

from engines.capacity import memory_limit
from engines.errors import PlanError
from engines.ir.dtypes import as_in_memory
from engines.ir.graph import Array, Node
from engines.plan.program import Instruction, Region

MOST_STEPS = 1 << 24        # of one Loop: it would run for ever, as the server's thread that runs it
MEMORY_SHARE = 0.25         # of this machine's, that its stacked outputs and its sequences may take
CHECKED = 256               # steps from check to check
ROOM = 16                   # steps that stacks have room for at first, where more are no few bytes
FEW_BYTES = 1 << 20
Value = Any                                     # an array, a list of them (a sequence), or None (an empty optional)


class Bound(Protocol):
    """A segment and the memory of its inputs and outputs, for as long as its shapes stay."""
    kept: Any       # what its borrower has made of it, for the next time; None at first

    @property
    def inputs(self) -> Mapping[str, Array]:
        """As they lie in memory; none for those that it has been specialised for."""

    @property
    def outputs(self) -> Mapping[str, Array]:
        """In the dtypes that they have by name."""

    def run(self) -> None: ...


class Segment(Protocol):
    """engines.runtime.program_engine.Segment."""

    def __call__(self, given: Sequence[Array]) -> Sequence[Array]: ...

    def bound(self, given: Sequence[Array]) -> AbstractContextManager[Bound]:
        """Lent to the caller; the inputs hold what is given."""


class Body(Protocol):
    @property
    def region(self) -> Region: ...
    @property
    def in_place(self) -> InPlace | None: ...
    def run(self, inputs: Sequence[Value], around: Mapping[str, Value]) -> list[Value]: ...


@dataclass
class Iteration:
    """The steps of one Loop or Scan.

    carried     what the first step begins with, then what the last one has made
    rows        tensors of which step i has element i
    limit       how many steps there are at most
    counted     a Loop: the body begins with the number of the step, and first makes whether there is another one
    stacks      what the steps have made for each stacked output: a list, or an array of all
    """
    node: Node
    carried: list[Value]
    rows: Sequence[Array] = ()
    limit: int | None = None
    counted: bool = False
    stacks: list[Value] = field(default_factory=list)

    def run(self, body: Body, around: Mapping[str, Value]) -> None:
        self.stacks = [[] for _ in body.region.outputs[self.counted + len(self.carried):]]
        try:
            if body.in_place is None or self.limit == 0 or not body.in_place.run(self, around):
                self._run_anew(body, around)
        except IndexError as error:
            raise PlanError(f"{self.node.op} '{self.node.name}': a step gathers a row that is not there ({error})"
                            ) from error

    def check(self, done: int) -> None:
        """Raises PlanError: after so many steps there is no end in sight, or no memory for what they make."""
        what = f"{self.node.op} '{self.node.name}'"
        if done >= MOST_STEPS:
            raise PlanError(f"{what} has not ended after {done} steps; of these inputs it may never end")
        sequences = [value for value in self.carried if isinstance(value, list)]
        if sum(map(_bytes, (*self.stacks, *sequences))) > MEMORY_SHARE * memory_limit():
            raise PlanError(f"{what}: what its first {done} steps have made takes more than {MEMORY_SHARE:.0%} of the "
                            "memory, and it has not ended")

    def _run_anew(self, body: Body, around: Mapping[str, Value]) -> None:
        kept = len(self.carried)
        for index in count():
            if index == self.limit:
                break
            if index % CHECKED == 0:
                self.check(index)
            head = (np.array(index, np.int64), np.array(True)) if self.counted else ()
            rows = (np.require(row[index], None, "C") for row in self.rows)
            made = body.run((*head, *self.carried, *rows), around)
            going = truth(made.pop(0), self.node) if self.counted else True
            self.carried = made[:kept]
            for stack, value in zip(self.stacks, made[kept:], strict=True):
                stack.append(value)
            if not going:
                break


def _bytes(values: Sequence[Value] | Array) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    return len(values) * values[-1].nbytes if values and isinstance(values[-1], np.ndarray) else 0


def truth(value: Array, node: Node) -> bool:
    if value.size != 1:
        raise PlanError(f"{node.op} '{node.name}': its condition is {value.dtype}{list(value.shape)}, not one truth")
    return bool(value.reshape(-1)[0])


@dataclass(frozen=True)
class _Gather:
    """A row of a tensor that stays, by a number among the body's inputs."""
    source: str
    index: str
    row: str


class InPlace:
    """A body that is one segment, behind Gathers of rows."""

    def __init__(self, region: Region, gathers: Sequence[_Gather], last: Instruction, segment: Segment,
                 constants: Mapping[str, Array]) -> None:
        self._region, self._gathers, self._last, self._segment = region, gathers, last, segment
        self._constants = constants

    @staticmethod
    def of(region: Region, segments: Sequence[Segment], constants: Mapping[str, Array]) -> InPlace | None:
        """The region as such a body; None: it is another one."""
        if not region.instructions:
            return None
        *first, last = region.instructions
        if last.op or any(one.op != "Gather" or one.node["attrs"].get("axis", 0) for one in first):
            return None
        gathers = [_Gather(*one.inputs, *one.outputs) for one in first]
        if any(gather.source in region.inputs or gather.index not in region.inputs for gather in gathers):
            return None
        if not {*last.outputs, *region.inputs, *(gather.row for gather in gathers)}.issuperset(region.outputs):
            return None
        return InPlace(region, gathers, last, segments[last.segment], constants)

    def run(self, steps: Iteration, around: Mapping[str, Value]) -> bool:
        """False: it cannot be run so, and nothing has happened."""
        if not all(isinstance(value, np.ndarray) for value in steps.carried) or not all(map(len, steps.rows)):
            return False
        values = dict(zip(self._region.inputs, (*(_FIRST if steps.counted else ()), *steps.carried,
                                                *(row[0, ...] for row in steps.rows)), strict=True))
        sources = [self._outer(gather.source, around) for gather in self._gathers]
        for gather, source in zip(self._gathers, sources, strict=True):
            if values[gather.index].ndim:
                return False
            values[gather.row] = source[values[gather.index].item(), ...]
        given = [values[name] if name in values else self._outer(name, around) for name in self._last.inputs]
        with self._segment.bound(given) as bound:
            if bound.kept is None or not bound.kept.begin(values):
                if any(name in values and name not in bound.inputs for name in self._last.inputs):
                    return False            # specialised for a value that changes
                bound.kept = self._repetition(steps, values, bound)
            return bound.kept is not None and bound.kept.run(steps, bound.run, [*sources, *steps.rows])

    def _outer(self, name: str, around: Mapping[str, Value]) -> Array:
        found: Array = around[name] if name in around else self._constants[name]
        return found

    def _repetition(self, steps: Iteration, values: Mapping[str, Array], bound: Bound) -> _Repetition | None:
        """The steps in the segment's memory, which holds these values; None: what they carry grows."""
        own = {name: np.array(as_in_memory(value)) for name, value in values.items() if name not in bound.inputs}
        places = {name: own[name] if name in own else bound.inputs[name] for name in values}
        made = {name: place.view(values[name].dtype) for name, place in places.items()} | dict(bound.outputs)
        formals, results = self._region.inputs[2 * steps.counted:], self._region.outputs[steps.counted:]
        kept = len(steps.carried)
        carries = [(places[name], as_in_memory(made[result]))
                   for name, result in zip(formals, results[:kept], strict=False)]
        going = made[self._region.outputs[0]] if steps.counted else None
        if going is not None and going.size != 1 or any(
                place.shape != source.shape or place.dtype != source.dtype for place, source in carries):
            return None
        number = self._region.inputs[0] if steps.counted else ""
        rows = [(places[gather.row], None if gather.index == number else places[gather.index])
                for gather in self._gathers]
        rows += [(places[name], None) for name in formals[kept:]]
        return _Repetition(own, carries, going, places[number] if number in {*bound.inputs, *results} else None, rows,
                           [made[name] for name in results[kept:]])


_FIRST = (np.array(0, np.int64), np.array(True))        # of a Loop: the number of the step, and that there is one


@dataclass(frozen=True)
class _Repetition:
    """What the steps in a segment's memory copy from where to where.

    own         of the values that a step begins with, those that the segment has no memory for
    carries     where a step reads a value, and where it makes it for the next one
    going       whether there is another step; None: they are as many as there are rows
    number      of the step, where it is read
    rows        where a step reads a row, and the number of that row; None: the step's
    stacked     what is kept of each step
    """
    own: Mapping[str, Array]
    carries: Sequence[tuple[Array, Array]]
    going: Array | None
    number: Array | None
    rows: Sequence[tuple[Array, Array | None]]
    stacked: Sequence[Array]

    @cached_property
    def apart(self) -> bool:
        """Whether values may be handed on one after the other."""
        return not any(np.may_share_memory(place, source) for place, _ in self.carries for _, source in self.carries)

    def begin(self, values: Mapping[str, Array]) -> bool:
        """Have what the first step begins with in `own`; False: it does not fit."""
        for name, place in self.own.items():
            value = as_in_memory(values[name])
            if value.shape != place.shape or value.dtype != place.dtype:
                return False
            place[...] = value
        return True

    def run(self, steps: Iteration, compute: Callable[[], None], sources: Sequence[Array]) -> bool:
        """compute: what the segment does with its memory. sources: what the rows are of."""
        apart, going, number, carries, limit = self.apart, self.going, self.number, self.carries, steps.limit
        rows = [(place, as_in_memory(source), index)
                for (place, index), source in zip(self.rows, sources, strict=True)]
        room = self._room(limit)
        stacks = [(np.empty((room, *value.shape), value.dtype), value) for value in self.stacked]
        for index in count(1):
            compute()
            for stack, value in stacks:
                stack[index - 1] = value
            ends = index == limit or going is not None and not going.item()     # before what it may have been read from
            for place, source in carries if apart else [(place, source.copy()) for place, source in carries]:
                place[...] = source
            if ends:
                break
            if index % CHECKED == 0:
                steps.stacks = [stack[:index] for stack, _ in stacks]
                steps.check(index)
            if index == room:
                stacks = [(np.concatenate((stack, np.empty_like(stack))), value) for stack, value in stacks]
                room *= 2
            if number is not None:
                number[...] = index
            for place, source, chosen in rows:
                place[...] = source[index if chosen is None else chosen.item()]
        steps.stacks = [stack if index == room else stack[:index].copy() for stack, _ in stacks]
        steps.carried = [place.copy().view(value.dtype)
                         for (place, _), value in zip(carries, steps.carried, strict=True)]
        return True

    def _room(self, limit: int | None) -> int:
        """Steps that stacks have room for at first."""
        most = FEW_BYTES // max(sum(value.nbytes for value in self.stacked), 1)
        return limit if limit is not None and limit <= most else ROOM
