"""How kernels find pixels, and how a thread's neighbouring channels come from memory, through a program, and back."""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import elements, pick_bytes, vector_of, wide
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import ELEMENTS, FLOAT, I8, I16, I32, vector
from engines.lowering.epilogue.program import EpilogueProgram
from engines.lowering.problems.view import View

WIDEST = 16             # bytes that a thread loads or stores at once
MAGIC = 12582912.0      # 1.5 * 2**23: added to |x| < 2**22 it rounds x to an integer, halves to even, in the low bits

_TO_FLOAT = {"uint8": "uitofp", "bool": "uitofp", "int8": "sitofp", "int32": "sitofp", "int64": "sitofp",
             "float16": "fpext"}


# ---- where
def alignment(view: View, base: int) -> int:
    """What the address of any pixel of a view is a multiple of, up to WIDEST; base: its own."""
    return math.gcd(WIDEST, base, view.item, *view.strides[:-1])


def together(views: Sequence[tuple[View, int]], channels: int, most: int) -> int:
    """How many neighbouring channels a thread may take at once: a power of two that divides `channels`, of which
    every view with its alignment has as many bytes in one piece as one access may have."""
    step = 1 << max(most, 1).bit_length() - 1
    while step > 1 and (channels % step or any(
            view.strides[-1] != view.size or alignment(view, base) % min(step * view.size, WIDEST)
            for view, base in views if view.strides[-1])):
        step //= 2
    return step


def pixel_offset(pixel: Value, shape: Sequence[int], strides: Sequence[int], item: int) -> Value:
    """Bytes from element 0 to the pixel-th (an i32) of all items in row-major order of `shape`; an i64."""
    extents, steps = _joined(shape, strides)
    if extents and item == extents[0] * steps[0]:       # the items continue the outermost axis
        item, extents, steps = steps[0], extents[1:], steps[1:]
    parts, rest = [], pixel
    for extent, stride in zip(reversed(extents), reversed(steps), strict=True):
        if stride:
            parts.append(wide(rest.remainder(extent)) * stride)
        rest = rest.divided(extent)
    parts.append(wide(rest) * item)
    return reduce(add, parts)


def _joined(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Extents and strides of as few axes; neighbours that step evenly are one."""
    extents: list[int] = []
    steps: list[int] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if extents and steps[-1] == extent * stride:
            extents[-1], steps[-1] = extents[-1] * extent, stride
        else:
            extents.append(extent)
            steps.append(stride)
    return extents, steps


def offset_in(view: View, pixel: Value) -> Value:
    """Bytes to the pixel-th row of channels of all items of a view."""
    return pixel_offset(pixel, view.shape[:-1], view.strides[:-1], view.item)


# ---- memory -> float32
def load_channels(gpu: Gpu, view: View, address: Value, count: int) -> list[Value]:
    """`count` neighbouring channels as float32, as `together` allowed them."""
    return [to_float(gpu, view.dtype, value) for value in load_stored(view, address, count)]


def load_stored(view: View, address: Value, count: int) -> list[Value]:
    """The same as they are stored; a stride of 0 repeats one."""
    f, element, size = address.f, ELEMENTS[view.dtype], view.size
    if view.strides[-1] == 0 or count == 1:
        return [f.load(element, address, size, "element")] * count
    step = min(count, WIDEST // size)
    parts = (f.load(vector(step, element), address + first * size, step * size, "part")
             for first in range(0, count, step))
    return [value for part in parts for value in elements(part)]


def to_float(gpu: Gpu, dtype: str, value: Value) -> Value:
    if dtype == "bfloat16":
        return gpu.bfloat_to_float(value)
    word = _TO_FLOAT.get(dtype)
    return value.f.cast(word, value, FLOAT, "float") if word else value


# ---- float32 -> memory
def store_channels(gpu: Gpu, view: View, values: Sequence[Value], address: Value) -> None:
    """Neighbouring channels, rounded halves to even and integers saturated, as `together` allowed them."""
    f, size = address.f, view.size
    if len(values) * size < 4:
        for i, value in enumerate(values):
            f.store(_stored(gpu, view.dtype, value), address + i * size, size)
        return
    words = packed_words(gpu, view.dtype, values)
    step = min(len(words), WIDEST // 4)
    for first in range(0, len(words), step):
        f.store(vector_of(words[first:first + step]), address + first * 4, step * 4)


def store_stored(view: View, values: Sequence[Value], address: Value) -> None:
    """Neighbouring channels as they are, as `together` allowed them."""
    step = min(len(values), WIDEST // view.size)
    for first in range(0, len(values), step):
        part = vector_of(list(values[first:first + step])) if step > 1 else values[first]
        address.f.store(part, address + first * view.size, step * view.size)


LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "bool": (0, 1)}


def _low_byte(gpu: Gpu, dtype: str, value: Value) -> Value:
    """A word whose lowest byte is the integer."""
    low, high = LIMITS[dtype]
    return gpu.bits(gpu.max(gpu.min(value, high), low) + MAGIC)


def _stored(gpu: Gpu, dtype: str, value: Value) -> Value:
    if dtype in LIMITS:
        return value.f.cast("trunc", _low_byte(gpu, dtype, value), I8, "byte")
    if dtype == "float16":
        return gpu.float_to_half(value)
    return gpu.float_to_bfloat(value) if dtype == "bfloat16" else value


def words_of_bytes(lows: Sequence[Value]) -> list[Value]:
    """The lowest bytes of words, four in one."""
    pairs = [pick_bytes(a, b, 0x0040) for a, b in zip(lows[::2], lows[1::2], strict=True)]
    return [pick_bytes(a, b, 0x5410) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]


def packed_words(gpu: Gpu, dtype: str, values: Sequence[Value]) -> list[Value]:
    """The stored bytes, four at a time."""
    if dtype in LIMITS:
        return words_of_bytes([_low_byte(gpu, dtype, value) for value in values])
    if dtype == "float32":
        return [gpu.bits(value) for value in values]
    return [_halves(gpu, dtype, low, high) for low, high in zip(values[::2], values[1::2], strict=True)]


def _halves(gpu: Gpu, dtype: str, low: Value, high: Value) -> Value:
    if (word := gpu.halves(dtype, low, high)) is not None:
        return word
    halves = [_stored(gpu, dtype, value) for value in (low, high)]
    bits = [half if half.type == I16 else half.f.cast("bitcast", half, I16, "bits") for half in halves]
    a, b = (half.f.cast("zext", half, I32, "low") for half in bits)
    return pick_bytes(a, b, 0x5410)


# ---- programs
def load_constants(f: Function, table: Value, channel: Value, count: int, constants: int,
                   width: int) -> list[list[Value]]:
    """[constant][channel] of a thread's channels, out of float32 [constant][width]."""
    at = table + wide(channel) * 4
    view = View("float32", (count,), (4,), 4)
    return [load_stored(view, at + n * width * 4, count) for n in range(constants)]


def run_program(gpu: Gpu, program: EpilogueProgram, sums: Sequence[Value], operands: Sequence[Sequence[Value]],
                constants: Sequence[Sequence[Value]]) -> list[Value]:
    """A program on each of a thread's channels: sums[channel], operands[n][channel], constants[n][channel]. What only
    fills has neither sums nor operands."""
    channels = len(sums if program.accumulator else (*operands, *constants)[0])
    return [program.run(gpu, sums[c] if program.accumulator else None, [operand[c] for operand in operands],
                        [constant[c] for constant in constants]) for c in range(channels)]
