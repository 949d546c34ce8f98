"""The inner step of a contraction, one table per arithmetic: what one turn of the K loop reads and accumulates.

    int8   4 bytes of u8 x 4 of s8 -> int32      exact
    fp32   1 float32 -> float32
    bf16   2 bfloat16 -> float32 where the machine has vdpbf16ps; else 1 bfloat16 widened to float32
    fp16   1 float16 widened to float32; fp32 may have int8 weights, widened likewise
    int16  2 int16 -> int32                      exact while the caller keeps sums below 2**31

A step reads `step_bytes` of a pixel, the same for all lanes, and `step_bytes` of weights for each lane.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import to_float
from engines.backends.llvm.kernels.common.access import hidden
from engines.codegen.extents import Extent
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import ELEMENTS, FLOAT, I1, I8, I16, I32, vector
from engines.lowering.epilogue.program import store_meaning
from engines.lowering.problems.view import SIZES

Operand = tuple[Value, ...]
LONG_PASS = 48      # products, of some hundred instructions: a loop's own four are no matter beside them
MOST_TURNS = 4


@dataclass(frozen=True)
class Arithmetic(ABC):
    dtype: str                  # of x as stored
    weights_dtype: str
    elements: int = 1           # of x in a step
    exact: ClassVar[bool] = False           # integers: sums are int32
    exact_end: ClassVar[bool] = False       # what lies behind a run must not be read, though its weights be zero

    @property
    def step_bytes(self) -> int:
        return self.elements * SIZES[self.dtype]

    def zero(self, isa: Isa, of: Value) -> Value:
        return of.f.constant(0, isa.ints if self.exact else isa.floats)

    @abstractmethod
    def pixel(self, isa: Isa, address: Value) -> Operand:
        """One step of one pixel, in every lane."""

    def last_pixel(self, isa: Isa, address: Value) -> Operand:
        """The same where the run ends inside the step, if it has an `exact_end`."""
        return self.pixel(isa, address)

    @abstractmethod
    def weights(self, isa: Isa, address: Value) -> Operand:
        """One step of weights, each lane its own."""

    def weight_bytes(self, isa: Isa) -> int:
        """Of one step of one vector of couts."""
        return isa.lanes * self.elements * SIZES[self.weights_dtype]

    @abstractmethod
    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        ...

    def finish(self, isa: Isa, acc: Value) -> Value:
        """The accumulator as float32."""
        return isa.to_float(acc) if self.exact else acc

    def store_weights(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Weights in the dtype that they are multiplied in."""
        if self.exact:
            return np.asarray(weights, self.weights_dtype)
        return store_meaning(self.weights_dtype, np.asarray(weights, np.float32))

    def ready(self, isa: Isa, weights: NDArray[Any]) -> NDArray[Any]:
        """[..., lanes, elements] stored weights -> the same in the order and form that `weights` loads."""
        return weights


class Int8(Arithmetic):
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
    """Weights as bytes on every machine: where dot4 wants them wider, the loads widen them, for more instructions and
    fewer bytes. For weights that a kernel reads once for each time that they come from beyond the caches."""

    def weights(self, isa: Isa, address: Value) -> Operand:
        return isa.spread(address.f.load(vector(isa.bytes, I8), address, isa.bytes, "weights"))

    def weight_bytes(self, isa: Isa) -> int:
        return isa.bytes

    def ready(self, isa: Isa, weights: NDArray[Any]) -> NDArray[Any]:
        return weights


class PairedQuads(Quads):
    """By paired_dot, where the caller keeps every sum of two neighbours' products within 16 bits."""

    def pixel(self, isa: Isa, address: Value) -> Operand:
        words = address.f.splat(address.f.load(I32, address, hint="word"), isa.lanes)
        return (address.f.cast("bitcast", words, vector(isa.bytes, I8), "pixel"),)

    def weights(self, isa: Isa, address: Value) -> Operand:
        return (address.f.load(vector(isa.bytes, I8), address, isa.bytes, "weights"),)

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.paired_dot(acc, *pixel, *weights)


class SignedQuads(PairedQuads):
    """Both factors signed bytes from -127 to 127, on machines with paired_dot and vpsignb. The first one's sign goes to
    the second: then it has 7 bits, and no sum of two products saturates."""

    def pixel(self, isa: Isa, address: Value) -> Operand:
        quads, = super().pixel(isa, address)
        return quads.f.call(quads.type, f"llvm.abs.v{isa.bytes}i8", quads, quads.f.constant(0, I1), hint="size"), quads

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        size, sign = pixel
        turned = acc.f.call(sign.type, "llvm.x86.avx2.psign.b", *weights, sign, hint="turned")
        return isa.paired_dot(acc, size, turned)


class Pairs(Arithmetic):
    """Two elements of 16 bits a lane, which are loaded as a word."""
    element: ClassVar[str]      # LLVM's type

    def _pairs(self, isa: Isa, words: Value) -> Operand:
        return (words.f.cast("bitcast", words, vector(2 * isa.lanes, self.element), "pairs"),)

    def pixel(self, isa: Isa, address: Value) -> Operand:
        return self._pairs(isa, address.f.splat(address.f.load(I32, address, hint="word"), isa.lanes))

    def weights(self, isa: Isa, address: Value) -> Operand:
        return self._pairs(isa, address.f.load(isa.ints, address, isa.bytes, "weights"))


class Int16(Pairs):
    exact, element = True, I16

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        return isa.dot2(acc, pixel[0], weights[0])


class BytePairs(Int16):
    """By weights that are bytes in memory: the loads widen them."""

    def weights(self, isa: Isa, address: Value) -> Operand:
        stored = address.f.load(vector(2 * isa.lanes, I8), address, 2 * isa.lanes, "weights")
        return (address.f.cast("sext", stored, vector(2 * isa.lanes, I16), "pairs"),)


class PairsOfBfloat(Pairs):
    """vdpbf16ps: two products a lane."""
    exact_end, element = True, "bfloat"

    def last_pixel(self, isa: Isa, address: Value) -> Operand:
        """One element and a zero: behind it may lie a NaN, and NaN times a zero weight is NaN."""
        one = address.f.cast("zext", address.f.load(I16, address, hint="element"), I32, "word")
        return self._pairs(isa, address.f.splat(one, isa.lanes))

    def dot(self, isa: Isa, acc: Value, pixel: Operand, weights: Operand) -> Value:
        name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * isa.bytes}"
        return acc.f.call(vector(isa.lanes, FLOAT), name, acc, *pixel, *weights, hint="acc")


class Widened(Arithmetic):
    """float32 arithmetic on any stored float: the loads widen."""

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
_PAIRS = PairsOfBfloat("bfloat16", "bfloat16", 2)
_BY_PRECISION = {"int8": INT8, "int16": INT16, "fp32": FP32, "fp16": Widened("float16", "float16"),
                 "bf16": Widened("bfloat16", "bfloat16")}


def arithmetic_for(precision: str, isa: Isa, weights: str = "") -> Arithmetic:
    """The step for a precision; weights: how they are kept in memory, where that is narrower."""
    if weights:
        return replace(_BY_PRECISION[precision], weights_dtype=weights)
    return _PAIRS if precision == "bf16" and isa.bf16 else _BY_PRECISION[precision]


def k_turns(f: Function, count: int, products: int, **carried: dict[Any, Value]) -> Iterator[None]:
    """The turns of a K loop, each of so many products: several of short ones in a pass, for a pass takes instructions
    of its own. A core that has another thread beside this one issues half as many, and then they take time from the
    products.

    Each turn loads for itself: LLVM would load for several first, and run out of registers.
    """
    together = 1 if isinstance(count, Extent) else min(max(LONG_PASS // max(products, 1), 1), MOST_TURNS)
    for turns, passes in ((together, count // together), (count % together, 1)):
        if isinstance(passes, Extent) or turns and passes:
            for _ in f.loop("k", passes, **carried):
                for turn in range(turns):
                    if turn:
                        f.write('call void asm sideeffect "", "~{memory}"()')
                    yield


def add_step(arithmetic: Arithmetic, isa: Isa, acc: dict[tuple[int, int], Value], x: Value, pixels: Mapping[int, int],
             w: Value, load_weights: Callable[[Value], list[Operand]], last: bool = False) -> None:
    """One step of each pixel meets one step of weights: acc[pixel, vector] += x[pixel] * w[vector].

    pixels: bytes from x to each. load_weights: a step of all vectors from an address. last: the run ends in this step.
    """
    weights = load_weights(w)
    for number, (p, offset) in enumerate(pixels.items()):
        pixel = (arithmetic.last_pixel if last else arithmetic.pixel)(isa, x + offset)
        if number and len(weights[0]) > 1:      # too wide to keep: each pixel's products load them
            weights = load_weights(hidden(w))
        for v, operand in enumerate(weights):
            acc[p, v] = arithmetic.dot(isa, acc[p, v], pixel, operand)
