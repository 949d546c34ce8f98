"""Maxima and sums of pixels, in the narrowest registers that hold them exactly.

    max of u8     bytes, as stored: a vector of bytes holds as many channels as four of float32
    sum of u8     int32
    otherwise     float32
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import I8, vector

Pixel = list[Value]


@dataclass(frozen=True)
class PixelReduction:
    """Reduction of pixels. kind: "max" or "sum"; dtype: the stored dtype; lanes: those of the result."""
    kind: str
    dtype: str
    lanes: Lanes

    @property
    def bytes(self) -> bool:
        return self.kind == "max" and self.dtype == "uint8"

    @property
    def ints(self) -> bool:
        return self.kind == "sum" and self.dtype == "uint8"

    @property
    def registers(self) -> int:
        """Return the registers of one pixel."""
        return 1 if self.bytes else self.lanes.vectors

    def load(self, address: Value) -> Pixel:
        if self.dtype != "uint8":
            return self.lanes.load(self.dtype, address)
        row = address.f.load(vector(self.lanes.channels, I8), address, hint="row")
        return [row] if self.bytes else self.lanes.integers(row)

    def neutral(self, of: Value) -> Pixel:
        """Return the neutral element of the reduction; `of`: any value of the function."""
        if self.bytes:
            return [of.f.constant(0, vector(self.lanes.channels, I8))]
        if self.ints:
            return [of.f.constant(0, self.lanes.isa.ints)] * self.lanes.vectors
        return [of.f.constant(-math.inf if self.kind == "max" else 0, self.lanes.isa.floats)] * self.lanes.vectors

    def combine(self, a: Pixel, b: Pixel) -> Pixel:
        return [self._combine(x, y) for x, y in zip(a, b, strict=True)]

    def _combine(self, a: Value, b: Value) -> Value:
        if self.kind == "sum":
            return a + b
        if self.bytes:
            return a.f.call(a.type, f"llvm.umax.v{self.lanes.channels}i8", a, b, hint="max")
        return self.lanes.isa.max(a, b)

    def finish(self, pixel: Pixel) -> Pixel:
        """Convert a pixel to float32, in the order of `lanes`."""
        if self.bytes:
            return self.lanes.widen("uint8", pixel[0])
        return [self.lanes.isa.to_float(value) for value in pixel] if self.ints else pixel
