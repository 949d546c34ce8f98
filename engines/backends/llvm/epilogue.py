"""The end of a contraction's micro-kernel: sums -> program -> y, pixel by pixel."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.backends.llvm.access import hidden, load_channels, load_constants, run_program
from engines.backends.llvm.emit import Function, Value
from engines.backends.llvm.lanes import Lanes
from engines.backends.llvm.program import Program
from engines.backends.llvm.spec import View


def emit_epilogue(f: Function, lanes: Lanes, program: Program, operands: Sequence[View], y: View,
                  pixels: Sequence[tuple[int, int]], sums: Callable[[int], Sequence[Value]]) -> None:
    """sums(p): the vectors of float32 of the p-th of `pixels` (row, column of the tile).

    f's parameters `constants`, `operand0`, ... and `y` are of the tile's first pixel and the panel's first cout.
    """
    def result(p: int, i: int, j: int, constants: list[list[Value]]) -> list[Value]:
        f.write(f"; pixel {p}: {program}")
        offsets = (i * view.strides[0] + j * view.strides[1] for view in operands)
        values = sums(p)
        others = [load_channels(lanes, view, f.parameters[f"operand{n}"] + offset)
                  for n, (view, offset) in enumerate(zip(operands, offsets, strict=True))]
        return run_program(lanes, program, values, others, constants)

    together = 4 // lanes.vectors
    keep = program.constants * lanes.vectors <= lanes.isa.registers // 2
    constants = load_constants(lanes, f.parameters["constants"], program.constants)
    for first in range(0, len(pixels), together):
        group = pixels[first:first + together]
        if first and not keep:      # else LLVM would keep them on the stack
            constants = load_constants(lanes, hidden(f.parameters["constants"]), program.constants)
        values = [result(first + n, i, j, constants) for n, (i, j) in enumerate(group)]
        lanes.store(y.dtype, values, [f.parameters["y"] + (i * y.strides[0] + j * y.strides[1]) for i, j in group])
