"""Epilogue programs on the channels of a pixel.

Every family that vectorises the innermost axis does four things for a pixel: load the operands, load the constants of
the panel, run the program, store. A *panel* is as many channels as four vectors hold.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes, from_float, to_float
from infer_server.engines.backends.llvm.kernels.kernel import pack_channels
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, I32
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View

PANEL = 4           # vectors


def panels_between(f: Function, begin: Value, end: Value, channels: int, width: int) -> Iterator[tuple[Value, int]]:
    """Yield (first channel, number of channels) of panels begin..end - 1, which are run-time numbers.

    Each panel has `width` channels, except that the last one may have fewer.
    """
    whole, tail = divmod(channels, width)
    if whole:
        for panel in f.range("panel", begin, end.at_most(whole)):
            yield panel * width, width
    if tail:
        with f.when(end.compare("ugt", whole)):
            yield end.like(whole * width), tail


def panels(isa: Isa, channels: int, packed: bool, width: int = 0) -> list[list[list[int]]]:
    """Return for each panel [vector][lane] -> channel, the form that kernel.pack_channels expects."""
    width = width or PANEL * isa.lanes
    return [[[start + channel for channel in row] for row in Lanes(isa, min(width, channels - start), packed).order()]
            for start in range(0, channels, width)]


def pack_panels(isa: Isa, constants: Mapping[str, Any], channels: int, packed: bool, width: int = 0) -> Array:
    """Pack constants["program"], float32 arrays [1] or [channels], as [panel][constant][vector][lane]."""
    return pack_channels(constants["program"], channels, panels(isa, channels, packed, width))


def load_channels(lanes: Lanes, view: View, address: Value) -> list[Value]:
    """Load the channels of a pixel as float32. A stride of 0 broadcasts one element; other gaps are gathered."""
    f, isa, element, stride = address.f, lanes.isa, ELEMENTS[view.dtype], view.strides[-1]
    if stride == view.size or lanes.channels == 1 and not lanes.packed:
        return lanes.load(view.dtype, address)
    if stride == 0:
        return [to_float(isa, view.dtype, f.splat(f.load(element, address, hint="element"), isa.lanes))] * lanes.vectors
    result = []
    for channels in lanes.order():
        value = f.constant(0, f"<{isa.lanes} x {element}>")
        for lane, channel in enumerate(channels):
            if channel < lanes.channels:
                one = f.load(element, address + channel * stride, hint="element")
                value = f.op(value.type, f"insertelement {value}, {one}, {f.constant(lane, I32)}", "gathered")
        result.append(to_float(isa, view.dtype, value))
    return result


def store_channels(lanes: Lanes, view: View, pixels: Sequence[Sequence[Value]], addresses: Sequence[Value]) -> None:
    """Store pixels of float32 channels to their addresses; if the view has gaps, element by element."""
    if view.strides[-1] == view.size or lanes.channels == 1:
        lanes.store(view.dtype, pixels, addresses)
        return
    for pixel, address in zip(pixels, addresses, strict=True):
        f = address.f
        for channels, value in zip(lanes.order(), pixel, strict=True):
            stored = from_float(lanes.isa, view.dtype, value)
            for lane, channel in enumerate(channels):
                if channel < lanes.channels:
                    one = f.op(ELEMENTS[view.dtype], f"extractelement {stored}, {f.constant(lane, I32)}", "element")
                    f.store(one, address + channel * view.strides[-1])


def load_constants(lanes: Lanes, address: Value, count: int) -> list[list[Value]]:
    """Load the constants of a panel as [vector][constant]; address: the panel, packed by kernel.pack_channels."""
    return [load_vector(lanes, address, count, v) for v in range(lanes.vectors)]


def load_vector(lanes: Lanes, address: Value, count: int, v: int) -> list[Value]:
    """Load the constants of one vector of a panel."""
    f, isa = address.f, lanes.isa
    return [f.load(isa.floats, address + (c * lanes.vectors + v) * isa.bytes, isa.bytes, "constant")
            for c in range(count)]


def run_program(lanes: Lanes, program: EpilogueProgram, accumulator: Sequence[Value] | None,
                operands: Sequence[Sequence[Value]], constants: Sequence[Sequence[Value]]) -> list[Value]:
    """Run the program on each vector of a pixel, or on vectors of several pixels.

    operands: [operand][vector]; constants: [vector][constant].
    """
    def one(v: int) -> Value:
        return program.run(lanes.isa, accumulator[v] if accumulator else None, [operand[v] for operand in operands],
                           constants[v])

    values = range(len(constants))
    if not program.long:
        return [one(v) for v in values]
    f, results = (accumulator or operands[0])[0].f, []
    with f.interleaved(2 if lanes.isa.registers <= 16 else 4) as begin:     # each strand needs about four registers
        for v in values:
            begin()
            results.append(one(v))
    return results


def finish_pixel(lanes: Lanes, program: EpilogueProgram, accumulator: Sequence[Value], operands: Sequence[View],
                 addresses: Sequence[Value], constants: Sequence[Sequence[Value]]) -> list[Value]:
    """Run the program on a pixel's accumulator, one vector of channels each; addresses: those of the operands."""
    others = [load_channels(lanes, view, address) for view, address in zip(operands, addresses, strict=True)]
    return run_program(lanes, program, accumulator, others, constants)
