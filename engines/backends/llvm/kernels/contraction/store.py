"""End of a contraction's micro-kernel: sums -> epilogue program -> y.

u8 is packed from several vectors of a pixel, so it goes pixel by pixel. Floats go vector by vector over all pixels:
they need the constants of one vector only, for those of all vectors would not fit the registers beside the sums. If the
sums are in memory, bfloat16 goes by pairs of vectors, which one conversion rounds and one store writes as a whole line.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import hidden
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    load_channels,
    load_constants,
    load_vector,
    run_program,
)
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.view import View

TOGETHER = 4        # pixels whose programs are interleaved if the program is long


def emit_epilogue(f: Function, lanes: Lanes, program: EpilogueProgram, operands: Sequence[View], y: View,
                  pixels: Sequence[tuple[int, int]], sums: Callable[[int], Sequence[Value]],
                  addresses: Mapping[str, Value] | None = None, sums_in_memory: bool = False) -> None:
    """Emit the program and the stores of a tile.

    Parameters
    ----------
    pixels : (row, column) of each pixel in the tile.
    sums : return the float32 vectors of the pixel with this number.
    addresses : `constants`, `operand0`, ... and `y` of the tile's first pixel and the panel's first cout; by default
        f's parameters of these names.
    sums_in_memory : `sums` loads a vector from memory each time that it is indexed.
    """
    if y.dtype == "uint8":
        _by_pixel(f, lanes, program, operands, y, pixels, sums, addresses or f.parameters)
    else:
        width = 2 if sums_in_memory and y.dtype == "bfloat16" else 1
        _by_vector(f, lanes, program, operands, y, pixels, sums, addresses or f.parameters, width)


def _by_vector(f: Function, lanes: Lanes, program: EpilogueProgram, operands: Sequence[View], y: View,
               pixels: Sequence[tuple[int, int]], sums: Callable[[int], Sequence[Value]],
               addresses: Mapping[str, Value], width: int) -> None:
    """Emit `width` neighbouring vectors of all pixels, then the next ones."""
    finished, together = [sums(p) for p in range(len(pixels))], TOGETHER if program.long else 1
    for first in range(0, lanes.channels, width * lanes.isa.lanes):
        part = Lanes(lanes.isa, min(width * lanes.isa.lanes, lanes.channels - first), False)
        vectors = range(first // lanes.isa.lanes, first // lanes.isa.lanes + part.vectors)
        f.write(f"; vector {vectors[0]}: {program}")
        constants = [load_vector(lanes, addresses["constants"], program.constants, v) for v in vectors]

        def at(name: str, view: View, i: int, j: int, first: int = first) -> Value:
            return addresses[name] + (i * view.strides[0] + j * view.strides[1] + first * view.strides[2])

        for start in range(0, len(pixels), together):
            group = pixels[start:start + together]
            others = [[value for i, j in group for value in load_channels(part, view, at(f"operand{n}", view, i, j))]
                      for n, view in enumerate(operands)]
            values = [finished[start + n][v] for n in range(len(group)) for v in vectors]
            results = run_program(lanes, program, values, others, constants * len(group))
            for n, (i, j) in enumerate(group):
                part.store(y.dtype, [results[n * part.vectors:(n + 1) * part.vectors]], [at("y", y, i, j)])


def _by_pixel(f: Function, lanes: Lanes, program: EpilogueProgram, operands: Sequence[View], y: View,
              pixels: Sequence[tuple[int, int]], sums: Callable[[int], Sequence[Value]],
              addresses: Mapping[str, Value]) -> None:
    def result(p: int, i: int, j: int, constants: list[list[Value]]) -> list[Value]:
        f.write(f"; pixel {p}: {program}")
        offsets = (i * view.strides[0] + j * view.strides[1] for view in operands)
        values = sums(p)
        others = [load_channels(lanes, view, addresses[f"operand{n}"] + offset)
                  for n, (view, offset) in enumerate(zip(operands, offsets, strict=True))]
        return run_program(lanes, program, values, others, constants)

    together = 4 // lanes.vectors
    keep = program.constants * lanes.vectors <= lanes.isa.registers // 2
    constants = load_constants(lanes, addresses["constants"], program.constants)
    for first in range(0, len(pixels), together):
        group = pixels[first:first + together]
        if first and not keep:      # reload; otherwise LLVM would spill them to the stack
            constants = load_constants(lanes, hidden(addresses["constants"]), program.constants)
        values = [result(first + n, i, j, constants) for n, (i, j) in enumerate(group)]
        lanes.store(y.dtype, values, [addresses["y"] + (i * y.strides[0] + j * y.strides[1]) for i, j in group])
