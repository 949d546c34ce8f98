"""Addressing of pixels, and vectorised loads, epilogue and stores of a thread's neighbouring channels."""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import elements, pick_bytes, vector_of, wide
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, FLOAT, I8, I16, I32, vector
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.view import View

WIDEST = 16             # bytes per load or store
MAGIC = 12582912.0      # 1.5 * 2**23: added to |x| < 2**22 it leaves x, rounded half to even, in the low bits

_TO_FLOAT = {"uint8": "uitofp", "bool": "uitofp", "int8": "sitofp", "int32": "sitofp", "int64": "sitofp",
             "float16": "fpext"}


# ---- addresses
def alignment(view: View, base: int) -> int:
    """Return the alignment of every pixel's address, up to WIDEST bytes. `base` is that of the view itself."""
    return math.gcd(WIDEST, base, view.item, *view.strides[:-1])


def vector_width(views: Sequence[tuple[View, int]], channels: int, most: int) -> int:
    """Return how many neighbouring channels a thread can access at once.

    Parameters
    ----------
    views : sequence of (View, int)
        Tensors to access, and their alignments in bytes.
    channels : int
        Number of channels.
    most : int
        Upper bound.

    Returns
    -------
    int
        A power of two that divides `channels`, for which every view is contiguous and aligned.
    """
    step = 1 << max(most, 1).bit_length() - 1
    while step > 1 and (channels % step or any(
            view.strides[-1] != view.size or alignment(view, base) % min(step * view.size, WIDEST)
            for view, base in views if view.strides[-1])):
        step //= 2
    return step


def pixel_offset(pixel: Value, shape: Sequence[int], strides: Sequence[int], item: int) -> Value:
    """Return the byte offset (i64) of the pixel-th row of channels, counting over all items.

    Parameters
    ----------
    pixel : Value
        Index (i32) in row-major order of (items, *shape).
    shape, strides : sequence of int
        Extents and strides in bytes of an item's axes.
    item : int
        Stride in bytes of the items.
    """
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
    """Merge adjacent axes where the outer stride is the inner extent times its stride, and drop axes of extent 1."""
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
    """Return the byte offset of the pixel-th row of channels of a view, counting over all items."""
    return pixel_offset(pixel, view.shape[:-1], view.strides[:-1], view.item)


# ---- memory -> float32
def load_channels(gpu: Gpu, view: View, address: Value, count: int) -> list[Value]:
    """Load `count` neighbouring channels as float32. `vector_width` must allow the count."""
    return [to_float(gpu, view.dtype, value) for value in load_stored(view, address, count)]


def load_stored(view: View, address: Value, count: int) -> list[Value]:
    """Load `count` neighbouring channels in their stored type. A channel stride of 0 broadcasts one element."""
    f, element, size = address.f, ELEMENTS[view.dtype], view.size
    if view.strides[-1] == 0 or count == 1:
        return [f.load(element, address, size, "element")] * count
    step = min(count, WIDEST // size)
    parts = (f.load(vector(step, element), address + first * size, step * size, "part")
             for first in range(0, count, step))
    return [value for part in parts for value in elements(part)]


def to_float(gpu: Gpu, dtype: str, value: Value) -> Value:
    """Convert a stored element to float32."""
    if dtype == "bfloat16":
        return gpu.bfloat_to_float(value)
    word = _TO_FLOAT.get(dtype)
    return value.f.cast(word, value, FLOAT, "float") if word else value


# ---- float32 -> memory
def store_channels(gpu: Gpu, view: View, values: Sequence[Value], address: Value) -> None:
    """Store neighbouring float32 channels. Integers are rounded half to even and saturated."""
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
    """Store neighbouring channels that have the stored type."""
    step = min(len(values), WIDEST // view.size)
    for first in range(0, len(values), step):
        part = vector_of(list(values[first:first + step])) if step > 1 else values[first]
        address.f.store(part, address + first * view.size, step * view.size)


LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "bool": (0, 1)}


def _low_byte(gpu: Gpu, dtype: str, value: Value) -> Value:
    """Return a word whose lowest byte is the rounded, saturated integer."""
    low, high = LIMITS[dtype]
    return gpu.bits(gpu.max(gpu.min(value, high), low) + MAGIC)


def _stored(gpu: Gpu, dtype: str, value: Value) -> Value:
    if dtype in LIMITS:
        return value.f.cast("trunc", _low_byte(gpu, dtype, value), I8, "byte")
    if dtype == "float16":
        return gpu.float_to_half(value)
    return gpu.float_to_bfloat(value) if dtype == "bfloat16" else value


def words_of_bytes(lows: Sequence[Value]) -> list[Value]:
    """Pack the lowest bytes of words, four per word."""
    pairs = [pick_bytes(a, b, 0x0040) for a, b in zip(lows[::2], lows[1::2], strict=True)]
    return [pick_bytes(a, b, 0x5410) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]


def packed_words(gpu: Gpu, dtype: str, values: Sequence[Value]) -> list[Value]:
    """Convert float32 values to the stored type, packed in words of four bytes."""
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
    """Load a thread's constants, [constant][channel], from a float32 table [constant][width]."""
    at = table + wide(channel) * 4
    view = View("float32", (count,), (4,), 4)
    return [load_stored(view, at + n * width * 4, count) for n in range(constants)]


def run_program(gpu: Gpu, program: EpilogueProgram, sums: Sequence[Value], operands: Sequence[Sequence[Value]],
                constants: Sequence[Sequence[Value]]) -> list[Value]:
    """Run an epilogue program on each of a thread's channels.

    Parameters
    ----------
    gpu : Gpu
        Primitives of the target.
    program : EpilogueProgram
        Program to run.
    sums : sequence of Value
        Accumulators [channel]; empty if the program has none.
    operands, constants : sequence of sequence of Value
        Further inputs [n][channel]. A fill has constants only.
    """
    channels = len(sums if program.accumulator else (*operands, *constants)[0])
    return [program.run(gpu, sums[c] if program.accumulator else None, [operand[c] for operand in operands],
                        [constant[c] for constant in constants]) for c in range(channels)]
