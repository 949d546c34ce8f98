"""The contract of a kernel family: what a kernel computes, in shapes only, and how a tactic makes code of it.

Every kernel is called as

    void name(ptr operands, i64 row_begin, i64 row_end, i64 column_begin, i64 column_end)

operands: the addresses of its inputs, then of its packed constants, then of its outputs. Its work is a grid of
`rows_per_item * batch` rows by `columns`; the caller may cut it at multiples of the steps and run the pieces anywhere.
The batch is thus a run-time extent: row r belongs to item r // rows_per_item.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.codegen.ir_builder import I64, PTR, Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import FLOATS, SIZES
from engines.lowering.epilogue.program import EpilogueProgram

Array = NDArray[Any]
ALIGNMENT = 64                  # of packed constants: a cache line, and the widest vector


@dataclass(frozen=True)
class View:
    """How a kernel sees a tensor: element [n, i, j, ...] is n * item + i * strides[0] + ... bytes from its address.

    shape is one item's. A stride of 0 repeats an element (broadcasting). The address is that of element 0.
    """
    dtype: str                  # numpy's name of the stored dtype; "bfloat16" too
    shape: tuple[int, ...]
    strides: tuple[int, ...]    # bytes
    item: int                   # bytes from one item of the batch to the next

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @property
    def dense(self) -> bool:
        """The axes follow each other without a gap, and so do the items: the tensor is one long run of elements."""
        return self == dense_view(self.dtype, self.shape)

    @property
    def span(self) -> int:
        """Bytes from element 0 of an item to the end of its last one."""
        return self.size + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


def dense_view(dtype: str, shape: Sequence[int]) -> View:
    """A tensor whose elements follow each other in row-major order."""
    strides, step = [], SIZES[dtype]
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return View(dtype, tuple(shape), tuple(reversed(strides)), step)


@dataclass(frozen=True)
class Window:
    """The bytes of an item that row i of its grid may touch: [begin, end) + i // rows * stride, from its address.

    It may be wider than what is touched, never narrower.
    """
    begin: int
    end: int
    rows: int = 1
    stride: int = 0

    @staticmethod
    def whole(view: View) -> Window:
        """Every row may touch all of the item."""
        return Window(0, view.span)

    @staticmethod
    def along(view: View, axis: int = 0, rows: int = 1, step: int = 1, first: int = 0, count: int = 1) -> Window:
        """`rows` neighbours touch `count` indices of an axis, from `first` on; the next ones, `step` further on."""
        stride = view.strides[axis]
        others = view.span - (view.shape[axis] - 1) * stride
        return Window(first * stride, (first + count - 1) * stride + others, rows, step * stride)


@dataclass(frozen=True)
class Grid:
    rows_per_item: int
    row_step: int = 1
    columns: int = 1
    column_step: int = 1


@dataclass(frozen=True)
class Tactic:
    """One way to cut the loops of a kernel. Families extend it; str() is what a user reads."""

    def __str__(self) -> str:
        return "default"


class KernelSpec(ABC):
    """A frozen dataclass: equal specs are one kernel, and repr() is the key of the timing cache."""
    family: str = ""
    computes_on: ClassVar[Collection[str]] = FLOATS     # how its inputs and outputs may be stored

    @property
    @abstractmethod
    def inputs(self) -> tuple[View, ...]:
        """In the order of the operands."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[View, ...]:
        ...

    @property
    def misfit(self) -> str:
        """A stored dtype that its code would take for another; "" if there is none, as there must be to emit it."""
        return next((view.dtype for view in (*self.inputs, *self.outputs) if view.dtype not in self.computes_on), "")

    @property
    def macs(self) -> int:
        """Multiply-accumulates an item; families without any need not say."""
        return 0

    @property
    def by_batch(self) -> bool:
        """Whether its tiles hold pixels of several items: which tactic is fastest then depends on the batch."""
        return False

    def for_batches_of(self, items: int) -> KernelSpec:
        """The same kernel with tactics for batches of up to so many items; itself, unless it is cut by batch."""
        return self

    def tactics(self, isa: Isa) -> Sequence[Any]:
        """Candidates. Without timing the cheapest is taken, the first of equals; with it, the dear are not timed."""
        return (Tactic(),)

    def cost(self, isa: Isa, tactic: Any) -> float:
        """Cycles of one item, roughly (see cost.py); families of one tactic need not say."""
        return 0.0

    def refinements(self, isa: Isa, best: Any) -> Sequence[Any]:
        """Variants of the fastest of `tactics`, to be timed in a second round."""
        return ()

    def packing(self, tactic: Any) -> Any:
        """What of a tactic decides how constants are packed: tactics equal in it share packed constants."""
        return tactic

    def packing_is_permutation(self, tactic: Any) -> bool:
        """Whether packing only reorders the constants, which is quick: it neither computes with their values nor looks
        at them."""
        return True

    @abstractmethod
    def grid(self, isa: Isa, tactic: Any) -> Grid:
        ...

    def windows(self, isa: Isa, tactic: Any) -> Sequence[Window]:
        """What a row of the grid touches of each input and output: so much must be there before the row may run, and
        so much is there after it. Families narrow this; here a row may touch all of its item."""
        return [Window.whole(view) for view in (*self.inputs, *self.outputs)]

    @abstractmethod
    def emit(self, module: Module, name: str, isa: Isa, tactic: Any) -> None:
        """Write the kernel, and the micro-kernels it calls, into the module."""

    def pack(self, isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The named constants (each family says which) in the order and layout that the kernel reads, or that what
        it reads is `made` of."""
        return ()

    def made(self, isa: Isa, tactic: Any) -> Mapping[int, KernelSpec]:
        """Packed constants that a plan keeps smaller than the kernel reads them: which -> the kernel that makes the one
        of the other when a plan is loaded. It has one dense input, one dense output and no constants; the constant is
        as many of its items as it takes."""
        return {}

    def ready_constants(self, isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """What `pack` gives, as the kernel reads it."""
        made = self.made(isa, tactic)
        return tuple(_made_by(made[which], array) if which in made else array
                     for which, array in enumerate(self.pack(isa, tactic, constants)))

    @abstractmethod
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The exact meaning: arrays [batch, *shape] as stored -> the same. Integers bit for bit."""

    @property
    def bytes(self) -> int:
        """Moved an item: inputs and outputs, each once."""
        return sum(view.size * int(np.prod(view.shape)) for view in (*self.inputs, *self.outputs))


@dataclass(frozen=True)
class ImageKernel(KernelSpec):
    """What the families on images share: x, its channels last, becomes y by way of a program.

    operands: of the program, shaped as y unless a family says otherwise.
    """
    x: View
    y: View
    operands: tuple[View, ...]
    program: EpilogueProgram

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.x, *self.operands)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)


def _made_by(maker: KernelSpec, kept: Array) -> Array:
    """What a kernel makes of a packed constant, its last item filled up with zeros."""
    (view,), flat = maker.inputs, kept.reshape(-1)
    whole = np.pad(flat, (0, -flat.nbytes % view.item // view.size))
    return maker.reference([whole.reshape(-1, *view.shape)], {})[0].reshape(-1)


def begin_kernel(module: Module, name: str, count: int) -> tuple[Function, list[Value], list[Value]]:
    """A kernel with `count` operands: (f, their addresses, [row_begin, row_end, column_begin, column_end])."""
    f = module.function(name, operands=PTR, row_begin=I64, row_end=I64, column_begin=I64, column_end=I64)
    table, *bounds = f.parameters.values()
    addresses = [f.load(PTR, table + 8 * i, align=8, hint=f"operand {i}") for i in range(count)]
    return f, addresses, bounds


def pack_channels(constants: Sequence[Array], channels: int, panels: Sequence[Sequence[Sequence[int]]]) -> Array:
    """Per-channel float32 constants -> [panel][constant][vector][lane].

    `panels`: for each panel its Lanes.order() shifted to absolute channels; absent channels become 0.
    """
    table = np.zeros((len(constants), channels + 1), np.float32)
    for row, constant in zip(table, constants, strict=True):
        row[:channels] = constant
    flat = [table[:, np.minimum(np.asarray(order), channels)].ravel() for order in panels]
    return np.concatenate(flat) if flat else np.zeros(0, np.float32)
