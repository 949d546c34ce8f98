"""The halo around each image of a buffer, written anew: three groups of equal runs of bytes.

    head    the rows above, and what stands left in the first row of the image
    sides   what stands right in a row and left in the next
    tail    what stands right in the last row, and the rows below
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import I8, Module, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic, begin_kernel
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View

UNROLLED = 4            # vectors


@dataclass(frozen=True)
class Border(KernelSpec):
    """Views are uint8 [runs, bytes of a run]; every byte becomes `value`."""
    runs: tuple[View, ...]
    value: int
    family = "border"

    @property
    def inputs(self) -> tuple[View, ...]:
        return ()

    @property
    def outputs(self) -> tuple[View, ...]:
        return self.runs

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.runs))
        for item in f.range("item", begin, end):
            for view, address in zip(self.runs, addresses, strict=True):
                count, size = view.shape
                for run in f.loop("run", count):
                    start = address + (item * view.item + run * view.strides[0])
                    for at, part in f.tiles("byte", size, UNROLLED * isa.bytes):
                        for first in range(0, part, isa.bytes):
                            bytes_ = vector(min(part - first, isa.bytes), I8)
                            f.store(f.constant(self.value, bytes_), start + at + first)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Of one item: there is no input that would say how many there are."""
        return tuple(np.full((1, *view.shape), self.value, np.uint8) for view in self.runs)
