"""Sizes of a kernel that are read at run time instead of written into its code.

A kernel is written in Python with its problem's numbers: extents, strides. SymbolicInts of a KernelTrace take the
place of some of them:

    rows, = KernelTrace().extents([77], {0})
    -(-rows // 6)                           # a SymbolicInt: 13 = -(-n0 // 6)

Emitted as an operand, a SymbolicInt becomes a load from a table of run-time numbers (Function.constant). If Python
needs the number itself, to compare, to unroll a loop, to write it into a text, the answer is recorded as a guard. The
code is valid for all numbers that give every guard its recorded answer. So a kernel need not be written for
SymbolicInts: one that reads the number itself is specialised to it, and its guards record that.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from infer_server.engines.ir import polynomials
from infer_server.engines.ir.polynomials import Polynomial
from infer_server.engines.ir.symbolic import ByteSize, ShapeEnv, SymbolicInt

TABLE = "parameters"            # name of the register that holds the table's address, in each function
Atom = int | Sequence[Polynomial]       # what polynomials refer to: the position of a number, or (dividend, divisor)


class KernelTrace(ShapeEnv):
    """Trace of a kernel, whose extents are the numbers of its problem.

    table: numbers that the kernel loads
    """
    pins = True

    def __init__(self) -> None:
        super().__init__()
        self.table: list[Polynomial] = []
        self._slots: dict[Polynomial, int] = {}

    def slot(self, number: Polynomial) -> int:
        """Return the position of a number in the table; add the number if it is new."""
        if number not in self._slots:
            self._slots[number] = len(self.table)
            self.table.append(number)
        return self._slots[number]

    def extents(self, numbers: Sequence[int], dynamic: Set[int]) -> list[Any]:
        """Return the numbers, with a SymbolicInt, named by its position, at each position in `dynamic`."""
        return [SymbolicInt(self, number, polynomials.atom(self._atom(str(position), number, None)))
                if position in dynamic else number for position, number in enumerate(numbers)]


    @property
    def operands(self) -> tuple[Atom, ...]:
        """Numbers and quotients that the polynomials of guards and of the table refer to."""
        return tuple(int(atom) if isinstance(atom, str) else (atom.over, atom.by) for atom in self.atoms
                     if not isinstance(atom, ByteSize))


def operand_values(operands: Sequence[Atom], numbers: Sequence[Any]) -> list[Any]:
    """Return the values of operands for the numbers of a problem. Raises ZeroDivisionError."""
    values: list[Any] = []
    for atom in operands:
        values.append(numbers[atom] if isinstance(atom, int) else
                      polynomials.value(atom[0], values) // polynomials.value(atom[1], values))
    return values


class Table:
    """LLVM IR lines at the start of a function that load its run-time numbers, each once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._registers: dict[int, str] = {}

    def begin(self, operands: str, index: int) -> None:
        """Load the table's address, which is operand number `index` of the kernel."""
        self.lines += [f"  %{TABLE}.at = getelementptr i8, ptr {operands}, i64 {8 * index}",
                       f"  %{TABLE} = load ptr, ptr %{TABLE}.at, align 8"]

    def register(self, extent: SymbolicInt, fresh: Callable[[str], str]) -> str:
        """Return the i64 register that holds an extent of a KernelTrace; `fresh` makes an unused name from a hint."""
        slot = extent.env.slot(extent.expr)     # type: ignore[attr-defined]
        if slot not in self._registers:
            name = self._registers[slot] = f"%{fresh('number')}"
            self.lines += [f"  {name}.at = getelementptr i8, ptr %{TABLE}, i64 {8 * slot}",
                           f"  {name} = load i64, ptr {name}.at, align 8"]
        return self._registers[slot]
