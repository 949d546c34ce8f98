"""Execution of the bodies of Loop and Scan, with loop-carried values, scan inputs and stacked scan outputs.

Most bodies consist of Gathers of rows of outer tensors and one segment. Such a segment is bound
to a context, and the copies between its arrays are determined once for that context; a step copies a few rows to the
context's inputs and runs it. Any other body is interpreted as a region, with new values at each step.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import numpy as np

from infer_server.engines.capacity import memory_limit
from infer_server.engines.errors import PlanError
from infer_server.engines.ir.dtypes import as_in_memory
from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.plan.program import Instruction, Region

MOST_STEPS = 1 << 24        # maximum steps of one Loop, so that an endless one does not block a thread forever
MEMORY_SHARE = 0.25         # share of this machine's memory that stacked outputs and sequences may take
CHECKED = 256               # steps between checks of these limits
INITIAL_CAPACITY = 16       # steps that stacks have space for at first, if all steps exceed FEW_BYTES or are unknown
FEW_BYTES = 1 << 20
Value = Any                                     # an array, a list of them (a sequence), or None (an empty optional)


class Bound(Protocol):
    """Interface of a segment bound to arrays for its inputs and outputs, valid for one set of shapes."""
    kept: Any       # cache of the borrower; None at first

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Arrays of the inputs in the dtypes of memory; inputs specialised by value have none."""

    @property
    def outputs(self) -> Mapping[str, Array]:
        """Arrays of the outputs in their declared dtypes."""

    def run(self) -> None: ...


class Segment(Protocol):
    """Interface of infer_server.engines.runtime.program.Dispatcher."""

    def __call__(self, inputs: Sequence[Array]) -> Sequence[Array]: ...

    def bound(self, inputs: Sequence[Array]) -> AbstractContextManager[Bound]:
        """Yield the segment bound to arrays, of which the inputs hold these values."""


class Body(Protocol):
    @property
    def region(self) -> Region: ...
    @property
    def bound_body(self) -> BoundBody | None: ...
    def run(self, inputs: Sequence[Value], around: Mapping[str, Value]) -> list[Value]: ...


@dataclass
class Iteration:
    """Steps of one Loop or Scan.

    carried     loop-carried values: the initial ones, then those of the last step
    rows        scan inputs: step i reads element i
    limit       maximum number of steps; None: unlimited
    counted     True for a Loop: the body's first inputs are the step and the condition, its first output the condition
    stacks      values of all steps for each scan output, as a list or an array
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
            if body.bound_body is None or self.limit == 0 or not body.bound_body.run(self, around):
                self._run_anew(body, around)
        except IndexError as error:
            raise PlanError(f"{self.node.op} '{self.node.name}': a step gathers a row that is not there ({error})"
                            ) from error

    def check(self, done: int) -> None:
        """Raise PlanError if the steps or the memory of their results exceed the limits."""
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
            results = body.run((*head, *self.carried, *rows), around)
            going = truth(results.pop(0), self.node) if self.counted else True
            self.carried = results[:kept]
            for stack, value in zip(self.stacks, results[kept:], strict=True):
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
    """Gather of a row of an outer tensor at an index that is an input of the body."""
    source: str
    index: str
    row: str


class BoundBody:
    """Body that consists of Gathers of rows and one segment."""

    def __init__(self, region: Region, gathers: Sequence[_Gather], last: Instruction, segment: Segment,
                 constants: Mapping[str, Array]) -> None:
        self._region, self._gathers, self._last, self._segment = region, gathers, last, segment
        self._constants = constants

    @staticmethod
    def of(region: Region, segments: Sequence[Segment], constants: Mapping[str, Array]) -> BoundBody | None:
        """Return the region as such a body; None if it has another form."""
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
        return BoundBody(region, gathers, last, segments[last.segment], constants)

    def run(self, steps: Iteration, around: Mapping[str, Value]) -> bool:
        """Run all steps on the bound arrays; return False without any effect if that is not possible."""
        if not all(isinstance(value, np.ndarray) for value in steps.carried) or not all(map(len, steps.rows)):
            return False
        values = dict(zip(self._region.inputs, (*(_FIRST if steps.counted else ()), *steps.carried,
                                                *(row[0, ...] for row in steps.rows)), strict=True))
        sources = [self._outer(gather.source, around) for gather in self._gathers]
        for gather, source in zip(self._gathers, sources, strict=True):
            if values[gather.index].ndim:
                return False
            values[gather.row] = source[values[gather.index].item(), ...]
        inputs = [values[name] if name in values else self._outer(name, around) for name in self._last.inputs]
        with self._segment.bound(inputs) as bound:
            if bound.kept is None or not bound.kept.begin(values):
                if any(name in values and name not in bound.inputs for name in self._last.inputs):
                    return False            # specialised for a value that changes
                bound.kept = self._repetition(steps, values, bound)
            return bound.kept is not None and bound.kept.run(steps, bound.run, [*sources, *steps.rows])

    def _outer(self, name: str, around: Mapping[str, Value]) -> Array:
        found: Array = around[name] if name in around else self._constants[name]
        return found

    def _repetition(self, steps: Iteration, values: Mapping[str, Array], bound: Bound) -> _Repetition | None:
        """Return the copies between steps for a bound segment; None if carried values change their shape or dtype."""
        own = {name: np.array(as_in_memory(value)) for name, value in values.items() if name not in bound.inputs}
        arrays = {name: own[name] if name in own else bound.inputs[name] for name in values}
        tensors = {name: array.view(values[name].dtype) for name, array in arrays.items()} | dict(bound.outputs)
        formals, results = self._region.inputs[2 * steps.counted:], self._region.outputs[steps.counted:]
        kept = len(steps.carried)
        carries = [(arrays[name], as_in_memory(tensors[result]))
                   for name, result in zip(formals, results[:kept], strict=False)]
        going = tensors[self._region.outputs[0]] if steps.counted else None
        if going is not None and going.size != 1 or any(
                array.shape != source.shape or array.dtype != source.dtype for array, source in carries):
            return None
        number = self._region.inputs[0] if steps.counted else ""
        rows = [(arrays[gather.row], None if gather.index == number else arrays[gather.index])
                for gather in self._gathers]
        rows += [(arrays[name], None) for name in formals[kept:]]
        return _Repetition(own, carries, going, arrays[number] if number in {*bound.inputs, *results} else None, rows,
                           [tensors[name] for name in results[kept:]])


_FIRST = (np.array(0, np.int64), np.array(True))        # a Loop's first step and condition


@dataclass(frozen=True)
class _Repetition:
    """Copies between the arrays of a bound segment from step to step.

    own         arrays for inputs of the body that are no inputs of the segment
    carries     (input, output) arrays of each loop-carried value
    going       array of the condition; None: there is a step for each row
    number      array of the step; None if it is not read
    rows        array of each row and that of its index; None: the index is the step
    stacked     arrays of the scan outputs
    """
    own: Mapping[str, Array]
    carries: Sequence[tuple[Array, Array]]
    going: Array | None
    number: Array | None
    rows: Sequence[tuple[Array, Array | None]]
    stacked: Sequence[Array]

    @cached_property
    def apart(self) -> bool:
        """True if inputs and outputs of carried values do not overlap, so that they can be copied one by one."""
        return not any(np.may_share_memory(array, source) for array, _ in self.carries for _, source in self.carries)

    def begin(self, values: Mapping[str, Array]) -> bool:
        """Copy initial values to `own`; return False if a shape or dtype differs."""
        for name, array in self.own.items():
            value = as_in_memory(values[name])
            if value.shape != array.shape or value.dtype != array.dtype:
                return False
            array[...] = value
        return True

    def run(self, steps: Iteration, compute: Callable[[], None], sources: Sequence[Array]) -> bool:
        """Run all steps. compute: runs the bound segment. sources: tensors of the rows."""
        apart, going, number, carries, limit = self.apart, self.going, self.number, self.carries, steps.limit
        rows = [(array, as_in_memory(source), index)
                for (array, index), source in zip(self.rows, sources, strict=True)]
        capacity = self._initial_capacity(limit)
        stacks = [(np.empty((capacity, *value.shape), value.dtype), value) for value in self.stacked]
        for index in count(1):
            compute()
            for stack, value in stacks:
                stack[index - 1] = value
            ends = index == limit or going is not None and not going.item()     # read before the copies overwrite it
            for array, source in carries if apart else [(array, source.copy()) for array, source in carries]:
                array[...] = source
            if ends:
                break
            if index % CHECKED == 0:
                steps.stacks = [stack[:index] for stack, _ in stacks]
                steps.check(index)
            if index == capacity:
                stacks = [(np.concatenate((stack, np.empty_like(stack))), value) for stack, value in stacks]
                capacity *= 2
            if number is not None:
                number[...] = index
            for array, source, chosen in rows:
                array[...] = source[index if chosen is None else chosen.item()]
        steps.stacks = [stack if index == capacity else stack[:index].copy() for stack, _ in stacks]
        steps.carried = [array.copy().view(value.dtype)
                         for (array, _), value in zip(carries, steps.carried, strict=True)]
        return True

    def _initial_capacity(self, limit: int | None) -> int:
        """Return the initial capacity of stacks in steps."""
        most = FEW_BYTES // max(sum(value.nbytes for value in self.stacked), 1)
        return limit if limit is not None and limit <= most else INITIAL_CAPACITY
