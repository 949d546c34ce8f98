"""The constants of a plan as they are packed for its kernels, and the way back from them to the graph's."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import ALIGNMENT
from engines.backends.llvm.tuning.tuner import Choice
from engines.backends.llvm.unpacking import SMALLEST, PackingFinder
from engines.ir.graph import Graph
from engines.lowering.calls.calls import Call
from engines.lowering.problems.problem import Array, Problem
from engines.plan.packed import PackedArray, Packing
from engines.plan.plan import DERIVED, Derived, Operand

TAIL = 4 * ALIGNMENT        # bytes behind them: a prefetch or the last vector may look past the end


class Constants:
    """Collects packed constants, each on a cache line, in order of execution."""

    def __init__(self, graph: Graph, isa: Isa, makers: Mapping[Problem, Choice]) -> None:
        """makers: the kernels that make constants of others."""
        self._graph, self._isa, self._makers = graph, isa, makers
        self._parts: list[Array] = []
        self._offsets: list[int] = []
        self._size = 0
        self._tensors: dict[str, Operand] = {}      # those that kernels read as they read any tensor
        self._calls: list[tuple[Call, Choice, list[int]]] = []
        self._derived: list[Derived] = []
        self._derived_size = 0

    def add(self, array: Array) -> tuple[Operand, int]:
        """(where, bytes)"""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._parts.append(flat)
        self._offsets.append(self._size)
        self._size += -(-len(flat) // ALIGNMENT) * ALIGNMENT
        return Operand(None, self._offsets[-1]), len(flat)

    def add_packed(self, call: Call, choice: Choice) -> list[tuple[Operand, int]]:
        """The constants of a call, as its kernel's tactic packs them: where the kernel reads each, and how much."""
        first = len(self._parts)
        added = [self.add(array) for array in choice.kernel.pack(self._isa, choice.tactic, call.constants)]
        self._calls.append((call, choice, list(range(first, len(self._parts)))))
        for which, problem in choice.kernel.made(self._isa, choice.tactic).items():
            added[which] = self._derive(problem, *added[which], call.name)
        return added

    def _derive(self, problem: Problem, source: Operand, kept: int, name: str) -> tuple[Operand, int]:
        """What a kernel makes of a constant of `kept` bytes."""
        maker = self._makers[problem]
        grid = maker.kernel.grid(self._isa, maker.tactic)
        assert (grid.row_step, grid.column_step) == (1, 1), f"{problem.family}: its grid is to be cut anywhere"
        items = -(-kept // problem.inputs[0].item)
        size = items * problem.outputs[0].item
        place = Derived(maker.symbol, source.offset, self._derived_size, size, items * grid.rows_per_item,
                        grid.columns, name)
        self._derived.append(place)
        self._derived_size += -(-size // ALIGNMENT) * ALIGNMENT
        return Operand(DERIVED, place.offset), size

    def tensor(self, name: str) -> Operand:
        """A constant of the graph, as it is."""
        if name not in self._tensors:
            self._tensors[name], _ = self.add(self._graph.constants[name])
        return self._tensors[name]

    def data(self) -> bytes:
        """All of them."""
        padded = (part for flat in self._parts for part in (flat.data, bytes(-len(flat) % ALIGNMENT)))
        return b"".join((*padded, bytes(TAIL)))

    def derived(self) -> tuple[Derived, ...]:
        """What is made of them."""
        return tuple(self._derived)

    def packed(self) -> dict[str, PackedArray]:
        """The constants of the graph that can be read back from here, by name."""
        finder = PackingFinder(self._isa)
        found = {name: self._as_it_is(name, operand) for name, operand in self._tensors.items()
                 if self._graph.constants[name].nbytes >= SMALLEST}
        for call, choice, parts in self._calls:
            for key, constant in call.constants.items():
                source = self._source(call, constant)
                if source is None or source[0] in found:
                    continue
                (name, axis), array = source, self._graph.constants[source[0]]
                way = finder.find(choice.kernel, choice.tactic, call.constants, key, [self._parts[i] for i in parts],
                                  rounded=self._readers(name) == 1)
                if way is not None:
                    offsets = tuple(self._offsets[parts[which]] for which in way.which)
                    found[name] = PackedArray(str(array.dtype), array.shape, axis, way.stored, offsets, way.packing)
        return found

    def _as_it_is(self, name: str, operand: Operand) -> PackedArray:
        array = self._graph.constants[name]
        rows, row = len(array), array.nbytes // len(array)
        in_order = Packing(tuple(range(0, array.nbytes, row)), (0,) * rows, (tuple(range(0, row, array.itemsize)),))
        return PackedArray(str(array.dtype), array.shape, 0, str(array.dtype), (operand.offset,), in_order)

    def _readers(self, name: str) -> int:
        return sum(node.inputs.count(name) for node in self._graph.consumers[name])

    def _source(self, call: Call, constant: Any) -> tuple[str, int] | None:
        """(name, axis) of the graph's constant whose axis moved to the front is this one of a call, but for extents of
        one; None if it is another, or too small to be worth it."""
        if not isinstance(constant, np.ndarray) or constant.nbytes < SMALLEST:
            return None
        for name in call.node.inputs:
            array = self._graph.constants.get(name)
            if array is not None and array.size == constant.size and np.shares_memory(array, constant):
                for axis in range(min(array.ndim, 2)):
                    turned = np.squeeze(np.moveaxis(array, axis, 0))
                    if (turned.shape, turned.strides) == (np.squeeze(constant).shape, np.squeeze(constant).strides):
                        return name, axis
        return None
