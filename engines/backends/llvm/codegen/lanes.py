"""Layout of a pixel's channels in registers, and loads and stores of pixels.

A pixel's channels (at most 4 * lanes) fill 1, 2 or 4 vectors of float32. In *natural* order vector v holds channels
v * lanes + lane. *Packed* order is cheaper for u8: the saturating packs then give the bytes in natural order
(Isa.channel).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import ELEMENTS, I8, vector
from infer_server.engines.lowering.problems.view import SIZES


@dataclass(frozen=True)
class Lanes:
    """Layout of `channels` channels of a pixel in `vectors` registers."""
    isa: Isa
    channels: int
    packed: bool

    @property
    def vectors(self) -> int:
        return self.isa.vectors_for(self.channels)

    def channel(self, v: int, lane: int) -> int:
        return self.isa.channel(self.vectors, v, lane) if self.packed else v * self.isa.lanes + lane

    def order(self) -> tuple[tuple[int, ...], ...]:
        """Return [vectors][lanes] -> channel; numbers past the last channel are absent ones."""
        return _order(self)

    # ---- memory -> float32
    def load(self, dtype: str, address: Value) -> list[Value]:
        """Load the channels at an address as `vectors` registers of float32; absent channels are 0."""
        if not self.packed:
            return [self.load_natural(dtype, address, v) for v in range(self.vectors)]
        return self.widen(dtype, address.f.load(vector(self.channels, ELEMENTS[dtype]), address, hint="row"))

    def load_natural(self, dtype: str, address: Value, v: int) -> Value:
        """Load vector v, in natural order, of the channels at an address."""
        f, lanes, count = address.f, self.isa.lanes, self.channels - v * self.isa.lanes
        if count <= 0:
            return f.constant(0, self.isa.floats)
        at = address + v * lanes * SIZES[dtype]
        part = f.load(vector(min(count, lanes), ELEMENTS[dtype]), at, hint="part")
        if count < lanes:
            part = f.shuffle(part, part.like(0), [min(i, count) for i in range(lanes)], "part")
        return to_float(self.isa, dtype, part)

    def widen(self, dtype: str, row: Value) -> list[Value]:
        """Convert a pixel as stored, all its channels in one vector, to `vectors` registers of float32."""
        if dtype == "uint8":
            return [self.isa.to_float(ints) for ints in self.integers(row)]
        picks = [[min(pick, self.channels) for pick in order] for order in self.order()]
        return [to_float(self.isa, dtype, row.f.shuffle(row, row.like(0), mask, "lanes")) for mask in picks]

    def integers(self, row: Value) -> list[Value]:
        """Convert a pixel of u8, all its channels in one vector, to `vectors` registers of int32.

        Absent channels are 0.
        """
        result, absent = [], self.channels
        for order in self.order():
            # A byte and three zeros make a lane: one byte shuffle replaces a shuffle and a zero extension.
            mask = [i for pick in order for i in (min(pick, absent), absent, absent, absent)]
            lanes = row.f.shuffle(row, row.like(0), mask, "lanes")
            result.append(row.f.cast("bitcast", lanes, self.isa.ints, "channels"))
        return result

    # ---- float32 -> memory
    def store(self, dtype: str, pixels: Sequence[Sequence[Value]], addresses: Sequence[Value]) -> None:
        """Store each pixel's `vectors` registers to its address; u8 and integers are rounded to even and saturated."""
        if dtype == "uint8":
            if not self.packed:     # clamp floats that exceed int32 before the conversion
                pixels = [[self.isa.min(value, 255) for value in pixel] for pixel in pixels]
            together = 4 // self.vectors    # pixels whose vectors fill one register of u8
            for first in range(0, len(pixels), together):
                group = slice(first, first + together)
                self._store_packed([v for pixel in pixels[group] for v in pixel], addresses[group])
            return
        for values, address in zip(pixels, addresses, strict=True):
            if (dtype == "bfloat16" and self.isa.rounds_pairs and not self.packed
                    and self.channels == 2 * self.isa.lanes):
                address.f.store(self.isa.floats_to_bfloats(*values), address)
                continue
            for v, value in enumerate(values):
                if self.packed:
                    self._store_quads(dtype, value, address, v)
                else:
                    self._store_natural(dtype, value, address + v * self.isa.lanes * SIZES[dtype],
                                        self.channels - v * self.isa.lanes)

    def _store_packed(self, values: Sequence[Value], addresses: Sequence[Value]) -> None:
        f, vectors = values[0].f, self.vectors
        ints = [self.isa.round(value) for value in values]
        packed = self.isa.pack_u8((ints * 4)[:4])
        places = {channel: (v, lane) for v, row in enumerate(self.order()) for lane, channel in enumerate(row)}
        for slot, address in enumerate(addresses):
            mask = []
            for v, lane in (places[channel] for channel in range(self.channels)):
                part, element = divmod(lane, 4)
                mask.append(part * 16 + (slot * vectors + v) * 4 + element)
            if self.channels % 4 == 0:      # groups of four stay together: a shuffle of words is cheaper
                words = f.cast("bitcast", packed, self.isa.ints, "words")
                f.store(f.shuffle(words, None, [i // 4 for i in mask[::4]], "pixel"), address)
            else:
                f.store(f.shuffle(packed, None, mask, "pixel"), address)

    def _store_quads(self, dtype: str, value: Value, address: Value, v: int) -> None:
        """Store a vector in packed order, which keeps groups of four neighbours together."""
        stored = from_float(self.isa, dtype, value)
        for lane in range(0, self.isa.lanes, 4):
            channel = self.channel(v, lane)
            count = min(4, self.channels - channel)
            if count > 0:
                part = value.f.shuffle(stored, None, range(lane, lane + count), "part")
                value.f.store(part, address + channel * SIZES[dtype])

    def _store_natural(self, dtype: str, value: Value, address: Value, count: int) -> None:
        if count <= 0:
            return
        f, lanes = address.f, self.isa.lanes
        stored = from_float(self.isa, dtype, value)
        if count < lanes:
            stored = f.shuffle(stored, None, range(count), "part")
        f.store(stored, address)


def in_order(isa: Isa, ints: Sequence[Value]) -> Value:
    """Pack four vectors of int32 into one of u8 with saturation, in natural order."""
    quads = ints[0].f.cast("bitcast", isa.pack_u8(ints), isa.ints, "quads")
    return quads.f.shuffle(quads, None, [part * 4 + v for v in range(4) for part in range(isa.lanes // 4)], "ordered")


def to_float(isa: Isa, dtype: str, stored: Value) -> Value:
    """Convert a vector of `lanes` stored elements to float32."""
    f = stored.f
    if dtype == "float32":
        return stored
    if dtype == "float16":
        return isa.half_to_float(stored)
    if dtype == "bfloat16":
        return isa.bfloat_to_float(stored)
    if dtype in ("uint8", "bool"):
        return isa.to_float(f.cast("zext", stored, isa.ints, "wide"))
    if dtype == "int8":
        return isa.to_float(f.cast("sext", stored, isa.ints, "wide"))
    return f.cast("sitofp", stored, isa.floats, "float")


def from_float(isa: Isa, dtype: str, value: Value) -> Value:
    """Convert float32 to a vector of `lanes` stored elements: round to even, saturate integers."""
    f = value.f
    if dtype == "float32":
        return value
    if dtype == "float16":
        return isa.float_to_half(value)
    if dtype == "bfloat16":
        return isa.float_to_bfloat(value)
    low, high = {"uint8": (0, 255), "int8": (-128, 127), "bool": (0, 1)}[dtype]
    ints = isa.round(isa.min(isa.max(value, low), high))
    return f.cast("trunc", ints, vector(isa.lanes, I8), "bytes")


@cache
def _order(lanes: Lanes) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(lanes.channel(v, lane) for lane in range(lanes.isa.lanes)) for v in range(lanes.vectors))
