"""Expansion of integer weights from bytes to wider integers when a plan is loaded.

Machines without a dot product of bytes multiply weights of 16 or 32 bits. Widening them takes less time than reading
wider ones from a disk, or verifying their checksum.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.types import I8, vector
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View, dense_view


@dataclass(frozen=True)
class Widen(Problem):
    """Problem of widening int8 to `bits`. An item has ALIGNMENT bytes, of which packed constants are a multiple."""
    bits: int
    family = "widen"

    @property
    def inputs(self) -> tuple[View, ...]:
        return (dense_view("int8", (ALIGNMENT,)),)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (dense_view(f"int{self.bits}", (ALIGNMENT,)),)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (inputs[0].astype(f"int{self.bits}"),)


@solves(Widen)
class WidenKernel(Kernel[Widen]):
    """Kernel of sign extensions: loads of bytes, stores of whole vectors."""

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, (kept, made), (begin, end, *_) = begin_kernel(module, name, 2)
        count = 8 * isa.bytes // self.problem.bits
        for item in f.range("item", begin, end):
            for at in range(0, ALIGNMENT, count):
                bytes_ = f.load(vector(count, I8), kept + (item * ALIGNMENT + at), count, "bytes")
                wide = f.cast("sext", bytes_, vector(count, f"i{self.problem.bits}"), "wide")
                f.store(wide, made + (item * ALIGNMENT + at) * (self.problem.bits // 8), isa.bytes)


def widened(isa: Isa) -> Mapping[int, Problem]:
    """Return Kernel.expansions for INT8 weights that are the first packed constant."""
    return {0: Widen(8 * isa.ready_bytes // isa.bytes)} if isa.ready_bytes > isa.bytes else {}
