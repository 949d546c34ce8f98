"""Inner step of a contraction for each precision: what one iteration of the K loop loads and accumulates.

    int8   4 bytes of u8 x 4 of s8 -> int32      exact
    fp32   1 float32 -> float32
    bf16   2 bfloat16 -> float32 on machines with vdpbf16ps; else 1 bfloat16 widened to float32
    fp16   1 float16 widened to float32; fp32 may have int8 weights, which are widened too
    int16  2 int16 -> int32                      exact while the caller keeps sums below 2**31

A step reads `step_bytes` of a pixel, which all lanes share, and `step_bytes` of weights for each lane.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import to_float
from infer_server.engines.backends.llvm.kernels.common.access import hidden
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, FLOAT, I1, I8, I16, I32, vector
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.epilogue.program import store_meaning
from infer_server.engines.lowering.problems.view import SIZES

Operand = tuple[Value, ...]
LONG_PASS = 48      # products (about a hundred instructions) in a loop body that make the loop's own four negligible
MOST_TURNS = 4      # upper limit of unrolling


@dataclass(frozen=True)
class Arithmetic(ABC):
    """Element types and instructions of a contraction's inner step."""
    dtype: str                  # stored dtype of x
    weights_dtype: str
    elements: int = 1           # elements of x in a step
    exact: ClassVar[bool] = False           # True for integers: accumulators are int32
    exact_end: ClassVar[bool] = False       # True if elements past a run must not be used, even with zero weights

    @property
    def step_bytes(self) -> int:
        return self.elements * SIZES[self.dtype]

    def zero(self, isa: Isa, of: Value) -> Value:
        return of.f.constant(0, isa.ints if self.exact else isa.floats)

    @abstractmethod
    def pixel(self, isa: Isa, address: Value) -> Operand:
        """Load one step of a pixel into every lane."""

    def last_pixel(self, isa: Isa, address: Value) -> Operand:
        """Load the last step of a run, without the elements past its end if `exact_end`."""
        return self.pixel(isa, address)

    @abstractmethod
    def weights(self, isa: Isa, address: Value) -> Operand:
        """Load one step of weights, a different one in each lane."""

    def weight_bytes(self, isa: Isa) -> int:
        """Return the bytes of one step of weights for one vector of output channels."""
        return isa.lanes * self.elements * SIZES[self.weights_dtype]

    @abstractmethod
    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        """Return acc + the dot products of the pixel and the weights in each lane."""
        ...

    def finish(self, isa: Isa, acc: Value) -> Value:
        """Convert the accumulator to float32."""
        return isa.to_float(acc) if self.exact else acc

    def store_weights(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Convert weights to the dtype in which they are stored."""
        if self.exact:
            return np.asarray(weights, self.weights_dtype)
        return store_meaning(self.weights_dtype, np.asarray(weights, np.float32))

    def ready(self, isa: Isa, weights: NDArray[Any]) -> NDArray[Any]:
        """Convert stored weights [..., lanes, elements] to the order and form that `weights` loads."""
        return weights


class Int8(Arithmetic):
    """Products of u8 and s8 by the machine's dot4."""
    exact = True

    def pixel(self, isa: Isa, address: Value) -> Operand:
        return isa.pixel(address)

    def weights(self, isa: Isa, address: Value) -> Operand:
        return isa.ready_weights(address)

    def weight_bytes(self, isa: Isa) -> int:
        return isa.ready_bytes

    def ready(self, isa: Isa, weights: NDArray[Any]) -> NDArray[Any]:
        return isa.ready(weights)

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.dot4(acc, pixel, weights)


class Quads(Int8):
    """INT8 products with weights stored as bytes on every machine.

    If dot4 needs wider weights, the loads widen them: more instructions, fewer bytes. Kernels that read each weight
    once from beyond the caches gain by it.
    """

    def weights(self, isa: Isa, address: Value) -> Operand:
        return isa.spread(address.f.load(vector(isa.bytes, I8), address, isa.bytes, "weights"))

    def weight_bytes(self, isa: Isa) -> int:
        return isa.bytes

    def ready(self, isa: Isa, weights: NDArray[Any]) -> NDArray[Any]:
        return weights


class PairedQuads(Quads):
    """INT8 products by paired_dot; the caller keeps every sum of two neighbouring products within 16 bits."""

    def pixel(self, isa: Isa, address: Value) -> Operand:
        words = address.f.splat(address.f.load(I32, address, hint="word"), isa.lanes)
        return (address.f.cast("bitcast", words, vector(isa.bytes, I8), "pixel"),)

    def weights(self, isa: Isa, address: Value) -> Operand:
        return (address.f.load(vector(isa.bytes, I8), address, isa.bytes, "weights"),)

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.paired_dot(acc, *pixel, *weights)


class SignedQuads(PairedQuads):
    """Products of signed bytes from -127 to 127, on machines with paired_dot and vpsignb.

    The sign of x moves to the weight. |x| then has 7 bits, so that no sum of two products saturates.
    """

    def pixel(self, isa: Isa, address: Value) -> Operand:
        quads, = super().pixel(isa, address)
        return quads.f.call(quads.type, f"llvm.abs.v{isa.bytes}i8", quads, quads.f.constant(0, I1), hint="size"), quads

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        size, sign = pixel
        turned = acc.f.call(sign.type, "llvm.x86.avx2.psign.b", *weights, sign, hint="turned")
        return isa.paired_dot(acc, size, turned)


class Pairs(Arithmetic):
    """Base class of steps of two 16-bit elements a lane, which are loaded as a 32-bit word."""
    element: ClassVar[str]      # LLVM type

    def _pairs(self, isa: Isa, words: Value) -> Operand:
        return (words.f.cast("bitcast", words, vector(2 * isa.lanes, self.element), "pairs"),)

    def pixel(self, isa: Isa, address: Value) -> Operand:
        return self._pairs(isa, address.f.splat(address.f.load(I32, address, hint="word"), isa.lanes))

    def weights(self, isa: Isa, address: Value) -> Operand:
        return self._pairs(isa, address.f.load(isa.ints, address, isa.bytes, "weights"))


class Int16(Pairs):
    """Products of int16 by the machine's dot2."""
    exact, element = True, I16

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.dot2(acc, pixel[0], weights[0])


class BytePairs(Int16):
    """Products of int16 and weights that are stored as bytes; the loads widen them."""

    def weights(self, isa: Isa, address: Value) -> Operand:
        stored = address.f.load(vector(2 * isa.lanes, I8), address, 2 * isa.lanes, "weights")
        return (address.f.cast("sext", stored, vector(2 * isa.lanes, I16), "pairs"),)


class PairsOfBfloat(Pairs):
    """Products of bfloat16 by vdpbf16ps, two a lane."""
    exact_end, element = True, "bfloat"

    def last_pixel(self, isa: Isa, address: Value) -> Operand:
        """Load one element and a zero: an element past the end may be NaN, and NaN times a zero weight is NaN."""
        one = address.f.cast("zext", address.f.load(I16, address, hint="element"), I32, "word")
        return self._pairs(isa, address.f.splat(one, isa.lanes))

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * isa.bytes}"
        return acc.f.call(vector(isa.lanes, FLOAT), name, acc, *pixel, *weights, hint="acc")


class Widened(Arithmetic):
    """Products in float32 of any stored float; the loads widen."""

    def pixel(self, isa: Isa, address: Value) -> Operand:
        one = address.f.load(ELEMENTS[self.dtype], address, hint="element")
        return (to_float(isa, self.dtype, address.f.splat(one, isa.lanes)),)

    def weights(self, isa: Isa, address: Value) -> Operand:
        stored = vector(isa.lanes, ELEMENTS[self.weights_dtype])
        loaded = address.f.load(stored, address, isa.lanes * SIZES[self.weights_dtype], "weights")
        return (to_float(isa, self.weights_dtype, loaded),)

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.fma(pixel[0], weights[0], acc)


INT8 = Int8("uint8", "int8", 4)
QUADS = Quads("uint8", "int8", 4)
PAIRED_QUADS = PairedQuads("uint8", "int8", 4)
SIGNED_QUADS = SignedQuads("int8", "int8", 4)
INT16 = Int16("int16", "int16", 2)
BYTE_PAIRS = BytePairs("int16", "int8", 2)
FP32 = Widened("float32", "float32")
UPCAST = Widened("bfloat16", "bfloat16")
_PAIRS = PairsOfBfloat("bfloat16", "bfloat16", 2)
_BY_PRECISION = {"int8": INT8, "int16": INT16, "fp32": FP32, "fp16": Widened("float16", "float16"), "bf16": UPCAST}


def arithmetic_for(precision: str, isa: Isa, weights: str = "") -> Arithmetic:
    """Return the arithmetic of a precision; weights: their stored dtype, if it is narrower."""
    if weights:
        return replace(_BY_PRECISION[precision], weights_dtype=weights)
    return _PAIRS if precision == "bf16" and isa.bf16 else _BY_PRECISION[precision]


def k_turns(f: Function, count: int, products: int, **carried: dict[Any, Value]) -> Iterator[None]:
    """Emit a K loop of `count` iterations with `products` products each, unrolled if they are few.

    A loop has four instructions of its own. On a core that runs two threads they take issue slots from the products.
    The memory barrier between unrolled iterations keeps LLVM from hoisting their loads, which would exhaust the
    registers.
    """
    together = 1 if isinstance(count, SymbolicInt) else min(max(LONG_PASS // max(products, 1), 1), MOST_TURNS)
    for turns, passes in ((together, count // together), (count % together, 1)):
        if isinstance(passes, SymbolicInt) or turns and passes:
            for _ in f.loop("k", passes, **carried):
                for turn in range(turns):
                    if turn:
                        f.write('call void asm sideeffect "", "~{memory}"()')
                    yield


def add_step(arithmetic: Arithmetic, isa: Isa, acc: dict[tuple[int, int], Value], x: Value, pixels: Mapping[int, int],
             w: Value, load_weights: Callable[[Value], list[Operand]], last: bool = False) -> None:
    """Accumulate one step: acc[pixel, vector] += x[pixel] * w[vector].

    pixels: the byte offset of each pixel from x. load_weights: load a step of all vectors from an address. last: the
    run ends in this step.
    """
    weights = load_weights(w)
    for number, (p, offset) in enumerate(pixels.items()):
        pixel = (arithmetic.last_pixel if last else arithmetic.pixel)(isa, x + offset)
        if number and len(weights[0]) > 1:      # too many registers to keep; reload for each pixel
            weights = load_weights(hidden(w))
        for v, operand in enumerate(weights):
            acc[p, v] = arithmetic.dot(isa, acc[p, v], pixel, operand)
