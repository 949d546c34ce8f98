"""Runs a plan's steps: the tables that emitted code reads, the memory they point into, and the one-thread executor."""
from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.elf import LoadedCode
from engines.errors import PlanCorruptError
from engines.ir import Array
from engines.memory import LINE, Layout, Memory, array_at, plan_memory
from engines.plan import Fallback, Fill, Plan, TensorView
from engines.tables import STEP_WORDS, WORD, StepRow

Words = NDArray[np.int64]
EmittedFunction = Callable[..., None]


@dataclass(frozen=True)
class Span:
    """Steps first..last - 1: all native, so that one call runs them, or one fallback."""
    first: int
    last: int
    fallback: Fallback | None = None


class Program:
    """A plan made ready to run: code loaded, tables filled. Read-only after that, and shared by every context."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._code = LoadedCode(plan.code)
        self._constants, self._constants_address = _aligned(plan.constants)
        self.run_steps = self.function("run_steps", 5)
        self.steps = self._step_table()
        self.spans = _spans(plan)
        operands = [operand for step in plan.steps for operand in step.operands]
        # The constants count as one buffer more, after the others.
        buffers = [len(plan.buffers) if o.buffer is None else o.buffer for o in operands]
        self._operand_buffers = np.array(buffers, np.int64)
        self._operand_offsets = np.array([o.offset for o in operands], np.int64)
        if any(step.fallback for step in plan.steps):
            import engines.reference  # noqa: F401  its time, or its failure, belongs to the load

    def function(self, name: str, parameters: int) -> EmittedFunction:
        """An emitted function that takes i64s or addresses; a call releases the GIL."""
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)
        return prototype(self._address(name, "the executor"))

    def _address(self, symbol: str, user: str) -> int:
        try:
            return self._code.addresses[symbol]
        except KeyError:
            raise PlanCorruptError(f"{self.plan.name}: {user} needs '{symbol}', which the plan's code does not define; "
                                   "build the plan again") from None

    def _step_table(self) -> Words:
        table = words(len(self.plan.steps), STEP_WORDS)
        operands = 0
        for row, step in zip(table, self.plan.steps, strict=True):
            if step.symbol:
                row[StepRow.FUNCTION] = self._address(step.symbol, f"step '{step.name}'")
            row[StepRow.OPERANDS] = operands * WORD
            row[StepRow.ROWS_PER_ITEM], row[StepRow.ROWS] = step.rows_per_item, 0 if step.rows_per_item else step.rows
            row[StepRow.COLUMNS] = step.columns
            operands += len(step.operands)
        return table

    @cached_property
    def shared_layout(self) -> Layout:
        """Of a context of one thread: buffers share memory."""
        return plan_memory(self.plan.buffers, self.plan.fills)

    @cached_property
    def separate_layout(self) -> Layout:
        """Of a context of several threads: every buffer has memory of its own."""
        return plan_memory(self.plan.buffers, self.plan.fills, reuse=False)

    def operand_table(self, bases: Sequence[int]) -> Words:
        """The addresses of all operands of all steps, given that of each buffer."""
        every = np.array([*bases, self._constants_address], np.int64)
        table: Words = every[self._operand_buffers] + self._operand_offsets
        return table


def words(*shape: int) -> Words:
    """A zeroed table of i64 that begins on a cache line, in memory that nothing moves."""
    return np.ndarray(shape, np.int64, Memory(int(np.prod(shape)) * WORD).bytes)


def _aligned(constants: bytes | memoryview) -> tuple[Array, int]:
    """The constants and their address. A plan that comes from a file is mapped on a page; others are copied."""
    array: Array = np.ndarray((len(constants),), np.uint8, constants)
    if array.ctypes.data % LINE:
        copy = Memory(len(array)).bytes
        copy[:len(array)] = array
        array = copy
    return array, array.ctypes.data


def _spans(plan: Plan) -> tuple[Span, ...]:
    spans: list[Span] = []
    for index, step in enumerate(plan.steps):
        if not step.symbol:
            if step.fallback is None:
                raise PlanCorruptError(f"{plan.name}: step '{step.name}' has neither a kernel nor a fallback")
            spans.append(Span(index, index + 1, step.fallback))
        elif spans and spans[-1].fallback is None:
            spans[-1] = Span(spans[-1].first, index + 1)
        else:
            spans.append(Span(index, index + 1))
    return tuple(spans)


class Arena:
    """The buffers of one context, and the operand table that points into them.

    With `inputs`, the buffers of the plan's inputs are those of that arena: one place to write them, many to run in.
    """

    def __init__(self, program: Program, layout: Layout, inputs: Arena | None = None) -> None:
        self._program, self._layout, self._inputs = program, layout, inputs
        self._memory = Memory(layout.total)
        self._filled = 0        # batch slots whose halos are written
        self._borrowed = frozenset(i for i, buffer in enumerate(program.plan.buffers) if inputs and buffer.first < 0)
        bases = [self._owner(i)._memory.address + offset for i, offset in enumerate(layout.offsets)]
        self._operands = program.operand_table(bases)

    @property
    def operands(self) -> int:
        """Address of the operand table."""
        return self._operands.ctypes.data

    @property
    def bytes(self) -> int:
        return self._layout.total

    def _owner(self, buffer: int) -> Arena:
        return self._inputs if self._inputs is not None and buffer in self._borrowed else self

    def array(self, view: TensorView, batch: int) -> Array:
        """The tensor as it lies in memory: [batch, *shape], or shape if it has no batch axis."""
        return array_at(self._owner(view.buffer)._memory.bytes, self._layout.offsets[view.buffer], view, batch)

    def prepare(self, batch: int) -> None:
        """Write the halos of the first `batch` slots, unless that has been done. Inputs are written after this."""
        if batch <= self._filled:
            return
        for fill in self._program.plan.fills:
            if fill.view.buffer not in self._borrowed:
                self._fill(fill, batch)
        self._filled = batch

    def _fill(self, fill: Fill, batch: int) -> None:
        array, value = self.array(fill.view, batch), fill.value
        if fill.view.dtype == "bfloat16":
            value = int(np.float32(value).view(np.uint32)) >> 16
        if fill.view.batched:
            array[self._filled:] = value
        elif not self._filled:
            array[...] = value


class Execution(Protocol):
    """What carries out a context's requests: one thread, or a crew."""

    def input(self, view: TensorView, batch: int) -> Array:
        """Where the caller writes an input."""

    def output(self, view: TensorView, batch: int) -> Array:
        """Where the caller finds an output."""

    def run(self, batch: int) -> None: ...

    def profile(self, batch: int, repeats: int) -> list[float]: ...

    def close(self) -> None: ...


class SerialExecution:
    """One thread, one arena whose buffers share memory."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._arena = Arena(program, program.shared_layout)

    def input(self, view: TensorView, batch: int) -> Array:
        self._arena.prepare(batch)
        return self._arena.array(view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return self._arena.array(view, batch)

    def run(self, batch: int) -> None:
        self._arena.prepare(batch)
        for span in self._program.spans:
            run_span(self._program, self._arena, span, batch)

    def profile(self, batch: int, repeats: int) -> list[float]:
        return time_steps(self._program, self._arena, batch, repeats)

    def close(self) -> None:
        """Nothing to stop: the memory goes with the last view of it."""


def run_span(program: Program, arena: Arena, span: Span, batch: int) -> None:
    """Run a span on this thread."""
    if span.fallback is not None:
        run_fallback(span.fallback, program.plan.graph_arrays, lambda view: arena.array(view, batch))
    else:
        program.run_steps(program.steps.ctypes.data, arena.operands, span.first, span.last, batch)


def time_steps(program: Program, arena: Arena, batch: int, repeats: int, fallbacks: bool = True) -> list[float]:
    """Seconds of each step, the least of `repeats`: the steps run in order, each timed alone.

    Without `fallbacks` those are left out, and take 0 s: the reference may refuse what lies in an arena at rest.
    """
    arena.prepare(batch)
    spans = [Span(i, i + 1, step.fallback) for i, step in enumerate(program.plan.steps)]
    timed = [span for span in spans if fallbacks or span.fallback is None]
    best = [0.0] * len(spans)
    for turn in range(repeats):
        for span in timed:
            start = time.perf_counter()
            run_span(program, arena, span, batch)
            seconds = time.perf_counter() - start
            best[span.first] = min(best[span.first], seconds) if turn else seconds
    return best


# ---- what no kernel computes
def run_fallback(fallback: Fallback, constants: Mapping[str, Array], array: Callable[[TensorView], Array]) -> None:
    """Run a node by its reference, in real numbers: stored tensors are dequantised or widened, results stored back."""
    from engines.reference import run_node
    from engines.serialize import node_from_json

    def value(source: TensorView | str) -> Array | None:
        if isinstance(source, TensorView):
            return to_real(array(source), source)
        return np.asarray(constants[source]) if source else None

    results = run_node(node_from_json(fallback.node), [value(source) for source in fallback.inputs])
    for view, result in zip(fallback.outputs, results, strict=True):
        array(view)[...] = to_stored(np.asarray(result), view)


def to_real(stored: Array, view: TensorView) -> Array:
    """What a stored tensor means: real = scale * (stored - zero_point); bfloat16 as float32. The result is a copy."""
    if view.quant is not None:
        scale, zero_point = _quant_columns(view)
        return ((stored.astype(np.float32) - zero_point) * scale).astype(np.float32)
    if view.dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.copy()


def to_stored(real: Array, view: TensorView) -> Array:
    """The inverse: rounded half to even, saturated."""
    if view.quant is not None:
        scale, zero_point = _quant_columns(view)
        limits = np.iinfo(view.dtype)
        stored: Array = np.clip(np.rint(real / scale) + zero_point, limits.min, limits.max).astype(view.dtype)
        return stored
    if view.dtype == "bfloat16":
        bits = np.ascontiguousarray(real, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(real), 0x7FC0, rounded).astype(np.uint16)
    return real


def _quant_columns(view: TensorView) -> tuple[Array, Array]:
    """Scale and zero point, shaped to broadcast along the quantised axis (of the tensor with its batch axis)."""
    assert view.quant is not None
    scale, zero_point = np.array(view.quant.scale, np.float32), np.array(view.quant.zero_point, np.float32)
    if view.quant.axis is None:
        return scale[0], zero_point[0]
    shape = [1] * (len(view.shape) + view.batched)
    shape[view.quant.axis] = -1
    return scale.reshape(shape), zero_point.reshape(shape)


@cache
def libc() -> Any:
    """This process's C library."""
    return ctypes.CDLL(None, use_errno=True)
