"""The contract of a problem: what is to be computed on tensors in memory, whoever computes it and however.

Lowering turns each node of a graph into problems. A backend has a kernel for each kind of problem, or several to choose
from. A problem says nothing of instructions, tiles or how constants are packed.
"""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from engines.lowering.epilogue.program import EpilogueProgram, load_meaning, store_meaning
from engines.lowering.problems.view import FLOATS, View

Array = NDArray[Any]
# precision -> how the tensors that are multiplied in it are stored
STORED = {"int8": "uint8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Problem(ABC):
    """A frozen dataclass: equal problems share a kernel, and repr() is part of its key in the timing cache."""
    family: ClassVar[str] = ""
    computes_on: ClassVar[Collection[str]] = FLOATS     # how its inputs and outputs may be stored

    reads: ClassVar[tuple[str, ...]] = ("x",)           # the fields that hold views of its inputs ...
    writes: ClassVar[tuple[str, ...]] = ("y",)          # ... and outputs: each a View, a tuple of them, or None

    @property
    def inputs(self) -> tuple[View, ...]:
        """The tensors that a kernel reads, in the order of its operands."""
        return self._views(self.reads)

    @property
    def outputs(self) -> tuple[View, ...]:
        """The tensors that a kernel writes, in the order of its operands."""
        return self._views(self.writes)

    def _views(self, names: tuple[str, ...]) -> tuple[View, ...]:
        fields = (getattr(self, name) for name in names)
        return tuple(view for field in fields for view in (field if isinstance(field, tuple) else (field,)) if view)

    @property
    def misfit(self) -> str:
        """A stored dtype that kernels would take for another; "" if there is none, as there must be to emit one."""
        return next((view.dtype for view in (*self.inputs, *self.outputs) if view.dtype not in self.computes_on), "")

    @property
    def macs(self) -> int:
        """Multiply-accumulates an item; families without any need not say."""
        return 0

    @property
    def bytes(self) -> int:
        """Bytes of an item that move: inputs and outputs, each once."""
        return sum(view.size * math.prod(view.shape) for view in (*self.inputs, *self.outputs))

    @abstractmethod
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The exact meaning, in NumPy: arrays [batch, *shape] as they are stored -> the same. Integers bit for bit.

        constants: by name; each family says which. "program": those of its program, float32 [1] or [channels] each.
        """


@dataclass(frozen=True)
class UnaryProblem(Problem):
    """One tensor, x, becomes another, y."""
    x: View
    y: View


@dataclass(frozen=True)
class ImageProblem(UnaryProblem):
    """What the families on images share: x, its channels last, becomes y by way of an epilogue program.

    operands: of the program, shaped as y unless a family says otherwise.
    """
    operands: tuple[View, ...]
    program: EpilogueProgram
    reads = ("x", "operands")

    def finished(self, accumulator: Array, operands: Sequence[Array], constants: Mapping[str, Any]) -> Array:
        """What the program makes of the accumulators [batch, *y.shape], as it is stored."""
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        return store_meaning(self.y.dtype, self.program.meaning(accumulator, others, constants["program"]))
