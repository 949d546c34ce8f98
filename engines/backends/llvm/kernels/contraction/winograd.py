"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 products where 144 are defined.

    Y = A' [ sum over c of (G g G') * (B' d B) ] A          d: a 6x6 patch of x, g: 3x3 weights, Y: 4x4 of y

Source: Lavin & Gray, Fast Algorithms for Convolutional Neural Networks (2015). The matrices are those of its section
4.3 with the fractions of G moved out: its rows become (1, 0, 0), (1, 1, 1), (1, -1, 1), (1, 2, 4), (1, -2, 4) and
(0, 0, 1), the outputs of a column come out 24, 12, 6 and 6 times too large, every number on the way is an integer.

INT8 is thereby exact. B' d B lies within +-25500 and G g G' within +-6272: int16. Sums may wrap around: they are taken
modulo 2**32, where a factor of 9 has an inverse, and what remains is a power of two, 64 at most. So each sum of x * w
is found exactly if it lies within +-2**25 (`Contraction.bounded`).

    for block of tiles of 4x4 pixels:               of any items of the batch, one after the other
      for tile: V[position, tile, cin] = B' d B     scratch, stays in L2
      for panel of couts:
        for position of 36: for group of tiles:     a matrix product, register-tiled
          M[position, tile, cout] = V W             scratch, stays in L1
        for tile: y = program(A' M A)
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import FLOAT, I8, I16, I32, PTR, Function, Module, Value, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.contraction.store import emit_epilogue
from engines.backends.llvm.kernels.contraction.winograd_weights import WinogradWeights
from engines.backends.llvm.kernels.kernel import Grid, Tactic, Window, begin_kernel
from engines.backends.llvm.tuning.cost import Work, epilogue, reading
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View

if TYPE_CHECKING:
    from engines.backends.llvm.kernels.contraction.contraction import Contraction

OUTPUT, PATCH = 4, 6        # pixels of a tile and of its patch, each way
POSITIONS = PATCH * PATCH
SCALES = (24, 12, 6, 6)     # of the outputs of a column
SCRATCH = 1 << 19           # bytes of V at most: it stays in L2, and any thread has so much stack


def transform_input(x: Sequence[Any]) -> list[Any]:
    """B' x, six numbers to six."""
    a, b = x[4] - x[2] * 4, x[3] - x[1] * 4
    c, d = x[4] - x[2], (x[3] - x[1]) * 2
    return [(x[0] - x[2]) * 4 + c, a + b, a - b, c + d, c - d, (x[1] - x[3]) * 4 + (x[5] - x[3])]


def transform_output(m: Sequence[Any]) -> list[Any]:
    """A' m, six numbers to four, SCALES times too large."""
    s, d, t, u = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [m[0] * 6 - s * 4 + t, u - d * 2, t - s, u * 2 - d + m[5] * 6]


Place = tuple[Value, Value, Value]      # of a tile: item, row, column


@dataclass(frozen=True)
class Winograd(Tactic):
    """A block of `tiles`, of which `group` by `vectors` of couts are a micro-kernel."""
    group: int
    vectors: int
    tiles: int

    def __str__(self) -> str:
        return f"Winograd 4x4, {self.tiles} tiles by {self.group}x{self.vectors}"


class _Numbers(ABC):
    """What differs between INT8 and float32: types in scratch, products, the end."""
    v_bytes: int                # of an element of V, and of the weights
    pair: int                   # elements of V that a product takes at once
    weights: str                # dtype that a plan keeps them in

    @abstractmethod
    def load(self, address: Value, count: int) -> Value:
        """`count` channels of x, as they are transformed."""

    @abstractmethod
    def zero(self, f: Function, count: int) -> Value:
        ...

    @abstractmethod
    def sums(self, isa: Isa) -> str:
        """The type of a vector of M."""

    @abstractmethod
    def dot(self, isa: Isa, acc: Value, pixel: Value, weights: Value) -> Value:
        """acc + pixel * weights; pixel: `pair` elements, the same for every cout."""

    @abstractmethod
    def finish(self, isa: Isa, value: Value, i: int, j: int) -> Value:
        """Output (i, j) of a tile as float32, no longer too large."""


class _Shorts(_Numbers):
    v_bytes, pair, weights = 2, 2, "int8"

    def load(self, address: Value, count: int) -> Value:
        loaded = address.f.load(vector(count, I8), address, hint="bytes")
        return address.f.cast("zext", loaded, vector(count, I16), "x")

    def zero(self, f: Function, count: int) -> Value:
        return f.constant(0, vector(count, I16))

    def sums(self, isa: Isa) -> str:
        return isa.ints

    def dot(self, isa: Isa, acc: Value, pixel: Value, weights: Value) -> Value:
        shorts = (acc.f.cast("bitcast", value, vector(2 * isa.lanes, I16), "shorts") for value in (pixel, weights))
        return isa.dot2(acc, *shorts)

    def finish(self, isa: Isa, value: Value, i: int, j: int) -> Value:
        power = SCALES[i] * SCALES[j] // 9
        ninth = pow(9, -1, 1 << 32) - (1 << 32)
        return isa.to_float((value * ninth).binary("ashr", power.bit_length() - 1))


class _Floats(_Numbers):
    v_bytes, pair, weights = 4, 1, "float32"

    def load(self, address: Value, count: int) -> Value:
        return address.f.load(vector(count, FLOAT), address, 4, "x")

    def zero(self, f: Function, count: int) -> Value:
        return f.constant(0, vector(count, FLOAT))

    def sums(self, isa: Isa) -> str:
        return isa.floats

    def dot(self, isa: Isa, acc: Value, pixel: Value, weights: Value) -> Value:
        return isa.fma(pixel, weights, acc)

    def finish(self, isa: Isa, value: Value, i: int, j: int) -> Value:
        return value * (1 / (SCALES[i] * SCALES[j]))


_NUMBERS: dict[str, _Numbers] = {"int8": _Shorts(), "fp32": _Floats()}


# ---- tactics
def tactics(spec: Contraction, isa: Isa) -> Sequence[Winograd]:
    """None where the layer is no such convolution, its sums may be too large, or its weights are.

    Those become 36 numbers where 9 were: with many channels and few tiles that use them, reading them takes the time.
    """
    numbers = _NUMBERS.get(spec.precision)
    fits = (spec.taps == (3, 3) and spec.stride == (1, 1) and spec.dilation == (1, 1) and spec.groups == 1
            and spec.x.strides[2] == spec.x.size and spec.cin % isa.lanes == 0)
    if numbers is None or not fits or (spec.precision == "int8" and not spec.bounded):
        return ()
    if POSITIONS * spec.cin * spec.cout > isa.winograd_weights:
        return ()
    found: dict[Winograd, None] = {}
    for group, vectors in isa.winograd_tiles:
        blocks = [n * group for n in (1, 2, 4) if n * group * POSITIONS * spec.cin * numbers.v_bytes <= SCRATCH]
        # Items of fewer tiles than any block's are timed alike: several share a block, and the largest reads weights
        # least often.
        for tiles in [tiles for tiles in blocks if tiles < _tiles(spec)] or blocks[-1:]:
            found[Winograd(group, min(vectors, isa.vectors_for(spec.cout)), tiles)] = None
    return tuple(found)


def _tiles(spec: Contraction) -> int:
    """Tiles of an item."""
    return -(-spec.rows // OUTPUT) * -(-spec.cols // OUTPUT)


def cost(spec: Contraction, isa: Isa, tactic: Winograd) -> float:
    """Products, transforms on both sides, and the weights, which are read for each block of tiles."""
    numbers, tiles = _NUMBERS[spec.precision], _tiles(spec)
    panels = -(-spec.cout // (tactic.vectors * isa.lanes))
    group, vectors = tactic.group, tactic.vectors
    turn = Work(group * vectors, 0 if isa.one_dot2 or numbers.pair == 1 else group * vectors, group + vectors)
    products = turn * (POSITIONS * spec.cin // numbers.pair / group) * panels
    inputs = Work(0, 144, POSITIONS, POSITIONS) * (spec.cin * numbers.v_bytes / isa.bytes)
    end = epilogue(len(spec.program.instructions), len(spec.operands), vectors, 4)
    outputs = (Work(0, 110, POSITIONS) + end * OUTPUT ** 2) * (panels * vectors)
    weights = POSITIONS * spec.cin * spec.cout * numbers.v_bytes
    return tiles * (products.cycles + inputs.cycles + outputs.cycles) + reading(weights, max(tiles / tactic.tiles, 1))


def grid(spec: Contraction, tactic: Winograd) -> Grid:
    """A row is a tile."""
    return Grid(_tiles(spec), tactic.tiles)


def windows(spec: Contraction) -> Sequence[Window]:
    """A row of the grid is a tile: its row of tiles reads 6 rows of x and writes 4 of y."""
    across = -(-spec.cols // OUTPUT)
    return [Window.along(spec.x, 0, across, OUTPUT, count=PATCH),
            *(Window.along(view, 0, across, OUTPUT, count=OUTPUT) for view in (*spec.operands, spec.y))]


# ---- constants
def pack_weights(spec: Contraction, isa: Isa, weights: Array, panels: Sequence[Array]) -> Array:
    """[cout, cin, 3, 3] -> [panel][cin / pair][tap][vector][lane][pair], of which `made_weights` makes G g G'.

    panels: [vector][lane] -> cout; past the last for none.
    """
    numbers = _NUMBERS[spec.precision]
    stored = np.asarray(weights, numbers.weights)
    steps = stored.reshape(len(stored), -1, numbers.pair, spec.taps[0] * spec.taps[1])
    steps = np.concatenate([steps, np.zeros_like(steps[:1])])
    return np.concatenate([steps[np.minimum(order, len(stored))].transpose(2, 4, 0, 1, 3).ravel() for order in panels])


def made_weights(spec: Contraction, isa: Isa, panels: Sequence[Array]) -> WinogradWeights:
    """What makes them ready to be multiplied."""
    numbers, widest, last = _NUMBERS[spec.precision], len(panels[0]), len(panels[-1])
    whole = sum(len(order) == widest for order in panels)
    return WinogradWeights(numbers.weights, spec.cin // numbers.pair, isa.lanes * numbers.pair, whole, widest,
                           last if last < widest else 0)


# ---- code
def emit(spec: Contraction, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
    _Emitter(spec, module, name, isa, tactic).kernel()


class _Emitter:
    def __init__(self, spec: Contraction, module: Module, name: str, isa: Isa, tactic: Winograd) -> None:
        self.spec, self.module, self.name, self.isa, self.tactic = spec, module, name, isa, tactic
        self.numbers = _NUMBERS[spec.precision]
        self.panel = tactic.vectors * isa.lanes
        self.v_tile = spec.cin * self.numbers.v_bytes           # bytes of a tile in V, at one position
        self.m_tile = self.panel * 4                            # and in M

    def kernel(self) -> None:
        spec, tiles = self.spec, self.tactic.tiles
        count = len(spec.operands)
        f, addresses, bounds = begin_kernel(self.module, self.name, 1 + count + 2 + 1)
        x, *operands = addresses[:1 + count]
        weights, constants, y = addresses[1 + count:]
        v, m = (f.op(PTR, f"alloca [{POSITIONS * tiles * size} x i8], align 64", hint)
                for size, hint in ((self.v_tile, "v"), (self.m_tile, "m")))
        for start in f.range("block", bounds[0], bounds[1], tiles):
            number = (bounds[1] - start).at_most(tiles)
            for t in f.range("tile", start.like(0), number):
                self._transform_input(f, start + t, x, v + t * self.v_tile)
            for first, channels in f.tiles("panel", spec.cout, self.panel):
                vectors = self.isa.vectors_for(channels)
                self._products(f, v, weights + first * (POSITIONS * self.v_tile), m, number, vectors)
                here = [address + first * view.strides[2]
                        for address, view in zip((*operands, y), self._outputs, strict=True)]
                for t in f.range("tile", start.like(0), number):
                    self._transform_output(f, start + t, channels, m + t * (vectors * self.isa.bytes),
                                           constants + first * (4 * spec.program.constants), here)

    @property
    def _outputs(self) -> Sequence[View]:
        return (*self.spec.operands, self.spec.y)

    def _transform_input(self, f: Function, tile: Value, x: Value, v: Value) -> None:
        place = self._place(tile)
        x = self._advance(x, self.spec.x, place)
        self._cut(f, place, lambda rows, cols: f.run(
            self._input(rows + PATCH - OUTPUT, cols + PATCH - OUTPUT), x, v))

    def _transform_output(self, f: Function, tile: Value, channels: int, m: Value, constants: Value,
                          outputs: Sequence[Value]) -> None:
        """outputs: addresses of the operands and y, of the panel's first cout."""
        place = self._place(tile)
        here = [self._advance(address, view, place) for address, view in zip(outputs, self._outputs, strict=True)]
        self._cut(f, place, lambda rows, cols: f.run(self._output(rows, cols, channels), m, constants, *here))

    @staticmethod
    def _advance(address: Value, view: View, place: Place) -> Value:
        """The tile's first pixel."""
        item, i, j = place
        return address + (item * view.item + i * (OUTPUT * view.strides[0]) + j * (OUTPUT * view.strides[1]))

    def _place(self, tile: Value) -> Place:
        """(item, row, column) of a tile of the batch."""
        across = -(-self.spec.cols // OUTPUT)
        item, place = tile.divided(_tiles(self.spec)), tile.remainder(_tiles(self.spec))
        return item, place.divided(across), place.remainder(across)

    def _cut(self, f: Function, place: Place, body: Callable[[int, int], None]) -> None:
        """body(rows, columns that the tile has inside the image)."""
        def along(index: Value, extent: int, then: Callable[[int], None]) -> None:
            whole, tail = divmod(extent, OUTPUT)
            if whole:
                with f.when(index.below(whole)):
                    then(OUTPUT)
            if tail:
                with f.when(index.compare("uge", whole)):
                    then(tail)

        _, i, j = place
        along(i, self.spec.rows, lambda rows: along(j, self.spec.cols, lambda cols: body(rows, cols)))

    # ---- V = B' d B
    def _input(self, rows: int, cols: int) -> str:
        """A patch of which so many rows and columns lie in x; what lies beyond is 0. Its name."""
        name = f"{self.name}_input_{rows}x{cols}"
        if name in self.module.functions:
            return name
        f, spec, numbers = self.module.function(name, internal=True, x=PTR, v=PTR), self.spec, self.numbers
        count = self.isa.bytes // numbers.v_bytes
        while spec.cin % count:
            count //= 2
        at = dict(f.parameters)
        for _ in f.loop("channels", spec.cin // count, at=at):
            patch = [[numbers.load(at["x"] + (i * spec.x.strides[0] + j * spec.x.strides[1]), count)
                      if i < rows and j < cols else numbers.zero(f, count) for j in range(PATCH)] for i in range(PATCH)]
            half = [transform_input(row) for row in patch]
            for j in range(PATCH):
                for i, value in enumerate(transform_input([row[j] for row in half])):
                    f.store(value, at["v"] + (i * PATCH + j) * self.tactic.tiles * self.v_tile,
                            count * numbers.v_bytes)
            at["x"] += count * spec.x.size
            at["v"] += count * numbers.v_bytes
        return name

    # ---- M = V W
    def _products(self, f: Function, v: Value, weights: Value, m: Value, number: Value, vectors: int) -> None:
        group, width = self.tactic.group, vectors * self.isa.bytes
        whole, rest = number.divided(group), number.remainder(group)
        w_position = self.v_tile * vectors * self.isa.lanes
        for e in f.loop("position", POSITIONS):
            here = (v + e * (self.tactic.tiles * self.v_tile), weights + e * w_position,
                    m + e * (self.tactic.tiles * width))

            def call(size: int, tile: Value, here: tuple[Value, ...] = here) -> None:
                f.run(self._micro(size, vectors), here[0] + tile * self.v_tile, here[1], here[2] + tile * width)

            for g in f.range("group", whole.like(0), whole):
                call(group, g * group)
            for size in (8, 4, 2, 1):
                if size < group:
                    with f.when(rest.binary("and", size).compare("ne", 0)):
                        call(size, whole * group + rest.binary("and", -2 * size))

    def _micro(self, tiles: int, vectors: int) -> str:
        """tiles x vectors of M at one position, all of cin in registers; its name."""
        name = f"{self.name}_product_{tiles}x{vectors}"
        if name in self.module.functions:
            return name
        f, isa, numbers = self.module.function(name, internal=True, v=PTR, w=PTR, m=PTR), self.isa, self.numbers
        acc = {(t, n): f.constant(0, numbers.sums(isa)) for t in range(tiles) for n in range(vectors)}
        at = {key: f.parameters[key] for key in ("v", "w")}
        word, lanes = (I32, isa.ints) if numbers.pair == 2 else (FLOAT, isa.floats)
        for _ in f.loop("k", self.spec.cin // numbers.pair, acc=acc, at=at):
            weights = [f.load(lanes, at["w"] + n * isa.bytes, isa.bytes, "weights") for n in range(vectors)]
            for t in range(tiles):
                pixel = f.splat(f.load(word, at["v"] + t * self.v_tile, 4, "pixel"), isa.lanes)
                for n in range(vectors):
                    acc[t, n] = numbers.dot(isa, acc[t, n], pixel, weights[n])
            at["v"] += 4
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
        spec, isa, numbers = self.spec, self.isa, self.numbers
        operands = {f"operand{n}": PTR for n in range(len(spec.operands))}
        f = self.module.function(name, internal=True, m=PTR, constants=PTR, **operands, y=PTR)
        lanes = Lanes(isa, channels, spec.y.dtype == "uint8")
        position = self.tactic.tiles * lanes.vectors * isa.bytes
        columns = []        # [vector][column of the patch][row of the output]
        for n in range(lanes.vectors):
            at = f.parameters["m"] + n * isa.bytes
            columns.append([transform_output([f.load(numbers.sums(isa), at + (i * PATCH + j) * position, isa.bytes, "m")
                                              for i in range(PATCH)]) for j in range(PATCH)])
        for i in range(rows):
            row = [[numbers.finish(isa, value, i, j) for j, value in enumerate(
                transform_output([column[i] for column in half]))] for half in columns]
            pixels = [[values[j] for values in row] for j in range(cols)]
            emit_epilogue(f, lanes, spec.program, spec.operands, spec.y, [(i, j) for j in range(cols)],
                          pixels.__getitem__)
        return name
