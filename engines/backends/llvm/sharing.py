"""What the plans of one model for several shapes have in common: constants of one of them that the others read.

The packed weights of a layer are the same bytes at every shape, as long as its tactic packs them alike. The plan that
is made first has them; those that are loaded beside it have operands there, and no copies. What it does not have, for
the others take another tactic, is packed once for all of them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engines.backends.llvm.tuning.candidates import Choice
from engines.ir.content import content_of
from engines.ir.graph import Array
from engines.lowering.calls.calls import Call, name_of
from engines.plan.plan import SHARED, SHARED_EXPANDED, MachinePart, Operand

LEAST = 256         # bytes of a constant that it pays to look for
SPARE = 1 << 20     # bytes that may be kept of what is not shared, and as many as there are of constants
ENTRY = 1024        # bytes that what is known of one call's constants takes beside them
Packed = list[tuple[Operand, int]]      # where each packed constant of a call is, and its bytes


@dataclass(frozen=True)
class _Known:
    """What was packed of constants: where it is, if it is shared, or else itself."""
    contents: list[bytes]
    places: Packed
    arrays: list[Array] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """About what keeping it takes."""
        return ENTRY + sum(array.nbytes for array in self.arrays)


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
        self._packed: dict[Any, _Known] = {}
        self._spare = len(machine.constants) + SPARE    # bytes that may yet be kept of what is not shared

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

    def packed(self, call: Call, choice: Choice, pack: Callable[[], list[Array]],
               add: Callable[[list[Array]], Packed]) -> Packed:
        """Where a call's constants are, each with its bytes: `pack` packs them, `add` gives what is packed its places.

        What was packed before of equal constants in the same way is not packed again, and not added where all of it is
        shared; as much is remembered as there is room for.
        """
        layout = choice.kernel.packing_anywhere(choice.tactic)
        if layout is None:
            return add(pack())
        key = name_of(call), type(choice.kernel), layout
        contents = [content_of(np.asarray(array)) for value in call.constants.values()
                    for array in (value if isinstance(value, list | tuple) else [value])]
        known = self._packed.get(key)
        if known is not None and known.contents == contents:
            return known.places or add(known.arrays)
        arrays = pack()
        places = add(arrays)
        if places and all(operand.buffer in (SHARED, SHARED_EXPANDED) for operand, _ in places):
            found = _Known(contents, places)
        else:
            found = _Known(contents, [], arrays)
        self._keep(key, found)
        return places

    def _keep(self, key: Any, known: _Known) -> None:
        """As long as there is room: in place of what was packed of other constants."""
        room = self._spare + (self._packed.pop(key).bytes if key in self._packed else 0)
        self._spare = room - known.bytes if known.bytes <= room else room
        if known.bytes <= room:
            self._packed[key] = known
