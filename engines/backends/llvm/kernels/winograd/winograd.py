"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 products where 144 are defined.

    Y = A' [ sum over c of (G g G') * (B' d B) ] A          d: a 6x6 patch of x, g: 3x3 weights, Y: 4x4 of y

Source: Lavin & Gray, Fast Algorithms for Convolutional Neural Networks (2015). The matrices are those of its section
4.3, but that G is 24 times as large, its last row 6 times and the last column of A 4 times. So every number on the way
is an integer, and the sums come out 24 * 24 = 576 times too large.

INT8 is thereby exact. B' d B lies within +-25500 and G g G' within +-18432: int16. Sums may wrap around: they are taken
modulo 2**32, where the 9 of 576 has an inverse, and what remains is a factor of 64. So each sum of x * w is found
exactly if it lies within +-2**25 (`Contraction.bounded`). The weights of float32 are divided by 576 beforehand.

Of volumes the channels of all planes that the taps reach are channels of V, and each plane of y has its own tiles.

    for block of tiles of 4x4 pixels:               of any items of the batch, one after the other
      for tile: V[position, tile, cin] = B' d B     scratch, stays in L2
      for panel of couts:
        for position of 36: for group of tiles:     a matrix product, register-tiled
          M[position, tile, cout] = V W             scratch, in L1 or, of a large block, in L2
        for tile: y = program(A' M A)
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.arithmetic import FP32, Arithmetic
from engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program, rows_with_zeros
from engines.backends.llvm.kernels.contraction.tiled import tiles_of_the_batch
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Window, solves
from engines.backends.llvm.kernels.winograd.emitter import Emitter
from engines.backends.llvm.kernels.winograd.tiling import OUTPUT, PATCH, POSITIONS, SCALE, Tiling, Winograd
from engines.backends.llvm.kernels.winograd.weights import WinogradWeights
from engines.backends.llvm.tuning.cost import CALL, LATENCY, Work, epilogue, pieces, reading
from engines.codegen.ir_builder import Module
from engines.lowering.problems.convolution import Contraction
from engines.lowering.problems.problem import Array, Problem

SCRATCH = 1 << 19           # bytes of V: it stays in L2
STACK = 1 << 20             # ... at most, for a single group of tiles: any thread has so much stack
TWO_STEPS = 4 / 3           # a product and the sum it goes to wait for the same ports, where they are two instructions
WORTH_ASKING, FAR = 1 << 16, 1 << 20        # bytes of weights that may come late; that will, in any network


@solves(Contraction)
class WinogradContraction(Kernel[Contraction]):
    """x is transformed to int16 or float32, in which it meets the weights."""
    packing_is_permutation = False

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling(self.problem)

    @property
    def arithmetic(self) -> Arithmetic:
        return self.tiling.arithmetic

    # ---- tactics
    def applies(self, isa: Isa) -> bool:
        """Not where the layer is no such convolution, its sums may be too large, or its weights are.

        Those become 36 numbers where 9 were: with many channels and few tiles that use them, reading them takes the
        time.
        """
        problem, image, depth = self.problem, self.tiling.planes.image, self.tiling.depth
        fits = (problem.precision == "fp32" or problem.precision == "int8" and problem.bounded) and (
            image.taps == (3, 3) and image.stride == (1, 1) and image.dilation == (1, 1) and image.groups == 1
            and image.x.strides[2] == image.x.size and image.cin % isa.lanes == 0)
        return fits and POSITIONS * depth * problem.cout <= isa.winograd_weights

    def tactics(self, isa: Isa) -> Sequence[Winograd]:
        problem = self.problem
        if not self.applies(isa):
            return ()
        found: dict[Winograd, None] = {}
        for group, vectors in isa.winograd_tiles:
            of_group = group * POSITIONS * self.tiling.tile_bytes
            blocks = [n * group for n in (1, 2, 4) if n * of_group <= (STACK if n == 1 else SCRATCH)]
            # Up to that which reads weights once for an item. Those of several items are timed alike: the largest.
            parts = [tiles for tiles in blocks if tiles < self.tiling.tiles]
            for tiles in blocks[:len(parts) + 1] if parts else blocks[-1:]:
                vectors = min(vectors, isa.vectors_for(problem.cout))
                found[Winograd(group, vectors, tiles, prefetch=self.weight_bytes >= FAR)] = None
        return tuple(found)

    def refinements(self, isa: Isa, best: Winograd) -> Sequence[Winograd]:
        return (replace(best, prefetch=True),) if self.weight_bytes >= WORTH_ASKING else ()

    @property
    def weight_bytes(self) -> int:
        return POSITIONS * self.tiling.tile_bytes * self.problem.cout

    # ---- cost
    def cost(self, isa: Isa, tactic: Winograd) -> float:
        """Products, transforms on both sides, and for each block of tiles what memory takes: its weights, V, which is
        written once and read for each panel, and M, which is written and read."""
        problem = self.problem
        panels = [(isa.vectors_for(couts), times) for couts, times in pieces(problem.cout, tactic.vectors * isa.lanes)]
        blocks = max(self.tiling.tiles / tactic.tiles, 1)   # fewer tiles than a block's share it with other items'
        products = sum(count * times * self._product_cycles(isa, tactic, tiles, vectors)
                       for tiles, count in self._products_of_an_item(tactic) for vectors, times in panels)
        inputs = self._input_work * (self.tiling.tile_bytes / isa.bytes)
        outputs = sum(times * vectors * self._output_work(vectors).cycles for vectors, times in panels)
        at_hand = POSITIONS * tactic.tiles              # tiles of V and M, position by position
        memory = reading(self.weight_bytes, 0.5 if tactic.prefetch else 1)
        memory += reading(at_hand * self.tiling.tile_bytes, 1 + sum(times for _, times in panels))
        memory += sum(reading(at_hand * vectors * isa.bytes, 2 * times) for vectors, times in panels)
        return POSITIONS * products + self.tiling.tiles * (inputs.cycles + outputs) + blocks * memory

    def _products_of_an_item(self, tactic: Winograd) -> list[tuple[int, float]]:
        """(tiles, how many) of the products at one position."""
        if self.tiling.tiles < tactic.tiles:
            return [(tactic.group, self.tiling.tiles / tactic.group)]
        return [(size, count * times) for tiles, times in pieces(self.tiling.tiles, tactic.tiles)
                for size, count in tiles_of_the_batch(tiles, tactic.group)]

    def _product_cycles(self, isa: Isa, tactic: Winograd, tiles: int, vectors: int) -> float:
        """Of one call of the micro-kernel."""
        sums, one_step = tiles * vectors, self.arithmetic is FP32 or isa.one_dot2
        turn = Work(sums, (0 if one_step else sums) + vectors * tactic.prefetch, tiles + vectors)
        cycles = max(turn.cycles * (1 if one_step else TWO_STEPS), LATENCY)
        return self.tiling.depth / self.arithmetic.elements * cycles + Work(stores=sums).cycles + CALL

    @property
    def _input_work(self) -> Work:
        """Of a vector of channels of a tile."""
        return Work(0, 144 if self.arithmetic is FP32 else 204 + POSITIONS, POSITIONS, POSITIONS)

    def _output_work(self, vectors: int) -> Work:
        """Of a vector of couts of a tile, program included."""
        program, counts = self.problem.program, (40, 60) if self.arithmetic is FP32 else (16, 146)
        end = epilogue(len(program.instructions), len(self.problem.operands), vectors, OUTPUT)
        return Work(*counts, POSITIONS) + end * OUTPUT ** 2

    def grid(self, isa: Isa, tactic: Winograd) -> Grid:
        """A row is a tile."""
        return Grid(self.tiling.tiles, tactic.tiles)

    def windows(self, isa: Isa, tactic: Winograd) -> Sequence[Window]:
        """A row of the grid is a tile: its row of tiles reads 6 rows of x and writes 4 of y."""
        problem, planes = self.problem, self.tiling.planes
        if planes.of_volumes:
            rows, reach = self.tiling.of_plane, (planes.taps - 1) * problem.dilation[0] + 1
            return [Window.along(problem.x, 0, rows, problem.stride[0], count=reach),
                    *(Window.along(view, 0, rows) for view in (*problem.operands, problem.y))]
        across = self.tiling.across
        return [Window.along(problem.x, 0, across, OUTPUT, count=PATCH),
                *(Window.along(view, 0, across, OUTPUT, count=OUTPUT) for view in (*problem.operands, problem.y))]

    def constant_bytes(self, isa: Isa, tactic: Winograd) -> int:
        return POSITIONS * self.tiling.tile_bytes * self.problem.cout

    def packing(self, tactic: Winograd) -> int:
        return tactic.vectors

    # ---- constants
    def pack(self, isa: Isa, tactic: Winograd, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Weights [panel][cin / elements][tap][vector][lane][element], which are expanded to G g G'."""
        panels, elements = cout_panels(self.problem, isa, tactic.vectors), self.arithmetic.elements
        weights = np.asarray(constants["weights"], self._kept)
        if self._kept == "float32":
            weights = weights * np.float32(1 / SCALE)
        by_plane = weights.reshape(len(weights), self.problem.cin, self.tiling.planes.taps, -1).swapaxes(1, 2)
        steps = rows_with_zeros(by_plane.reshape(len(weights), -1, elements, by_plane.shape[-1]))
        packed = np.concatenate([steps[panel].transpose(2, 4, 0, 1, 3).ravel() for panel in panels])
        return packed, pack_program(self.problem, panels, constants)

    @property
    def _kept(self) -> str:
        """The dtype of the weights in a plan."""
        return "int8" if self.problem.precision == "int8" else "float32"

    def expansions(self, isa: Isa, tactic: Winograd) -> Mapping[int, Problem]:
        panels, elements = cout_panels(self.problem, isa, tactic.vectors), self.arithmetic.elements
        widest, last = len(panels[0]), len(panels[-1])
        whole = sum(len(panel) == widest for panel in panels)
        return {0: WinogradWeights(self._kept, self.tiling.depth // elements, isa.lanes * elements, whole, widest,
                                   last if last < widest else 0)}

    def emit(self, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
        Emitter(self.tiling, module, name, isa, tactic).emit()
