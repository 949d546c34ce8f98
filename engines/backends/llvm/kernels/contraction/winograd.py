"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 products where 144 are defined.

    Y = A' [ sum over c of (G g G') * (B' d B) ] A          d: a 6x6 patch of x, g: 3x3 weights, Y: 4x4 of y

Source: Lavin & Gray, Fast Algorithms for Convolutional Neural Networks (2015). The matrices are those of its section
4.3, but that G is 24 times as large, its last row 6 times and the last column of A 4 times. So every number on the way
is an integer, and the sums come out 24 * 24 = 576 times too large.

INT8 is thereby exact. B' d B lies within +-25500 and G g G' within +-18432: int16. Sums may wrap around: they are taken
modulo 2**32, where the 9 of 576 has an inverse, and what remains is a factor of 64. So each sum of x * w is found
exactly if it lies within +-2**25 (`Contraction.bounded`). The weights of float32 are divided by 576 beforehand.

    for block of tiles of 4x4 pixels:               of any items of the batch, one after the other
      for tile: V[position, tile, cin] = B' d B     scratch, stays in L2
      for panel of couts:
        for position of 36: for group of tiles:     a matrix product, register-tiled
          M[position, tile, cout] = V W             scratch, in L1 or, of a large block, in L2
        for tile: y = program(A' M A)
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import tails
from engines.backends.llvm.kernels.common.arithmetic import FP32, INT16, Arithmetic, add_step
from engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program, rows_with_zeros
from engines.backends.llvm.kernels.contraction.store import emit_epilogue
from engines.backends.llvm.kernels.contraction.tiled import tiles_of_the_batch
from engines.backends.llvm.kernels.contraction.winograd_weights import WinogradWeights
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from engines.backends.llvm.tuning.cost import CALL, LATENCY, Work, epilogue, pieces, reading
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.types import FLOAT, I8, I16, PTR, vector
from engines.lowering.problems.convolution import Contraction
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import SIZES, View

OUTPUT, PATCH, POSITIONS = 4, 6, 6 * 6      # pixels of a tile and of its patch, each way; of a whole patch
SCALE = 24 * 24             # by which the sums are too large
SCRATCH = 1 << 19           # bytes of V at most: it stays in L2, and any thread has so much stack
LINE = 64                   # bytes of a cache line
TWO_STEPS = 4 / 3           # a product and the sum it goes to wait for the same ports, where they are two instructions
WORTH_ASKING, FAR = 1 << 16, 1 << 20        # bytes of weights that may come late; that will, in any network
Plus = Callable[[Any, int, Any], Any]       # a, n, b -> a * n + b


def transform_input(x: Sequence[Any], plus: Plus) -> list[Any]:
    """B' x, six numbers to six."""
    a, b, c, d = plus(x[2], -4, x[4]), plus(x[1], -4, x[3]), x[4] - x[2], x[3] - x[1]
    return [plus(x[0] - x[2], 4, c), a + b, a - b, plus(d, 2, c), plus(d, -2, c), plus(d, -4, x[5] - x[3])]


def transform_output(m: Sequence[Any], plus: Plus) -> list[Any]:
    """A' m, six numbers to four."""
    s, d, t, u = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [m[0] + s + t, plus(u, 2, d), plus(t, 4, s), plus(plus(u, 2, m[5]), 4, d)]


@dataclass(frozen=True)
class Winograd(Tactic):
    """A block of `tiles`, of which `group` by `vectors` of couts are a micro-kernel."""
    group: int
    vectors: int
    tiles: int
    prefetch: bool = False      # ask for the next position's weights, or the next panel's

    def __str__(self) -> str:
        return f"Winograd 4x4, {self.tiles} tiles by {self.group}x{self.vectors}{' prefetch' if self.prefetch else ''}"


# ---- how a precision's numbers become those of the transforms, and back
def _load(address: Value, dtype: str, count: int) -> Value:
    """`count` channels of x, as they are transformed."""
    f = address.f
    if dtype == "float32":
        return f.load(vector(count, FLOAT), address, 4, "x")
    return f.cast("zext", f.load(vector(count, I8), address, hint="bytes"), vector(count, I16), "x")


def _rescaled(isa: Isa, value: Value, dtype: str) -> Value:
    """A sum as float32, no longer too large."""
    if dtype == "float32":
        return value
    ninth = pow(9, -1, 1 << 32) - (1 << 32)
    return isa.to_float((value * ninth).binary("ashr", (SCALE // 9).bit_length() - 1))


@solves(Contraction)
class WinogradContraction(Kernel[Contraction]):
    """x is transformed to int16 or float32, in which it meets the weights."""
    packing_is_permutation = False

    @property
    def arithmetic(self) -> Arithmetic:
        return INT16 if self.problem.precision == "int8" else FP32

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[Winograd]:
        """None where the layer is no such convolution, its sums may be too large, or its weights are.

        Those become 36 numbers where 9 were: with many channels and few tiles that use them, reading them takes the
        time.
        """
        problem = self.problem
        fits = (problem.precision == "fp32" or problem.precision == "int8" and problem.bounded) and (
            problem.taps == (3, 3) and problem.stride == (1, 1) and problem.dilation == (1, 1) and problem.groups == 1
            and problem.x.strides[2] == problem.x.size and problem.cin % isa.lanes == 0)
        if not fits or POSITIONS * problem.cin * problem.cout > isa.winograd_weights:
            return ()
        found: dict[Winograd, None] = {}
        for group, vectors in isa.winograd_tiles:
            blocks = [n * group for n in (1, 2, 4) if n * group * POSITIONS * self.tile_bytes <= SCRATCH]
            # Up to that which reads weights once for an item. Those of several items are timed alike: the largest.
            parts = [tiles for tiles in blocks if tiles < self.tiles]
            for tiles in blocks[:len(parts) + 1] if parts else blocks[-1:]:
                vectors = min(vectors, isa.vectors_for(problem.cout))
                found[Winograd(group, vectors, tiles, prefetch=self.weight_bytes >= FAR)] = None
        return tuple(found)

    def refinements(self, isa: Isa, best: Winograd) -> Sequence[Winograd]:
        return (replace(best, prefetch=True),) if self.weight_bytes >= WORTH_ASKING else ()

    @property
    def across(self) -> int:
        """Tiles beside each other in an item."""
        return -(-self.problem.cols // OUTPUT)

    @property
    def tiles(self) -> int:
        """Tiles of an item."""
        return -(-self.problem.rows // OUTPUT) * self.across

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in V, at one position; and of a cout's weights there."""
        return self.problem.cin * SIZES[self.arithmetic.dtype]

    @property
    def weight_bytes(self) -> int:
        return POSITIONS * self.tile_bytes * self.problem.cout

    # ---- cost
    def cost(self, isa: Isa, tactic: Winograd) -> float:
        """Products, transforms on both sides, and for each block of tiles what memory takes: its weights, V, which is
        written once and read for each panel, and M, which is written and read."""
        problem = self.problem
        panels = [(isa.vectors_for(couts), times) for couts, times in pieces(problem.cout, tactic.vectors * isa.lanes)]
        blocks = max(self.tiles / tactic.tiles, 1)      # fewer tiles than a block's share it with those of other items
        products = sum(count * times * self._product_cycles(isa, tactic, tiles, vectors)
                       for tiles, count in self._products_of_an_item(tactic) for vectors, times in panels)
        inputs = self._input_work * (self.tile_bytes / isa.bytes)
        outputs = sum(times * vectors * self._output_work(vectors).cycles for vectors, times in panels)
        at_hand = POSITIONS * tactic.tiles              # tiles of V and M, position by position
        memory = reading(self.weight_bytes, 0.5 if tactic.prefetch else 1)
        memory += reading(at_hand * self.tile_bytes, 1 + sum(times for _, times in panels))
        memory += sum(reading(at_hand * vectors * isa.bytes, 2 * times) for vectors, times in panels)
        return POSITIONS * products + self.tiles * (inputs.cycles + outputs) + blocks * memory

    def _products_of_an_item(self, tactic: Winograd) -> list[tuple[int, float]]:
        """(tiles, how many) of the products at one position."""
        if self.tiles < tactic.tiles:
            return [(tactic.group, self.tiles / tactic.group)]
        return [(size, count * times) for tiles, times in pieces(self.tiles, tactic.tiles)
                for size, count in tiles_of_the_batch(tiles, tactic.group)]

    def _product_cycles(self, isa: Isa, tactic: Winograd, tiles: int, vectors: int) -> float:
        """Of one call of the micro-kernel."""
        sums, one_step = tiles * vectors, self.arithmetic is FP32 or isa.one_dot2
        turn = Work(sums, (0 if one_step else sums) + vectors * tactic.prefetch, tiles + vectors)
        cycles = max(turn.cycles * (1 if one_step else TWO_STEPS), LATENCY)
        return self.problem.cin / self.arithmetic.elements * cycles + Work(stores=sums).cycles + CALL

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
        return Grid(self.tiles, tactic.tiles)

    def windows(self, isa: Isa, tactic: Winograd) -> Sequence[Window]:
        """A row of the grid is a tile: its row of tiles reads 6 rows of x and writes 4 of y."""
        problem = self.problem
        return [Window.along(problem.x, 0, self.across, OUTPUT, count=PATCH),
                *(Window.along(view, 0, self.across, OUTPUT, count=OUTPUT) for view in (*problem.operands, problem.y))]

    def constant_bytes(self, isa: Isa, tactic: Winograd) -> int:
        return POSITIONS * self.tile_bytes * self.problem.cout

    def packing(self, tactic: Winograd) -> int:
        return tactic.vectors

    # ---- constants
    def pack(self, isa: Isa, tactic: Winograd, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Weights [panel][cin / elements][tap][vector][lane][element], which are expanded to G g G'."""
        panels, elements = cout_panels(self.problem, isa, tactic.vectors), self.arithmetic.elements
        weights = np.asarray(constants["weights"], self._kept)
        if self._kept == "float32":
            weights = weights * np.float32(1 / SCALE)
        steps = rows_with_zeros(weights.reshape(len(weights), -1, elements, math.prod(self.problem.taps)))
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
        return {0: WinogradWeights(self._kept, self.problem.cin // elements, isa.lanes * elements, whole, widest,
                                   last if last < widest else 0)}

    def emit(self, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
        _Emitter(self, module, name, isa, tactic).emit()


# ---- code
@dataclass(frozen=True)
class _Position:
    """Where a tile of the batch is: its item, and its row and column among the item's tiles."""
    item: Value
    row: Value
    column: Value


class _Emitter:
    def __init__(self, kernel: WinogradContraction, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
        self.kernel, self.module, self.name, self.isa, self.tactic = kernel, module, name, isa, tactic
        self.problem, self.arithmetic = kernel.problem, kernel.arithmetic
        self.panel = tactic.vectors * isa.lanes
        self.v_tile = kernel.tile_bytes         # bytes of a tile in V, at one position
        self.m_tile = self.panel * 4            # and in M
        self.plus: Plus = isa.fma if self.arithmetic is FP32 else lambda a, n, b: a * n + b

    def emit(self) -> None:
        problem, tiles = self.problem, self.tactic.tiles
        count = len(problem.operands)
        f, addresses, bounds = begin_kernel(self.module, self.name, 1 + count + 2 + 1)
        x, *operands = addresses[:1 + count]
        weights, constants, y = addresses[1 + count:]
        v, m = (f.op(PTR, f"alloca [{POSITIONS * tiles * size} x i8], align 64", hint)
                for size, hint in ((self.v_tile, "v"), (self.m_tile, "m")))
        for start in f.range("block", bounds[0], bounds[1], tiles):
            number = (bounds[1] - start).at_most(tiles)
            for t in f.range("tile", start.like(0), number):
                self._transform_input(f, start + t, x, v + t * self.v_tile)
            for first, channels in f.tiles("panel", problem.cout, self.panel):
                vectors = self.isa.vectors_for(channels)
                self._products(f, v, weights + first * (POSITIONS * self.v_tile), m, number, vectors)
                here = [address + first * view.strides[2]
                        for address, view in zip((*operands, y), self._outputs, strict=True)]
                for t in f.range("tile", start.like(0), number):
                    self._transform_output(f, start + t, channels, m + t * (vectors * self.isa.bytes),
                                           constants + first * (4 * problem.program.constants), here)

    @property
    def _outputs(self) -> Sequence[View]:
        return (*self.problem.operands, self.problem.y)

    def _transform_input(self, f: Function, tile: Value, x: Value, v: Value) -> None:
        position = self._position(tile)
        x = self._advance(x, self.problem.x, position)
        self._cut(f, position, lambda rows, cols: f.run(
            self._input(rows + PATCH - OUTPUT, cols + PATCH - OUTPUT), x, v))

    def _transform_output(self, f: Function, tile: Value, channels: int, m: Value, constants: Value,
                          outputs: Sequence[Value]) -> None:
        """outputs: addresses of the operands and y, of the panel's first cout."""
        position = self._position(tile)
        here = [self._advance(address, view, position) for address, view in zip(outputs, self._outputs, strict=True)]
        self._cut(f, position, lambda rows, cols: f.run(self._output(rows, cols, channels), m, constants, *here))

    @staticmethod
    def _advance(address: Value, view: View, position: _Position) -> Value:
        """The tile's first pixel."""
        return address + (position.item * view.item + position.row * (OUTPUT * view.strides[0])
                          + position.column * (OUTPUT * view.strides[1]))

    def _position(self, tile: Value) -> _Position:
        """Of a tile of the batch."""
        item, inside = tile.divided(self.kernel.tiles), tile.remainder(self.kernel.tiles)
        return _Position(item, inside.divided(self.kernel.across), inside.remainder(self.kernel.across))

    def _cut(self, f: Function, position: _Position, body: Callable[[int, int], None]) -> None:
        """body(rows, columns that the tile has inside the image)."""
        def along(index: Value, extent: int, then: Callable[[int], None]) -> None:
            whole, tail = divmod(extent, OUTPUT)
            if whole:
                with f.when(index.below(whole)):
                    then(OUTPUT)
            if tail:
                with f.when(index.compare("uge", whole)):
                    then(tail)

        along(position.row, self.problem.rows,
              lambda rows: along(position.column, self.problem.cols, lambda cols: body(rows, cols)))

    # ---- V = B' d B
    def _input(self, rows: int, cols: int) -> str:
        """A patch of which so many rows and columns lie in x; what lies beyond is 0. Its name."""
        name = f"{self.name}_input_{rows}x{cols}"
        if name in self.module.functions:
            return name
        f, x, dtype = self.module.function(name, internal=True, x=PTR, v=PTR), self.problem.x, self.arithmetic.dtype
        count = self.isa.bytes // SIZES[dtype]
        while self.problem.cin % count:
            count //= 2
        at, zero = dict(f.parameters), f.constant(0, vector(count, FLOAT if dtype == "float32" else I16))
        for _ in f.loop("channels", self.problem.cin // count, at=at):
            columns = [transform_input([_load(at["x"] + (i * x.strides[0] + j * x.strides[1]), dtype, count)
                                        if i < rows and j < cols else zero for i in range(PATCH)], self.plus)
                       for j in range(PATCH)]
            for i in range(PATCH):
                for j, value in enumerate(transform_input([column[i] for column in columns], self.plus)):
                    f.store(value, at["v"] + (i * PATCH + j) * self.tactic.tiles * self.v_tile, count * SIZES[dtype])
            at["x"] += count * x.size
            at["v"] += count * SIZES[dtype]
        return name

    # ---- M = V W
    def _products(self, f: Function, v: Value, weights: Value, m: Value, number: Value, vectors: int) -> None:
        group, width = self.tactic.group, vectors * self.isa.bytes
        whole, rest = number.divided(group), number.remainder(group)
        for e in f.loop("position", POSITIONS):
            here = (v + e * (self.tactic.tiles * self.v_tile), weights + e * self._w_position(vectors),
                    m + e * (self.tactic.tiles * width))

            def call(size: int, tile: Value, here: tuple[Value, ...] = here) -> None:
                f.run(self._micro(size, vectors), here[0] + tile * self.v_tile, here[1], here[2] + tile * width)

            for g in f.range("group", whole.like(0), whole):
                call(group, g * group)
            for start, size in tails(whole, rest, group):
                call(size, start)

    def _w_position(self, vectors: int) -> int:
        """Bytes of a panel's weights at one position."""
        return self.v_tile * vectors * self.isa.lanes

    def _micro(self, tiles: int, vectors: int) -> str:
        """tiles x vectors of M at one position, all of cin in registers; its name."""
        name = f"{self.name}_product_{tiles}x{vectors}"
        if name in self.module.functions:
            return name
        f, isa, arithmetic = self.module.function(name, internal=True, v=PTR, w=PTR, m=PTR), self.isa, self.arithmetic
        at = {key: f.parameters[key] for key in ("v", "w")}
        acc = {(t, n): arithmetic.zero(isa, at["v"]) for t in range(tiles) for n in range(vectors)}
        for _ in f.loop("k", self.problem.cin // arithmetic.elements, acc=acc, at=at):
            add_step(arithmetic, isa, acc, at["v"], {t: t * self.v_tile for t in range(tiles)}, at["w"],
                     lambda w: [arithmetic.weights(isa, w + n * isa.bytes) for n in range(vectors)])
            if self.tactic.prefetch:
                for line in range(0, vectors * isa.bytes, LINE):
                    isa.prefetch(at["w"] + (self._w_position(vectors) + line))
            at["v"] += arithmetic.step_bytes
            at["w"] += vectors * isa.bytes
        for (t, n), value in acc.items():
            f.store(value, f.parameters["m"] + (t * vectors + n) * isa.bytes, isa.bytes)
        return name

    # ---- y = program(A' M A)
    def _output(self, rows: int, cols: int, channels: int) -> str:
        """rows x cols pixels of `channels` couts; its name."""
        name = f"{self.name}_output_{rows}x{cols}x{channels}"
        if name in self.module.functions:
            return name
        problem, isa, dtype = self.problem, self.isa, self.arithmetic.dtype
        operands = {f"operand{n}": PTR for n in range(len(problem.operands))}
        f = self.module.function(name, internal=True, m=PTR, constants=PTR, **operands, y=PTR)
        lanes = Lanes(isa, channels, problem.y.dtype == "uint8")
        position = self.tactic.tiles * lanes.vectors * isa.bytes
        sums = isa.floats if dtype == "float32" else isa.ints
        columns = []        # [vector][column of the patch][row of the output]
        for n in range(lanes.vectors):
            at = f.parameters["m"] + n * isa.bytes
            columns.append([transform_output([f.load(sums, at + (i * PATCH + j) * position, isa.bytes, "m")
                                              for i in range(PATCH)], self.plus) for j in range(PATCH)])
        for i in range(rows):
            row = [[_rescaled(isa, value, dtype) for value in
                    transform_output([column[i] for column in half], self.plus)] for half in columns]
            pixels = [[values[j] for values in row] for j in range(cols)]
            emit_epilogue(f, lanes, problem.program, problem.operands, problem.y, [(i, j) for j in range(cols)],
                          pixels.__getitem__)
        return name
