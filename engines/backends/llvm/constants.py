"""Constants of a plan as its kernels read them; equal ones are stored once."""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Kernel
from infer_server.engines.backends.llvm.sharing import SharedConstants
from infer_server.engines.backends.llvm.tuning.candidates import Choice
from infer_server.engines.ir.content import EqualArrays
from infer_server.engines.ir.deferred import Deferred, LateBytes, late_arrays
from infer_server.engines.ir.graph import Graph
from infer_server.engines.ir.symbolic import env_in, structure
from infer_server.engines.lowering.calls.calls import ProblemCall, name_of
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.plan.plan import EXPANDED, ExpandedConstant, Operand

TAIL = 4 * ALIGNMENT        # bytes after the last constant, which prefetches and vector loads may access


class PackedConstants:
    """Collector of packed constants, each on a cache line, in order of execution.

    Equal constants are stored once and expanded once. Calls with equal constants in one layout are packed once.
    """

    def __init__(self, graph: Graph, isa: Isa, expanders: Mapping[Problem, Choice],
                 shared: SharedConstants | None = None) -> None:
        """Make an empty collection.

        Parameters
        ----------
        graph : graph whose constants are stored under their names.
        isa : instruction set of the kernels.
        expanders : kernels that expand constants when a plan is loaded.
        shared : constants of the base plan, which this one shares.
        """
        self._graph, self._isa, self._expanders, self._shared = graph, isa, expanders, shared
        self._names = {(array.ctypes.data, array.nbytes): name for name, array in graph.constants.items()
                       if not isinstance(array, Deferred) and array.flags.c_contiguous}
        self._parts: list[Any] = []                 # arrays of bytes, and Deferreds
        self._size = 0
        self.weight_offsets: dict[str, int] = {}    # name -> offset of graph constants that are stored unchanged
        self.expanded: list[ExpandedConstant] = []      # constants that are computed when the plan is loaded
        self._expanded_size = 0
        self._packed: dict[Hashable, list[tuple[Operand, int]]] = {}    # layout and contents -> packed constants
        self._expansions: dict[Hashable, Operand] = {}
        self._inputs, self._stored = EqualArrays(), EqualArrays()       # inputs of pack(), and stored constants
        self._offsets: dict[Hashable, int] = {}     # number in `_stored`, or structure of a Deferred -> offset

    def add(self, array: Array | Deferred, name: str = "") -> tuple[Operand, int]:
        """Store a constant and return (operand, bytes).

        name: the graph constant that this is a contiguous copy of, if that is not contiguous itself.
        """
        if isinstance(array, Deferred):
            return self._append(array, array.nbytes, name)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if self._shared and (operand := self._shared.find(flat)):
            return operand, len(flat)
        return self._add(flat, name)

    def _add(self, flat: Array, name: str) -> tuple[Operand, int]:
        name = name or self._names.get((flat.ctypes.data, len(flat)), "")       # pack() may return a constant unchanged
        return self._append(flat, len(flat), name)

    def _append(self, part: Array | Deferred, size: int, name: str) -> tuple[Operand, int]:
        if name in self.weight_offsets:
            return Operand(None, self.weight_offsets[name]), size
        number = _key(part) if isinstance(part, Deferred) else self._stored.number(part)
        offset = self._offsets.get(number, self._size)
        if offset == self._size:
            self._parts.append(part)
            self._size += -(-size // ALIGNMENT) * ALIGNMENT
        self._offsets[number] = offset
        if name:
            self.weight_offsets[name] = offset
        return Operand(None, offset), size

    def add_packed(self, call: ProblemCall, choice: Choice) -> list[tuple[Operand, int]]:
        """Pack the constants of a call for its kernel's tactic, and return (operand, bytes) of each.

        Calls and tactics with one layout of equal constants share them.
        """
        packing = self._packing(call, choice)
        if packing in self._packed:
            return self._packed[packing]
        pack, add = partial(self._pack, call, choice), partial(self._store, call, choice)
        added = self._shared.packed(call, choice, pack, add) if self._shared and not _has_late(call) else add(pack())
        self._packed[packing] = added
        return added

    def _packing(self, call: ProblemCall, choice: Choice) -> Hashable:
        """Return a key of all that decides on the packed constants of a call."""
        kernel, arrays = choice.kernel, list(_arrays(call))
        if env_in(kernel) or any(not isinstance(array, np.ndarray) for array in arrays):
            return id(call), type(kernel), kernel.packing(choice.tactic)
        layout = kernel.packing_anywhere(choice.tactic)
        how = (kernel, kernel.packing(choice.tactic)) if layout is None else (
            type(kernel), layout, getattr(kernel.problem, "program", None))
        return how, tuple(call.constants), tuple(self._inputs.number(array) for array in arrays)

    def _pack(self, call: ProblemCall, choice: Choice) -> list[Any]:
        """Pack the constants of a call.

        The result is deferred if symbolic extents decide on them or on their layout.
        """
        pack = partial(choice.kernel.pack, self._isa, choice.tactic, call.constants)
        if not _has_late(call):
            env = env_in(choice.kernel)
            found: Sequence[Array] | None = env.without_guards_of(pack) if env else pack()
            if found is not None:
                return list(found)
        return late_arrays(_packed, choice.kernel, self._isa, choice.tactic, dict(call.constants))

    def _store(self, call: ProblemCall, choice: Choice, arrays: list[Any]) -> list[tuple[Operand, int]]:
        added = [self.add(array) for array in arrays]
        for which, problem in choice.kernel.expansions(self._isa, choice.tactic).items():
            added[which] = self._expand(problem, *added[which], name_of(call))
        return added

    def _expand(self, problem: Problem, source: Operand, kept: int, name: str) -> tuple[Operand, int]:
        """Return the operand and size of the constant that a kernel expands from one of `kept` bytes."""
        expander = self._expanders[problem]
        grid = expander.kernel.grid(self._isa, expander.tactic)
        assert (grid.row_step, grid.column_step) == (1, 1), f"{problem.family}: its grid is to be cut anywhere"
        items = -(-kept // problem.inputs[0].item)
        size = items * problem.outputs[0].item
        if self._shared and (shared := self._shared.expansion(expander.symbol, source, size)):
            return shared, size
        key = expander.symbol, source, size
        if key in self._expansions:
            return self._expansions[key], size
        if self._shared and source.buffer is not None:      # the plan's own expansions need a source of its own
            source = self._add(self._shared.bytes_at(source, kept), "")[0]
        constant = ExpandedConstant(expander.symbol, source.offset, self._expanded_size, size,
                                    items * grid.rows_per_item, grid.columns, name)
        self.expanded.append(constant)
        self._expanded_size += -(-size // ALIGNMENT) * ALIGNMENT
        self._expansions[key] = Operand(EXPANDED, constant.offset)
        return self._expansions[key], size

    def tensor(self, name: str) -> Operand:
        """Store a graph constant unchanged, and return its operand."""
        return self.add(self._graph.constants[name], name)[0]

    def store_own(self, name: str) -> None:
        """Store a graph constant among the plan's own constants, from where a fallback reads it."""
        array = self._graph.constants[name]
        if isinstance(array, Deferred):
            self._append(array, array.nbytes, name)
        else:
            self._add(np.ascontiguousarray(array).reshape(-1).view(np.uint8), name)

    def data(self) -> Any:
        """Return all constants: bytes, or LateBytes if some depend on symbolic extents."""
        parts: list[bytes | Deferred] = []
        every = [*self._parts, np.zeros(TAIL, np.uint8)]
        for late, group in groupby(every, lambda part: isinstance(part, Deferred)):
            some = list(group)
            parts += some if late else [
                b"".join(part for flat in some for part in (flat.data, bytes(-len(flat) % ALIGNMENT)))]
        return LateBytes(tuple(parts), ALIGNMENT) if any(isinstance(part, Deferred) for part in parts) else parts[0]


def _key(array: Deferred) -> Hashable:
    """Return a key that is equal for arrays that are computed alike."""
    key = structure(array)
    try:
        hash(key)
    except TypeError:       # of arguments that cannot be compared
        return id(array)
    return key


def _arrays(call: ProblemCall) -> Iterator[Any]:
    """Yield the constants of a call, those of lists one by one."""
    for value in call.constants.values():
        yield from value if isinstance(value, list | tuple) else [value]


def _has_late(call: ProblemCall) -> bool:
    """Return True if a constant of the call depends on symbolic extents."""
    return any(isinstance(array, Deferred) for array in _arrays(call))


def _packed(kernel: Kernel[Any], isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> Sequence[Array]:
    return kernel.pack(isa, tactic, constants)
