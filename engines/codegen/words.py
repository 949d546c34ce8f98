"""Primitive operations that every target provides on values of `lanes` elements: vectors, or scalars if `lanes` is 1.

They implement the Machine that epilogue programs run on (engines/lowering/epilogue/functions.py). All operands but the
first may be Python numbers. A target overrides the operations for which it has better code than plain LLVM IR.
"""
from __future__ import annotations

from infer_server.engines.codegen.ir_builder import Number, Value
from infer_server.engines.codegen.types import FLOAT, I16, I32, overload, vector


class Primitives:
    """Primitive operations written in plain LLVM IR."""
    lanes: int
    natural = False     # True if tensors are aligned to their element size

    def of(self, element: str) -> str:
        """Return the LLVM type of a value: `element`, or a vector of `lanes` elements."""
        return element if self.lanes == 1 else vector(self.lanes, element)

    @property
    def ints(self) -> str:
        return self.of(I32)

    @property
    def floats(self) -> str:
        return self.of(FLOAT)

    def align(self, size: int) -> int:
        """Return an alignment in bytes that the address of an element of `size` bytes is certain to have."""
        return size if self.natural else 1

    # ---- float32
    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        return a.f.call(self.floats, f"llvm.fma.{overload(self.floats)}", a, a.like(b), a.like(c), hint="fma")

    # LLVM folds compare and select into one vmaxps; llvm.maxnum would add code for NaN.
    def max(self, a: Value, b: Value | Number) -> Value:
        return a.f.select(a.compare("ogt", b), a, a.like(b), "max")

    def min(self, a: Value, b: Value | Number) -> Value:
        return a.f.select(a.compare("olt", b), a, a.like(b), "min")

    def unary(self, word: str, x: Value) -> Value:
        """Call an LLVM intrinsic (sqrt, fabs, floor, ceil, rint) on all lanes of x; exact on every target."""
        return x.f.call(x.type, f"llvm.{word}.{overload(x.type)}", x, hint=word)

    def compare(self, a: Value, order: str, b: Value | Number) -> Value:
        return a.compare(order, b)

    def select(self, test: Value, a: Value, b: Value) -> Value:
        return a.f.select(test, a, b)

    def like(self, x: Value, number: Number) -> Value:
        return x.like(number)

    def bits(self, x: Value) -> Value:
        return x.f.cast("bitcast", x, self.ints, "bits")

    def from_bits(self, bits: Value) -> Value:
        return bits.f.cast("bitcast", bits, self.floats, "float")

    def to_float(self, ints: Value) -> Value:
        return ints.f.cast("sitofp", ints, self.floats, "float")

    def round(self, x: Value) -> Value:
        """Convert float32 to int32, rounding to even. Beyond +-2**31 the result is unspecified."""
        raise NotImplementedError

    def parts(self, x: Value) -> tuple[Value, Value]:
        """Return the nearest integers n, in the form that `scaled` takes, and x - n."""
        n = self.round(x)
        return n, x - self.to_float(n)

    def scaled(self, x: Value, n: Value) -> Value:
        """Return x * 2**n, if that is a normal number: n is added to the exponent."""
        return self.from_bits(self.bits(x) + (n << 23))

    def narrowed(self, dtype: str, x: Value) -> Value:
        """Round to the nearest numbers of float16 or bfloat16; the result is float32 again."""
        if dtype == "float16":
            return self.half_to_float(self.float_to_half(x))
        return self.bfloat_to_float(self.float_to_bfloat(x))

    # ---- 16-bit floats; bfloat16 is an i16 here
    def half_to_float(self, halves: Value) -> Value:
        return halves.f.cast("fpext", halves, self.floats, "float")

    def float_to_half(self, x: Value) -> Value:
        return x.f.cast("fptrunc", x, self.of("half"), "half")

    def bfloat_to_float(self, shorts: Value) -> Value:
        """Widen bfloat16, which is the upper half of a float32."""
        return self.from_bits(shorts.f.cast("zext", shorts, self.ints, "wide") << 16)

    def float_to_bfloat(self, x: Value) -> Value:
        """Round to nearest, ties to even: add half of the last kept bit, less one where that bit is 0."""
        bits = self.bits(x)
        odd = bits.binary("lshr", 16) & 1
        return x.f.cast("trunc", (bits + odd + 0x7FFF).binary("lshr", 16), self.of(I16), "bfloat")
