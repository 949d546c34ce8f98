"""Interface of a problem: a computation on tensors in memory, independent of how a backend implements it.

Lowering turns each node of a graph into problems. A backend has one or more kernels for each class of problems.
Problems do not determine instructions, tilings or the packing of constants.
"""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from infer_server.engines.lowering.epilogue.program import EpilogueProgram, load_meaning, store_meaning
from infer_server.engines.lowering.problems.view import FLOATS, View

Array = NDArray[Any]
# precision -> stored dtype of the factors
STORED = {"int8": "uint8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Problem(ABC):
    """Computation on views of tensors, a frozen dataclass.

    Equal problems share a kernel, and repr() is part of a kernel's key in the timing cache.
    """
    family: ClassVar[str] = ""
    computes_on: ClassVar[Collection[str]] = FLOATS     # stored dtypes that kernels support

    reads: ClassVar[tuple[str, ...]] = ("x",)           # fields with the views of its inputs ...
    writes: ClassVar[tuple[str, ...]] = ("y",)          # ... and outputs: each a View, a tuple of them, or None

    @property
    def inputs(self) -> tuple[View, ...]:
        """Views of the tensors that a kernel reads, in the order of its operands."""
        return self._views(self.reads)

    @property
    def outputs(self) -> tuple[View, ...]:
        """Views of the tensors that a kernel writes, in the order of its operands."""
        return self._views(self.writes)

    def _views(self, names: tuple[str, ...]) -> tuple[View, ...]:
        fields = (getattr(self, name) for name in names)
        return tuple(view for field in fields for view in (field if isinstance(field, tuple) else (field,)) if view)

    @property
    def unsupported_dtype(self) -> str:
        """First stored dtype that kernels do not support, or "" if the problem can be compiled."""
        return next((view.dtype for view in (*self.inputs, *self.outputs) if view.dtype not in self.computes_on), "")

    @property
    def macs(self) -> int:
        """Multiply-accumulates per item; 0 for families without products."""
        return 0

    @property
    def bytes(self) -> int:
        """Bytes moved per item: inputs and outputs, each once."""
        return sum(view.size * math.prod(view.shape) for view in (*self.inputs, *self.outputs))

    @abstractmethod
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Compute the problem in NumPy, which defines its result; integers are equal bit for bit.

        Parameters
        ----------
        inputs : sequence of ndarray
            Inputs [batch, *shape] in their stored dtypes.
        constants : mapping
            Constants by name, as the class documents. "program": those of its program, each float32 [1] or [channels].

        Returns
        -------
        tuple of ndarray
            Outputs [batch, *shape] in their stored dtypes.
        """


@dataclass(frozen=True)
class UnaryProblem(Problem):
    """Problem with one input x and one output y."""
    x: View
    y: View


@dataclass(frozen=True)
class ImageProblem(UnaryProblem):
    """Problem with channels last in x, whose results go through an epilogue program.

    operands: further inputs of the program, shaped as y unless a class says otherwise.
    """
    operands: tuple[View, ...]
    program: EpilogueProgram
    reads = ("x", "operands")

    def finished(self, accumulator: Array, operands: Sequence[Array], constants: Mapping[str, Any]) -> Array:
        """Apply the program to accumulators [batch, *y.shape] and convert to the stored dtype."""
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        return store_meaning(self.y.dtype, self.program.meaning(accumulator, others, constants["program"]))
