"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 products instead of 144.

    Y = A' [ sum over c of (G g G') * (B' d B) ] A          d: a 6x6 patch of x, g: 3x3 weights, Y: 4x4 of y

Reference: Lavin & Gray, Fast Algorithms for Convolutional Neural Networks (2015). The matrices are those of its section
4.3, except that G is 24 times as large, its last row 6 times, and the last column of A 4 times. Every intermediate
number is then an integer, and the sums are 24 * 24 = 576 times too large.

INT8 is thereby exact. B' d B lies within +-25500 and G g G' within +-18432, both int16. Sums may wrap around: they are
taken modulo 2**32, where the 9 of 576 = 9 * 64 has an inverse, so that a factor of 64 remains. Each sum of x * w is
exact if it lies within +-2**25 (`Contraction.bounded`). The weights of float32 are divided by 576 beforehand.

For volumes, V has the channels of all planes that the taps read, and each plane of y has its own tiles.

    for block of tiles of 4x4 pixels:               of any items of the batch, one after the other
      for tile: V[position, tile, cin] = B' d B     scratch, stays in L2
      for panel of couts:
        for position of 36: for group of tiles:     a matrix product, register-tiled
          M[position, tile, cout] = V W             scratch, in L1 or, for a large block, in L2
        for tile: y = program(A' M A)
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.arithmetic import FP32, Arithmetic
from infer_server.engines.backends.llvm.kernels.common.cost import CALL, LATENCY, Work, epilogue, pieces, reading
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program, rows_with_zeros
from infer_server.engines.backends.llvm.kernels.contraction.tiled import tiles_of_the_batch
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Window, solves
from infer_server.engines.backends.llvm.kernels.winograd.emitter import WinogradEmitter
from infer_server.engines.backends.llvm.kernels.winograd.tiling import OUTPUT, PATCH, POSITIONS, SCALE, Tiling, Winograd
from infer_server.engines.backends.llvm.kernels.winograd.weights import WinogradWeights
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import Array, Problem

SCRATCH = 1 << 19           # most bytes of V, which should stay in L2
STACK = 1 << 20             # most bytes of V for a single group of tiles, which any thread's stack can hold
TWO_STEPS = 4 / 3           # slowdown if product and addition are two instructions, which compete for ports
WORTH_ASKING, FAR = 1 << 16, 1 << 20        # bytes of weights from which prefetching may help, and always helps


@solves(Contraction)
class WinogradContraction(Kernel[Contraction]):
    """Contraction by Winograd's minimal filtering; x and the weights are transformed to int16 or float32."""
    packing_is_permutation = False

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling(self.problem)

    @property
    def arithmetic(self) -> Arithmetic:
        return self.tiling.arithmetic

    # ---- tactics
    def applies(self, isa: Isa) -> bool:
        """Return True for 3x3 convolutions of stride 1 whose sums are bounded and whose weights are not too large.

        The transform makes 36 weights of 9. With many channels and few tiles, reading them would dominate.
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
            # Blocks up to the first that covers an item. Blocks of several items are equally fast: only the largest.
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
        """Return the cycles of an item: products, transforms of x and y, and memory traffic.

        For each block of tiles, memory delivers the weights; V is written once and read for each panel; M is written
        and read.
        """
        problem = self.problem
        panels = [(isa.vectors_for(couts), times) for couts, times in pieces(problem.cout, tactic.vectors * isa.lanes)]
        blocks = max(self.tiling.tiles / tactic.tiles, 1)   # a block of several items counts as one
        products = sum(count * times * self._product_cycles(isa, tactic, tiles, vectors)
                       for tiles, count in self._products_of_an_item(tactic) for vectors, times in panels)
        inputs = self._input_work * (self.tiling.tile_bytes / isa.bytes)
        outputs = sum(times * vectors * self._output_work(vectors).cycles for vectors, times in panels)
        at_hand = POSITIONS * tactic.tiles              # tiles of V and of M at all positions
        memory = reading(self.weight_bytes, 0.5 if tactic.prefetch else 1)
        memory += reading(at_hand * self.tiling.tile_bytes, 1 + sum(times for _, times in panels))
        memory += sum(reading(at_hand * vectors * isa.bytes, 2 * times) for vectors, times in panels)
        return POSITIONS * products + self.tiling.tiles * (inputs.cycles + outputs) + blocks * memory

    def _products_of_an_item(self, tactic: Winograd) -> list[tuple[int, float]]:
        """Return (tiles, number of products) for each size of product at one position."""
        if self.tiling.tiles < tactic.tiles:
            return [(tactic.group, self.tiling.tiles / tactic.group)]
        return [(size, count * times) for tiles, times in pieces(self.tiling.tiles, tactic.tiles)
                for size, count in tiles_of_the_batch(tiles, tactic.group)]

    def _product_cycles(self, isa: Isa, tactic: Winograd, tiles: int, vectors: int) -> float:
        """Return the cycles of one call of the micro-kernel."""
        sums, one_step = tiles * vectors, self.arithmetic is FP32 or isa.one_dot2
        turn = Work(sums, (0 if one_step else sums) + vectors * tactic.prefetch, tiles + vectors)
        cycles = max(turn.cycles * (1 if one_step else TWO_STEPS), LATENCY)
        return self.tiling.depth / self.arithmetic.elements * cycles + Work(stores=sums).cycles + CALL

    @property
    def _input_work(self) -> Work:
        """Return the work of transforming a vector of channels of a tile of x."""
        return Work(0, 144 if self.arithmetic is FP32 else 204 + POSITIONS, POSITIONS, POSITIONS)

    def _output_work(self, vectors: int) -> Work:
        """Return the work of transforming a vector of couts of a tile of M, program included."""
        program, counts = self.problem.program, (40, 60) if self.arithmetic is FP32 else (16, 146)
        end = epilogue(len(program.instructions), len(self.problem.operands), vectors, OUTPUT)
        return Work(*counts, POSITIONS) + end * OUTPUT ** 2

    def grid(self, isa: Isa, tactic: Winograd) -> Grid:
        """Return the grid, whose rows are tiles."""
        return Grid(self.tiling.tiles, tactic.tiles)

    def windows(self, isa: Isa, tactic: Winograd) -> Sequence[Window]:
        """Return the windows: a row of the grid is a tile, whose row of tiles reads 6 rows of x and writes 4 of y."""
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
        """Pack weights [panel][cin / elements][tap][vector][lane][element]; loading a plan expands them to G g G'."""
        panels, elements = cout_panels(self.problem, isa, tactic.vectors), self.arithmetic.elements
        weights = np.asarray(constants["weights"], self._stored_dtype)
        if self._stored_dtype == "float32":
            weights = weights * np.float32(1 / SCALE)
        by_plane = weights.reshape(len(weights), self.problem.cin, self.tiling.planes.taps, -1).swapaxes(1, 2)
        steps = rows_with_zeros(by_plane.reshape(len(weights), -1, elements, by_plane.shape[-1]))
        packed = np.concatenate([steps[panel].transpose(2, 4, 0, 1, 3).ravel() for panel in panels])
        return packed, pack_program(self.problem, panels, constants)

    @property
    def _stored_dtype(self) -> str:
        """Return the dtype of the weights in a plan."""
        return "int8" if self.problem.precision == "int8" else "float32"

    def expansions(self, isa: Isa, tactic: Winograd) -> Mapping[int, Problem]:
        panels, elements = cout_panels(self.problem, isa, tactic.vectors), self.arithmetic.elements
        widest, last = len(panels[0]), len(panels[-1])
        whole = sum(len(panel) == widest for panel in panels)
        return {0: WinogradWeights(self._stored_dtype, self.tiling.depth // elements, isa.lanes * elements, whole,
                                   widest, last if last < widest else 0)}

    def emit(self, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
        WinogradEmitter(self.tiling, module, name, isa, tactic).emit()
