"""Code of Winograd's kernel: the loops of winograd.py, with a function for each shape of a patch and of a product."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import tails
from infer_server.engines.backends.llvm.kernels.common.arithmetic import FP32, add_step
from infer_server.engines.backends.llvm.kernels.contraction.store import emit_epilogue
from infer_server.engines.backends.llvm.kernels.kernel import begin_kernel
from infer_server.engines.backends.llvm.kernels.winograd.tiling import (
    OUTPUT,
    PATCH,
    POSITIONS,
    SCALE,
    Plus,
    Tiling,
    Winograd,
    transform_input,
    transform_output,
)
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I8, I16, PTR, vector
from infer_server.engines.lowering.problems.view import SIZES, View

LINE = 64                   # bytes of a cache line


# ---- conversion of stored numbers to those of the transforms, and back
def _load(address: Value, dtype: str, count: int) -> Value:
    """Load `count` channels of x in the type in which they are transformed."""
    f = address.f
    if dtype == "float32":
        return f.load(vector(count, FLOAT), address, 4, "x")
    return f.cast("zext", f.load(vector(count, I8), address, hint="bytes"), vector(count, I16), "x")


def _rescaled(isa: Isa, value: Value, dtype: str) -> Value:
    """Return a sum as float32, without the factor that the integer transforms add."""
    if dtype == "float32":
        return value
    ninth = pow(9, -1, 1 << 32) - (1 << 32)
    return isa.to_float((value * ninth).binary("ashr", (SCALE // 9).bit_length() - 1))


# ---- the kernel
@dataclass(frozen=True)
class _Position:
    """Position of a tile in the batch: its image plane, and its row and column among the image's tiles."""
    plane: Value
    row: Value
    column: Value


class WinogradEmitter:
    """Emitter of Winograd's kernel."""
    def __init__(self, tiling: Tiling, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
        self.tiling, self.module, self.name, self.isa, self.tactic = tiling, module, name, isa, tactic
        self.planes, self.problem, self.arithmetic = tiling.planes, tiling.planes.image, tiling.arithmetic
        self.views = (*self.problem.inputs, self.problem.y)
        self.panel = tactic.vectors * isa.lanes
        self.v_tile = tiling.tile_bytes         # bytes of a tile in V, at one position
        self.m_tile = self.panel * 4            # bytes of a tile in M, at one position
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
        x += self._offsets(position)[0]
        for r in f.loop("tap plane", self.planes.taps):
            here, there = x + r * self.planes.tap_step, v + r * (self.v_tile // self.planes.taps)
            self._cut(f, position, partial(self._run_input, f, here, there))

    def _run_input(self, f: Function, x: Value, v: Value, rows: int, cols: int) -> None:
        f.run(self._input(rows + PATCH - OUTPUT, cols + PATCH - OUTPUT), x, v)

    def _transform_output(self, f: Function, tile: Value, channels: int, m: Value, constants: Value,
                          outputs: Sequence[Value]) -> None:
        """Transform a tile of M and store it. outputs: addresses of the operands and y, at the panel's first cout."""
        position = self._position(tile)
        here = [address + offset for address, offset in zip(outputs, self._offsets(position)[1:], strict=True)]
        self._cut(f, position, lambda rows, cols: f.run(self._output(rows, cols, channels), m, constants, *here))

    def _offsets(self, position: _Position) -> list[Value]:
        """Return the bytes to the tile's first pixel in x, the operands and y."""
        planes = self.planes.offsets(position.plane, self.views)
        return [plane + position.row * (OUTPUT * view.strides[0]) + position.column * (OUTPUT * view.strides[1])
                for plane, view in zip(planes, self.views, strict=True)]

    def _position(self, tile: Value) -> _Position:
        """Return the position of a tile of the batch."""
        plane, inside = tile.divided(self.tiling.of_plane), tile.remainder(self.tiling.of_plane)
        return _Position(plane, inside.divided(self.tiling.across), inside.remainder(self.tiling.across))

    def _cut(self, f: Function, position: _Position, body: Callable[[int, int], None]) -> None:
        """Call body(rows, columns) with the part of the tile that lies inside the image."""
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
        """Return the name of the function that transforms a patch of which rows x cols pixels lie in x.

        The other pixels are 0.
        """
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
        """Return the bytes of a panel's weights at one position."""
        return self.v_tile * vectors * self.isa.lanes

    def _micro(self, tiles: int, vectors: int) -> str:
        """Return the name of the micro-kernel for tiles x vectors of M at one position, all of cin in registers."""
        name = f"{self.name}_product_{tiles}x{vectors}"
        if name in self.module.functions:
            return name
        f, isa, arithmetic = self.module.function(name, internal=True, v=PTR, w=PTR, m=PTR), self.isa, self.arithmetic
        at = {key: f.parameters[key] for key in ("v", "w")}
        acc = {(t, n): arithmetic.zero(isa, at["v"]) for t in range(tiles) for n in range(vectors)}
        for _ in f.loop("k", self.tiling.depth // arithmetic.elements, acc=acc, at=at):
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
        """Return the name of the function that computes rows x cols pixels of `channels` couts from M."""
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
