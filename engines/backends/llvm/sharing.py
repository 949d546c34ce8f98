"""What the plans of one model for several shapes have in common: constants of one of them that the others read.

The packed weights of a layer are the same bytes at every shape, as long as its tactic packs them alike. The plan that
is made first has them; those that are loaded beside it have operands there, and no copies.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engines.backends.llvm.tuning.candidates import Choice
from engines.ir.graph import Array
from engines.lowering.calls.calls import Call, name_of
from engines.plan.checksums import page_sums
from engines.plan.plan import SHARED, SHARED_EXPANDED, MachinePart, Operand

LEAST = 256         # bytes of a constant that it pays to look for
Packed = list[tuple[Operand, int]]      # where each packed constant of a call is, and its bytes


class SharedConstants:
    """The constants of a plan, to be found by what is in them."""

    def __init__(self, machine: MachinePart) -> None:
        self.sizes = len(machine.constants), machine.expanded_bytes
        self._bytes = np.frombuffer(machine.constants, np.uint8)
        self._expanded = {(item.symbol, item.source, item.bytes): item.offset for item in machine.expanded}
        self._places: dict[bytes, list[int]] = {}       # by their first bytes
        starts = {o.offset for step in machine.steps for o in step.operands if o.buffer is None}
        for start in sorted(starts.union((item.source for item in machine.expanded), machine.weight_offsets.values())):
            self._places.setdefault(self._bytes[start:start + LEAST].tobytes(), []).append(start)
        self._packed: dict[Any, tuple[str, Packed]] = {}

    def find(self, flat: Array) -> Operand | None:
        """Where these bytes are."""
        for start in self._places.get(flat[:LEAST].tobytes(), ()) if len(flat) >= LEAST else ():
            if np.array_equal(self._bytes[start:start + len(flat)], flat):
                return Operand(SHARED, start)
        return None

    def bytes_at(self, place: Operand, size: int) -> Array:
        """What is there."""
        return self._bytes[place.offset:place.offset + size]

    def expansion(self, symbol: str, source: Operand, size: int) -> Operand | None:
        """Where the constant is that a kernel computes from a shared one."""
        offset = self._expanded.get((symbol, source.offset, size)) if source.buffer == SHARED else None
        return None if offset is None else Operand(SHARED_EXPANDED, offset)

    def packed(self, call: Call, choice: Choice, pack: Callable[[], Packed]) -> Packed:
        """What `pack` gives; where all of it is shared, it is not packed a second time."""
        key = name_of(call), type(choice.kernel), choice.kernel.packing(choice.tactic)
        sources = _digest(call.constants)
        known, found = self._packed.get(key, ("", []))
        if known != sources:
            found = pack()
            if found and all(operand.buffer in (SHARED, SHARED_EXPANDED) for operand, _ in found):
                self._packed[key] = sources, found
        return found


def _digest(constants: Mapping[str, Any]) -> str:
    """Of the values that are packed. Weights that are seen transposed are read in the order in which they lie: to put
    them in the other one takes several times as long as to read them."""
    arrays = [_as_it_lies(array) for value in constants.values()
              for array in (value if isinstance(value, list | tuple) else [value])]
    return repr([(array.dtype.str, array.shape, axes, page_sums(array.reshape(-1).view(np.uint8).data))
                 for axes, array in arrays])


def _as_it_lies(array: Any) -> tuple[list[int], Array]:
    """The axes in the order of their strides, and the array with its axes in this order, in one piece."""
    array = np.asarray(array)
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    return axes, np.ascontiguousarray(array.transpose(axes))
