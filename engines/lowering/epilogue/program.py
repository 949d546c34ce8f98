"""Epilogue programs: sequences of float32 instructions that kernels apply to values before they are stored.

    value 0 = the accumulator (of a contraction or a pool)            conv + bias + residual + ReLU:
    value i = instruction i of values, operands and constants           1: fma(acc, scale, bias)
                                                                        2: fma(operand 0, its scale, value 1)
                                                                        3: max(value 2, 0)

An *operand* is another tensor, read at the same position (widened to float32, not dequantised). A *constant* is a
vector in memory of one float32 per channel (a scalar is repeated), so that a kernel's code depends on shapes only.

A program runs on any Machine (functions.py): NumPy's defines its result, a backend's emits code. A new pointwise
function is a new instruction here, never a change to a kernel.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.ir.dtypes import from_bfloat16, to_bfloat16
from infer_server.engines.lowering.epilogue.functions import FUNCTIONS, Function, Machine, fma

Floats = NDArray[np.float32]
V = TypeVar("V")        # a machine's vector


@dataclass(frozen=True)
class Ref:
    """Argument of an instruction. `kind` is "value", "operand" or "constant"."""
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind[0]}{self.index}"


@dataclass(frozen=True)
class Instruction:
    """Instruction of INSTRUCTIONS and its arguments."""
    op: str
    args: tuple[Ref, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class EpilogueProgram:
    """Program whose result is the last value, or operand 0 if there is none.

    `accumulator`: value 0 is supplied by the kernel.
    """
    instructions: tuple[Instruction, ...] = ()
    operands: int = 0
    constants: int = 0
    accumulator: bool = True

    @property
    def result(self) -> Ref:
        values = len(self.instructions) + self.accumulator
        return Ref("value", values - 1) if values else Ref("operand", 0)

    def __str__(self) -> str:
        return "; ".join(map(str, self.instructions))

    @property
    def long(self) -> bool:
        """True if it has a function of FUNCTIONS, a dependency chain of about a dozen instructions."""
        return any(instruction.op in FUNCTIONS for instruction in self.instructions)

    def meaning(self, accumulator: Floats | None, operands: Sequence[Floats], constants: Sequence[Floats]) -> Floats:
        """Evaluate the program in NumPy, which defines its result.

        Parameters
        ----------
        accumulator : ndarray or None
            [..., channels].
        operands : sequence of ndarray
            [..., channels] each.
        constants : sequence of ndarray
            [channels] or [1] each.

        Returns
        -------
        ndarray
            float32 result, before it is converted to the stored dtype.
        """
        given = None if accumulator is None else _float32(accumulator)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return _float32(self.run(NUMPY, given, [_float32(x) for x in operands], [_float32(c) for c in constants]))

    def run(self, machine: Machine, accumulator: V | None, operands: Sequence[V], constants: Sequence[V]) -> V:
        """Run the program on a machine's vectors."""
        values: list[Any] = [accumulator] if self.accumulator else []
        found: dict[str, Sequence[Any]] = {"value": values, "operand": operands, "constant": constants}
        for instruction in self.instructions:
            arguments = [found[a.kind][a.index] for a in instruction.args]
            values.append(INSTRUCTIONS[instruction.op](machine, *arguments))
        result: V = found[self.result.kind][self.result.index]
        return result


COPY = EpilogueProgram((), 1, 0, accumulator=False)     # copies its operand


class ProgramBuilder:
    """Builder of a program. Equal instructions, and constants with equal bytes, are shared."""

    def __init__(self, accumulator: bool) -> None:
        self._accumulator = accumulator
        self._instructions: dict[Instruction, int] = {}     # in order, with their numbers
        self._operands = 0
        self._constants: dict[bytes, int] = {}
        self.constants: list[Floats] = []       # each [1] or [channels]

    @property
    def accumulator(self) -> Ref:
        assert self._accumulator, "this program has no accumulator"
        return Ref("value", 0)

    def operand(self) -> Ref:
        self._operands += 1
        return Ref("operand", self._operands - 1)

    def constant(self, numbers: Any) -> Ref:
        array = np.atleast_1d(np.asarray(numbers, np.float32))
        index = self._constants.setdefault(array.tobytes(), len(self.constants))
        if index == len(self.constants):
            self.constants.append(array)
        return Ref("constant", index)

    def add(self, op: str, *args: Ref | float) -> Ref:
        refs = tuple(a if isinstance(a, Ref) else self.constant(a) for a in args)
        assert op in INSTRUCTIONS, f"no instruction named {op}"
        number = self._instructions.setdefault(Instruction(op, refs), len(self._instructions))
        return Ref("value", number + self._accumulator)

    def program(self, result: Ref | None = None) -> EpilogueProgram:
        """Return the program. `result` is its result if that is not the last value written."""
        written = EpilogueProgram(tuple(self._instructions), self._operands, len(self.constants), self._accumulator)
        if result is not None and result != written.result:
            self.add("mul", result, self.constant(1.0))
        return EpilogueProgram(tuple(self._instructions), self._operands, len(self.constants), self._accumulator)


# ---- instructions
def _truth(order: str) -> Function:
    """Return a comparison with the results 1 and 0."""
    return lambda machine, a, b: machine.select(machine.compare(a, order, b), machine.like(a, 1), machine.like(a, 0))


def _or_nan(word: str) -> Function:
    """Return an instruction for max or min that propagates NaN."""
    def extreme(machine: Machine, a: V, b: V) -> V:
        found = getattr(machine, word)(a, b)        # b if a is NaN
        result: V = machine.select(machine.compare(a, "oeq", a), found, a)
        return result
    return extreme


def _unary(word: str) -> Function:
    return lambda machine, x: machine.unary(word, x)


INSTRUCTIONS: dict[str, Function] = {
    "add": lambda machine, a, b: a + b,
    "sub": lambda machine, a, b: a - b,
    "mul": lambda machine, a, b: a * b,
    "div": lambda machine, a, b: a / b,
    "fma": lambda machine, a, b, c: machine.fma(a, b, c),
    "max": lambda machine, a, b: machine.max(a, b),
    "min": lambda machine, a, b: machine.min(a, b),
    "max_or_nan": _or_nan("max"),
    "min_or_nan": _or_nan("min"),
    "less": _truth("olt"),
    "less_or_equal": _truth("ole"),
    "equal": _truth("oeq"),
    "where_positive": lambda machine, t, a, b: machine.select(machine.compare(t, "ogt", 0), a, b),
    "sqrt": _unary("sqrt"),
    "abs": _unary("fabs"),
    "floor": _unary("floor"),
    "ceil": _unary("ceil"),
    "round": _unary("rint"),
    "float16": lambda machine, x: machine.narrowed("float16", x),
    "bfloat16": lambda machine, x: machine.narrowed("bfloat16", x),
    **FUNCTIONS,
}


# ---- NumPy's machine
_UNARY: dict[str, np.ufunc] = {
    "sqrt": np.sqrt, "fabs": np.abs, "floor": np.floor, "ceil": np.ceil, "rint": np.rint}
_ORDERS: dict[str, np.ufunc] = {
    "olt": np.less, "ole": np.less_equal, "ogt": np.greater, "oge": np.greater_equal, "oeq": np.equal,
    "ne": np.not_equal}


def _rounded(x: Floats) -> NDArray[np.int32]:
    with np.errstate(invalid="ignore"):     # NaN becomes an arbitrary integer
        return np.rint(x).astype(np.int32)


class _NumPy:
    """Machine of NumPy arrays."""
    fma = staticmethod(lambda a, b, c: fma(a, np.float32(b), np.float32(c)))
    # These follow CPUs: np.maximum differs for NaN and for -0.
    max = staticmethod(lambda a, b: np.where(a > np.float32(b), a, np.float32(b)))
    min = staticmethod(lambda a, b: np.where(a < np.float32(b), a, np.float32(b)))
    unary = staticmethod(lambda word, x: _UNARY[word](x))
    compare = staticmethod(lambda a, order, b: _ORDERS[order](a, b))
    select = staticmethod(np.where)
    like = staticmethod(lambda x, number: np.float32(number))
    bits = staticmethod(lambda x: x.view(np.int32))
    from_bits = staticmethod(lambda bits: bits.view(np.float32))
    to_float = staticmethod(lambda ints: ints.astype(np.float32))
    round = staticmethod(_rounded)
    parts = staticmethod(lambda x: (n := _rounded(x), x - n.astype(np.float32)))
    scaled = staticmethod(lambda x, n: (x.view(np.int32) + (n << 23)).view(np.float32))
    narrowed = staticmethod(lambda dtype, x: load_meaning(dtype, store_meaning(dtype, x)))


NUMPY = _NumPy()


def _float32(numbers: Any) -> Floats:
    return np.asarray(numbers, np.float32)


def load_meaning(dtype: str, stored: NDArray[Any]) -> Floats:
    """Convert stored elements to float32, as Lanes.load does; bfloat16 is stored as uint16."""
    if dtype == "bfloat16":
        return from_bfloat16(stored)
    return stored.astype(np.float32)


def store_meaning(dtype: str, result: Floats) -> NDArray[Any]:
    """Convert float32 to the stored dtype, as Lanes.store does: half to even, integers saturated."""
    if dtype in ("uint8", "int8", "bool"):
        low, high = {"uint8": (0, 255), "int8": (-128, 127), "bool": (0, 1)}[dtype]
        return np.clip(np.rint(result), low, high).astype(dtype)
    if dtype == "bfloat16":
        return to_bfloat16(result)
    return result.astype(dtype)
