"""Elementwise problems, and those along an axis or row: programs, integers, cumulative sums, top-k.

    Pointwise       y[n, i, ..., c] = program(sources[n, i, ..., c]; constants[c])      chains, casts, broadcasts
    Integers        y[n, i, ...] = operation(sources[n, i, ...])        in int64, for any stored dtype
    CumulativeSum   y[n, o, i, j] = x[n, o, 0, j] + ... + x[n, o, i, j] reverse: from the end; or a product
    TopK            the k largest or smallest of a row in order, and their indices; the first among equals

int64 does not round, unlike float32, and truncating its results to fewer bits wraps as arithmetic in those bits would.
Integers are token ids, positions and masks; booleans are stored as 1 and 0.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.lowering.epilogue.program import EpilogueProgram, load_meaning, store_meaning
from infer_server.engines.lowering.problems.problem import Array, Problem, UnaryProblem
from infer_server.engines.lowering.problems.view import FLOATS, View

UNSIGNED = ("bool", "uint8")
STORED_INTEGERS = (*UNSIGNED, "int8", "int32", "int64")         # float32 is accepted, too, and truncated
CASTS = ("bool", "int8", "int32", "int64")          # non-float inputs of programs, for casts and Where
WIDEST_TOP_K = 1 << 18      # elements per row: kernels keep a number for each on a thread's stack
WIDEST_OF_FEW = 1 << 22     # elements per row for k up to MOST_OF_WIDE: a number per block of elements
MOST_OF_WIDE = 1 << 11


@dataclass(frozen=True)
class BroadcastProblem(Problem):
    """Elementwise problem. Sources and output have one shape; a source's stride of 0 broadcasts."""
    sources: tuple[View, ...]
    output: View
    reads = ("sources",)
    writes = ("output",)


@dataclass(frozen=True)
class Pointwise(BroadcastProblem):
    """Epilogue program on every element. `program.accumulator` is False.

    uniform: all constants are scalars; otherwise they are indexed by the innermost axis.
    """
    program: EpilogueProgram
    uniform: bool = False
    family = "pointwise"
    computes_on = (*FLOATS, *CASTS)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        operands = [load_meaning(view.dtype, x) for view, x in zip(self.sources, inputs, strict=True)]
        return (store_meaning(self.output.dtype, self.program.meaning(None, operands, constants["program"])),)


def _quotient(a: Any, b: Any) -> Any:
    """Divide with truncation toward zero; x / 0 is 0."""
    exact = np.where(b == 0, 1, b)
    return np.where(b == 0, 0, (a - np.fmod(a, exact)) // exact)


# Operations on int64; booleans are 1 or 0.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "copy": lambda x: x,
    "not": lambda x: x == 0,
    "negate": np.negative,
    "invert": np.invert,
    "absolute": np.abs,
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _quotient,
    "modulo": np.mod,
    "remainder": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "greatest": np.maximum,
    "least": np.minimum,
    "equal": np.equal,
    "less": np.less,
    "less_or_equal": np.less_equal,
    "greater": np.greater,
    "greater_or_equal": np.greater_equal,
    "where": lambda c, a, b: np.where(c != 0, a, b),
}


@dataclass(frozen=True)
class Integers(BroadcastProblem):
    """Integer operation on every element. `operation` is a key of OPERATIONS."""
    operation: str
    family = "integers"
    computes_on = (*STORED_INTEGERS, "float32")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            result = OPERATIONS[self.operation](*(x.astype(np.int64) for x in inputs))
            return (np.asarray(result).astype(self.output.dtype),)


@dataclass(frozen=True)
class CumulativeSum(UnaryProblem):
    """Cumulative sum or product. x and y have one shape and dtype; `axis` is an axis of the item.

    Additions are in order, so that results round as NumPy's; integers wrap. exclusive: without the element itself.
    product: products instead of sums.
    """
    axis: int
    exclusive: bool = False
    reverse: bool = False
    product: bool = False
    family = "cumulative_sum"
    computes_on = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        axis = self.axis + 1
        x = np.flip(inputs[0], axis) if self.reverse else inputs[0]
        x = np.moveaxis(x, axis, 0)
        with np.errstate(over="ignore"):
            sums = (np.multiply if self.product else np.add).accumulate(x, dtype=x.dtype)
        if self.exclusive:
            sums = np.concatenate([np.full_like(sums[:1], self.product), sums[:-1]])
        sums = np.moveaxis(sums, 0, axis)
        return (np.ascontiguousarray(np.flip(sums, axis) if self.reverse else sums),)


@dataclass(frozen=True)
class TopK(Problem):
    """The k largest or smallest elements of rows: x [..., width], indices int64 [..., k], values [..., k] or None.

    The least int32 and int64, -2**31 and -2**63, compare equal to the number above them.
    """
    x: View
    values: View | None
    indices: View
    largest: bool = True
    family = "top_k"
    wide = ("float64", "int64", "uint32")       # ordered by keys of 64 bits
    computes_on = ("float32", "float16", "bfloat16", "int8", "int16", "int32", "uint8", "uint16", *wide)
    writes = ("values", "indices")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, = inputs
        real = load_meaning(self.x.dtype, x) if self.x.dtype in FLOATS and self.x.dtype != "uint8" else x
        rising = real if not self.largest else -real if real.dtype.kind == "f" else np.invert(real)
        order = np.argsort(rising, -1, kind="stable")[..., :self.indices.shape[-1]]
        values = (np.take_along_axis(x, order, -1),) if self.values else ()
        return (*values, order.astype(np.int64))
