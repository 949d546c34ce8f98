"""What happens to a value on its way to memory: a straight line of float32 instructions, shared by every kernel.

    value 0 = the accumulator (of a contraction or a pool)            conv + bias + residual + ReLU:
    value i = instruction i of values, operands and constants           1: fma(acc, scale, bias)
                                                                        2: fma(operand 0, its scale, value 1)
                                                                        3: max(value 2, 0)
An *operand* is another tensor read at the same position (already widened to float32, not yet dequantised). A *constant*
is a vector of one float32 per channel in memory (a number is repeated), so that a kernel's text depends on shapes only.

Each instruction says what it means (numpy, float32) and how it is emitted; both round alike, so that a kernel equals
its reference bit for bit on every machine. A new pointwise function is a new instruction here, never a change to a
kernel.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import to_float
from engines.lowering.epilogue.functions import FUNCTIONS, Meaning, fma

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Ref:
    """Where an instruction finds an argument: kind is "value", "operand" or "constant"."""
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind[0]}{self.index}"


@dataclass(frozen=True)
class Instruction:
    op: str
    args: tuple[Ref, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class EpilogueProgram:
    """`accumulator`: value 0 is given by the kernel. The result is the last value (or operand 0 if there is none)."""
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
        """Whether it has a function that is a dozen machine instructions, each waiting for the one before."""
        return any(instruction.op in FUNCTIONS for instruction in self.instructions)

    def meaning(self, accumulator: Floats | None, operands: Sequence[Floats], constants: Sequence[Floats]) -> Floats:
        """The reference: arrays [..., channels], constants [channels] -> the result before it is stored."""
        values: list[Any] = [np.asarray(accumulator, np.float32)] if self.accumulator else []
        found = {"value": values, "operand": operands, "constant": constants}
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            for instruction in self.instructions:
                arguments = [np.asarray(found[a.kind][a.index], np.float32) for a in instruction.args]
                values.append(INSTRUCTIONS[instruction.op].meaning(*arguments))
        return np.asarray(found[self.result.kind][self.result.index], np.float32)

    def emit(self, isa: Isa, accumulator: Value | None, operands: Sequence[Value], constants: Sequence[Value]) -> Value:
        """The same on one vector of channels."""
        values = [accumulator] if self.accumulator else []
        found: dict[str, Sequence[Any]] = {"value": values, "operand": operands, "constant": constants}
        for instruction in self.instructions:
            arguments = [found[a.kind][a.index] for a in instruction.args]
            values.append(INSTRUCTIONS[instruction.op].emit(isa, *arguments))
        result: Value = found[self.result.kind][self.result.index]
        return result


class ProgramBuilder:
    """Writes a program an instruction at a time; equal instructions, and constants of equal bytes, are kept once."""

    def __init__(self, accumulator: bool) -> None:
        self._accumulator = accumulator
        self._instructions: list[Instruction] = []
        self._operands = 0
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
        for i, known in enumerate(self.constants):
            if known.tobytes() == array.tobytes():
                return Ref("constant", i)
        self.constants.append(array)
        return Ref("constant", len(self.constants) - 1)

    def add(self, op: str, *args: Ref | float) -> Ref:
        refs = tuple(a if isinstance(a, Ref) else self.constant(a) for a in args)
        assert op in INSTRUCTIONS, f"no instruction named {op}"
        instruction = Instruction(op, refs)
        if instruction not in self._instructions:
            self._instructions.append(instruction)
        return Ref("value", self._instructions.index(instruction) + self._accumulator)

    def program(self, result: Ref | None = None) -> EpilogueProgram:
        """The program as written; `result` is what it gives, if that is not what was written last."""
        written = EpilogueProgram(tuple(self._instructions), self._operands, len(self.constants), self._accumulator)
        if result is not None and result != written.result:
            self.add("mul", result, self.constant(1.0))
        return EpilogueProgram(tuple(self._instructions), self._operands, len(self.constants), self._accumulator)


# ---- instructions
def _truth(answer: Any) -> Any:
    return np.asarray(answer).astype(np.float32)


def _truth_emit(a: Value, predicate: str, b: Value) -> Value:
    return a.f.select(a.compare(predicate, b), a.like(1), a.like(0))


def _through(dtype: str, x: Any) -> Floats:
    return load_meaning(dtype, store_meaning(dtype, np.asarray(x, np.float32)))


def _unary(numpy_function: Callable[..., Any], word: str) -> Meaning:
    return Meaning(numpy_function, lambda isa, x: isa.unary(word, x))


INSTRUCTIONS: dict[str, Meaning] = {
    "add": Meaning(lambda a, b: a + b, lambda isa, a, b: a + b),
    "sub": Meaning(lambda a, b: a - b, lambda isa, a, b: a - b),
    "mul": Meaning(lambda a, b: a * b, lambda isa, a, b: a * b),
    "div": Meaning(lambda a, b: a / b, lambda isa, a, b: a / b),
    "fma": Meaning(fma, lambda isa, a, b, c: isa.fma(a, b, c)),
    # a > b ? a : b, as the machine does it (numpy's maximum differs for NaN and for -0)
    "max": Meaning(lambda a, b: np.where(a > b, a, b), lambda isa, a, b: isa.max(a, b)),
    "min": Meaning(lambda a, b: np.where(a < b, a, b), lambda isa, a, b: isa.min(a, b)),
    # comparisons answer 1 or 0
    "less": Meaning(lambda a, b: _truth(a < b), lambda isa, a, b: _truth_emit(a, "olt", b)),
    "less_or_equal": Meaning(lambda a, b: _truth(a <= b), lambda isa, a, b: _truth_emit(a, "ole", b)),
    "equal": Meaning(lambda a, b: _truth(a == b), lambda isa, a, b: _truth_emit(a, "oeq", b)),
    "where_positive": Meaning(lambda t, a, b: np.where(t > 0, a, b),
                              lambda isa, t, a, b: t.f.select(t.compare("ogt", 0), a, b)),
    "sqrt": _unary(np.sqrt, "sqrt"),
    "abs": _unary(np.abs, "fabs"),
    "floor": _unary(np.floor, "floor"),
    "ceil": _unary(np.ceil, "ceil"),
    "round": _unary(np.rint, "rint"),
    # to the nearest number of 16 bits, beyond the greatest to infinity
    "float16": Meaning(lambda x: _through("float16", x), lambda isa, x: isa.half_to_float(isa.float_to_half(x))),
    "bfloat16": Meaning(lambda x: _through("bfloat16", x),
                        lambda isa, x: to_float(isa, "bfloat16", isa.float_to_bfloat(x))),
    **FUNCTIONS,
}


def load_meaning(dtype: str, stored: NDArray[Any]) -> Floats:
    """What is stored -> float32, as Lanes.load does it; bfloat16 is stored as uint16."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def store_meaning(dtype: str, result: Floats) -> NDArray[Any]:
    """float32 -> the stored dtype, as Lanes.store does it: halves to even, integers saturated."""
    if dtype in ("uint8", "int8", "bool"):
        low, high = {"uint8": (0, 255), "int8": (-128, 127), "bool": (0, 1)}[dtype]
        return np.clip(np.rint(result), low, high).astype(dtype)
    if dtype == "bfloat16":
        bits = result.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return result.astype(dtype)
