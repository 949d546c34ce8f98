"""Direct kernel of a contraction on vectors of half the width, for groups whose couts fit them.

Lanes without a cout are multiplied like others. Products of half vectors take no longer than those of whole ones, and
half as long on cores that execute a whole vector in two halves.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Window, solves
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import Array, Problem

SHARE = 0.75            # cost relative to whole vectors, between those of the two kinds of cores


@dataclass(frozen=True)
class NarrowTile(Tile):
    """Tactic of the narrow kernel."""
    layout: ClassVar[str] = "narrow"


@solves(Contraction)
class NarrowContraction(DirectContraction):
    """Direct contraction for the half-width vectors of the machine."""
    tile = NarrowTile

    def tactics(self, isa: Isa) -> Sequence[Tile]:
        return super().tactics(isa.narrow) if isa.half and self.problem.cout <= isa.half.lanes else ()

    def refinements(self, isa: Isa, best: Tile) -> Sequence[Tile]:
        return super().refinements(isa.narrow, best)

    def cost(self, isa: Isa, tactic: Tile) -> float:
        return SHARE * super().cost(isa.narrow, tactic)

    def constant_bytes(self, isa: Isa, tactic: Tile) -> int:
        return super().constant_bytes(isa.narrow, tactic)

    def grid(self, isa: Isa, tactic: Tile) -> Grid:
        return super().grid(isa.narrow, tactic)

    def windows(self, isa: Isa, tactic: Tile) -> Sequence[Window]:
        return super().windows(isa.narrow, tactic)

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return super().pack(isa.narrow, tactic, constants)

    def expansions(self, isa: Isa, tactic: Tile) -> Mapping[int, Problem]:
        return super().expansions(isa.narrow, tactic)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        super().emit(module, name, isa.narrow, tactic)
