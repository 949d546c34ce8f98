"""Convolution and matrix product: one register-tiled kernel for every arithmetic.

    y[n, i, j, o] = program(sum over p, q, c of
                            x[n, i * stride + p * dilation, j * stride + q * dilation, c] * w[o, c, p, q])

    for block of pixels:                           its rows of x stay in cache while the panels pass
      for panel of couts:                          its weights stay in cache while the tiles pass
        for tile of pixels:                        a call of the micro-kernel:
          for tap: for k: for pixel: for vector:
            acc[pixel, vector] = dot(acc[pixel, vector], x[pixel, k], w[vector, k])       all in registers
          program, store

x and y are NHWC; x's address is that of tap (0, 0) of output pixel (0, 0), and around it lies a halo of zero points, so
that no tap needs a test. Where the taps of a kernel row and their channels are one run of bytes, the run is one K loop;
it is rounded up to whole steps with zero weights, so x needs up to 15 readable bytes past its end. The matrix product
x[M, K] w[N, K]' is the 1x1 convolution of one row of M pixels.

Two ways to cut the pixels into rows of the grid:
  by item   the rows of tiles of each item's image; every tail is known when the kernel is written
  by batch  items of few pixels (a matrix product of one row each) follow each other as one long row of pixels, whose
            length is known at run time: its tail is cut into tiles of 8, 4, 2, 1 pixels. So one kernel is that of one
            row, where a batch is one row, and that of full tiles, where it is many
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import I32, I64, PTR, Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import hidden
from engines.backends.llvm.kernels.common.arithmetic import STORED, Arithmetic, Operand, arithmetic_for
from engines.backends.llvm.kernels.contraction import winograd
from engines.backends.llvm.kernels.contraction.pairing import PLACE, STEP, emit_steps, pair
from engines.backends.llvm.kernels.contraction.store import emit_epilogue
from engines.backends.llvm.kernels.contraction.taps import Border, TapAxis
from engines.backends.llvm.kernels.contraction.widen import widened
from engines.backends.llvm.kernels.contraction.winograd import Winograd
from engines.backends.llvm.kernels.kernel import (
    Grid,
    ImageKernel,
    KernelSpec,
    Tactic,
    Window,
    begin_kernel,
    pack_channels,
)
from engines.backends.llvm.tuning.cost import CALL, LATENCY, Work, epilogue, pieces, reading
from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View

LEFT_ALONE = 9          # weights of a channel that find no partner, whatever their number: so it is with normal ones
FEW_PIXELS = 8          # items of no more pixels than this are cut by batch
TAILS = (8, 4, 2, 1)    # pixels of the tiles that a batch's last pixels are cut into
BLOCK_BYTES = 256 << 10     # of x, in a block of a batch's pixels: it stays in the second level while the panels pass


@dataclass(frozen=True)
class Tile(Tactic):
    """rows x cols pixels by `vectors` of couts are a micro-kernel; its accumulators must fit the registers."""
    rows: int
    cols: int
    vectors: int            # 1, 2 or 4
    block: int = 0          # rows of tiles in a block of pixels; 0: all of them
    prefetch: bool = False  # ask for the next panel's weights, a line at every k
    paired: bool = False    # INT8: products are summed two by two in 16 bits first, weights laid out as in pairing.py
    skip: bool = False      # leave out taps that read nothing but the border of zeros

    @property
    def shape(self) -> tuple[int, int]:
        """(pixels, vectors)"""
        return self.rows * self.cols, self.vectors

    def __str__(self) -> str:
        words = (f"tile {self.rows}x{self.cols}x{self.vectors}", "paired" if self.paired else "",
                 f"block {self.block}" if self.block else "", "prefetch" if self.prefetch else "",
                 "skip" if self.skip else "")
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Contraction(ImageKernel):
    """Views of one item are [rows, columns, channels]; x's includes all that the taps reach."""
    precision: str                  # int8, fp32, bf16, fp16
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    border: Border = Border()       # of x
    bounded: bool = False           # INT8: no x makes a sum of x * w leave +-2**25
    items: int = 1                  # of the batches that its tactics are for, if it is cut by batch
    family = "contraction"

    @property
    def misfit(self) -> str:
        return super().misfit or ("" if self.x.dtype == STORED[self.precision] else self.x.dtype)

    @property
    def rows(self) -> int:
        return self.y.shape[0]

    @property
    def cols(self) -> int:
        return self.y.shape[1]

    @property
    def cout(self) -> int:
        """Of one group."""
        return self.y.shape[2] // self.groups

    @property
    def cin(self) -> int:
        """Of one group."""
        return self.x.shape[2] // self.groups

    @property
    def macs(self) -> int:
        return math.prod(self.y.shape) * self.cin * math.prod(self.taps)

    # ---- how x is walked
    @cached_property
    def one_run(self) -> bool:
        """The taps of a kernel row are neighbours in memory, and nothing lies between them."""
        return self.groups == 1 and (self.taps[1] == 1 or (
            self.dilation[1] == 1 and self.x.strides[1] == self.cin * self.x.size))

    @property
    def run(self) -> int:
        """Elements of x that one K loop walks."""
        return self.cin * self.taps[1] if self.one_run else self.cin

    def arithmetic(self, isa: Isa) -> Arithmetic:
        return arithmetic_for(self.precision, isa)

    def steps(self, isa: Isa) -> int:
        """Turns of one K loop."""
        return -(-self.run // self.arithmetic(isa).elements)

    def turns(self, isa: Isa) -> int:
        """Turns of all K loops of a pixel."""
        return self.steps(isa) * self.taps[0] * (1 if self.one_run else self.taps[1])

    @cached_property
    def axes(self) -> tuple[TapAxis, TapAxis]:
        """Rows, columns."""
        border = self.border
        edges = ((border.top, border.bottom), (border.left, border.right))
        rows, cols = (TapAxis(self.x.shape[a], *edges[a], self.taps[a], self.stride[a], self.dilation[a])
                      for a in (0, 1))
        return rows, cols

    # ---- how the pixels are cut
    @cached_property
    def flat(self) -> Contraction:
        """The same with each image as one long row of pixels, where its rows follow each other without a gap."""
        def joined(view: View) -> View:
            return replace(view, shape=(1, view.shape[0] * view.shape[1], view.shape[2]))

        views = (self.x, self.y, *self.operands)
        together = all(v.strides[0] == v.shape[1] * v.strides[1] for v in views)
        if self.taps != (1, 1) or self.stride != (1, 1) or not together or self.rows == 1:
            return self
        return replace(self, x=joined(self.x), y=joined(self.y), operands=tuple(map(joined, self.operands)))

    @cached_property
    def by_batch(self) -> bool:
        """The items' pixels are one long row as well, and an item has too few of them to fill tiles."""
        views = (self.flat.x, self.flat.y, *self.flat.operands)
        return (self.flat.rows == 1 and self.flat.cols <= FEW_PIXELS and self.taps == (1, 1) and self.stride == (1, 1)
                and all(v.item == v.shape[1] * v.strides[1] for v in views))

    def block_of_the_batch(self, tile: Tile) -> int:
        """Pixels, where the spec is cut by batch."""
        fitting = BLOCK_BYTES // (tile.cols * self.flat.x.strides[1])
        return tile.cols * (tile.block or max(fitting, 1))

    def lines(self, tile: Tile) -> int:
        """Rows of tiles of an item; of one long row of pixels, its tiles."""
        if self.flat.rows == 1:
            return -(-self.flat.cols // tile.cols)
        return -(-self.rows // tile.rows)

    def grid(self, isa: Isa, tactic: Tile | Winograd) -> Grid:
        if isinstance(tactic, Winograd):
            return winograd.grid(self, tactic)
        columns = self.groups if self.groups > 1 else -(-self.cout // self._panel(isa, tactic))
        if self.by_batch:
            return Grid(self.flat.cols, 1, columns)
        return Grid(self.lines(tactic), 1, columns)

    def windows(self, isa: Isa, tactic: Tile | Winograd) -> Sequence[Window]:
        if isinstance(tactic, Winograd):
            return winograd.windows(self)
        spec = self.flat
        axis, size = (1, tactic.cols) if spec.rows == 1 else (0, tactic.rows)
        size = 1 if self.by_batch else size
        read = (size - 1) * spec.stride[axis] + (spec.taps[axis] - 1) * spec.dilation[axis] + 1
        return [Window.along(spec.x, axis, 1, size * spec.stride[axis], count=read),
                *(Window.along(view, axis, 1, size, count=size) for view in (*spec.operands, spec.y))]

    def _panel(self, isa: Isa, tile: Tile | Winograd) -> int:
        return tile.vectors * isa.lanes

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[Tile | Winograd]:
        """Tile shapes, of which `refinements` cuts the blocks; other ways to make the sums."""
        pairs = isa.paired_tiles if self.precision == "int8" else ()
        shapes = tile_shapes(isa, self.precision)
        return (*self._tiles(isa, pairs, paired=True), *self._tiles(isa, shapes, paired=False),
                *winograd.tactics(self, isa))

    def _tiles(self, isa: Isa, shapes: Sequence[tuple[int, int]], paired: bool) -> Sequence[Tile]:
        """Tiles of these (pixels, vectors), as far as the layer has so many."""
        widest = isa.vectors_for(self.cout)
        found: dict[Tile, None] = {}
        for cols, vectors in shapes:
            vectors = min(vectors, widest)
            cols = min(cols, self.flat.cols * self.items)
            found[Tile(1, cols, vectors, paired=paired)] = None
            if self.border != Border() and not paired:      # paired weights are not in the order of taps
                found[Tile(1, cols, vectors, skip=True)] = None
            most = max((cols for cols, v in shapes if v >= vectors), default=1)
            if self.flat.rows > 1 and cols == self.cols and 2 * cols <= most:
                found[Tile(2, cols, vectors, paired=paired)] = None
        return tuple(found)

    def refinements(self, isa: Isa, best: Tile | Winograd) -> Sequence[Tile]:
        """The best tile with its pixels cut into blocks, with and without prefetch."""
        if isinstance(best, Winograd):
            return ()
        blocks = [0] if self.by_batch else [0, *(b for b in (1, 2, 4, 8, 16) if b < self.lines(best))]
        weights = self.turns(isa) * self.cout * self.arithmetic(isa).step_bytes
        return tuple(replace(best, block=block, prefetch=prefetch) for block in blocks
                     for prefetch in ((False, True) if weights >= 1 << 16 else (False,)))

    def cost(self, isa: Isa, tactic: Tile | Winograd) -> float:
        if isinstance(tactic, Winograd):
            return winograd.cost(self, isa, tactic)
        return sum(self._cycles(isa, tactic, items) / items for items in {1, self.items})

    def _cycles(self, isa: Isa, tactic: Tile, items: int) -> float:
        """Every tile's turns and epilogue; of what memory, the weights of a tile, of a block, and x for each panel."""
        panels = pieces(self.cout, self._panel(isa, tactic))
        if self.by_batch:
            pixels = items * self.flat.cols
            tiles, blocks = tiles_of_the_batch(pixels, tactic.cols), -(-pixels // self.block_of_the_batch(tactic))
        else:
            lines = self.lines(tactic)
            tiles, blocks = self._tiles_of_an_item(tactic), items * -(-lines // (tactic.block or lines))
        total, weights = 0.0, 0.0
        turns, weight_bytes = self._turns(isa, tactic.paired)
        for couts, times in panels:
            vectors = isa.vectors_for(couts)
            size = turns * vectors * weight_bytes
            weights += times * size
            total += times * sum(count * (self._tile_cost(isa, pixels, vectors, tactic) + reading(size))
                                 for pixels, count in tiles)
        x = items * math.prod(self.x.shape) * self.x.size / blocks / self.groups
        total += reading(x, blocks * (sum(times for _, times in panels) - 1))
        return self.groups * (total + reading(weights, blocks * (0.5 if tactic.prefetch else 1)))

    def _tiles_of_an_item(self, tile: Tile) -> list[tuple[int, int]]:
        """(pixels, how many of them)"""
        return [(height * width, count * times) for height, count in pieces(self.flat.rows, tile.rows)
                for width, times in pieces(self.flat.cols, tile.cols)]

    def _turns(self, isa: Isa, paired: bool) -> tuple[float, int]:
        """Turns of all K loops, and bytes of a vector's weights in each."""
        if paired:
            turns = -(-self.run // STEP) * len(self._run_offsets())
            return turns + LEFT_ALONE / STEP, isa.lanes * STEP
        return self.turns(isa), self.arithmetic(isa).weight_bytes(isa)

    def _tile_cost(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        dots, (turns, weight_bytes) = pixels * vectors, self._turns(isa, tile.paired)
        parts = -(-weight_bytes // isa.bytes)       # instructions of a dot product, each with its sum
        latency = 1                                 # from one sum to the next
        if tile.paired:
            turn = Work(2, 1, 1) * dots + Work(others=pixels, loads=pixels)
        elif parts == 1:
            turn, latency = Work(dots, 0, pixels + vectors), LATENCY
        else:
            turn = Work(dots * parts, (dots + pixels) * parts, pixels + dots * parts)
        cycles = max(turn.cycles, latency) * (self._live(isa, tile.rows) if tile.skip else 1)
        program = epilogue(len(self.program.instructions), len(self.operands), vectors, pixels) * dots
        return turns * (cycles + tile.prefetch / 4) + program.cycles + CALL

    def _live(self, isa: Isa, rows: int) -> float:
        """The share of the taps that is not left out."""
        whole_steps = not self.one_run or self.cin % self.arithmetic(isa).elements == 0
        counted = (rows == 1, whole_steps)
        return math.prod(float(np.mean([len(axis.live(o)) / axis.taps for o in range(outputs)]))
                         for axis, outputs, counts in zip(self.axes, self.y.shape, counted, strict=False) if counts)

    def packing(self, tactic: Tile | Winograd) -> tuple[type, int, bool]:
        return type(tactic), tactic.vectors, isinstance(tactic, Tile) and tactic.paired

    def packing_is_permutation(self, tactic: Tile | Winograd) -> bool:
        return isinstance(tactic, Tile) and not tactic.paired

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile | Winograd) -> None:
        if isinstance(tactic, Winograd):
            winograd.emit(self, module, name, isa, tactic)
        else:
            _Emitter(self.flat, module, name, isa, tactic).kernel(self.by_batch)

    # ---- constants
    def pack(self, isa: Isa, tactic: Tile | Winograd, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"weights": [cout of all groups, cin, *taps] (s8 or float) -> [panel][tap][k][vector][lane][element], or the
        three arrays of Paired, or what Winograd's are made of;
        "program": a sequence of float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        arithmetic, panels = self.arithmetic(isa), self._panels(isa, tactic)
        taps_last = np.asarray(constants["weights"]).reshape(-1, self.cin, *self.taps).transpose(0, 2, 3, 1)
        runs = arithmetic.store_weights(taps_last).reshape(len(taps_last), -1, self.run)
        runs = np.concatenate([runs, np.zeros_like(runs[:1])])          # absent channels read the last, zeros
        orders = [np.minimum(order, len(runs) - 1) for order in panels]
        program = pack_channels(constants["program"], self.y.shape[2], [order.tolist() for order in panels])
        if isinstance(tactic, Winograd):
            return winograd.pack_weights(self, isa, constants["weights"], panels), program
        if tactic.paired:       # absent vectors of a last panel have their places too
            width = self._panel(isa, tactic)
            whole = [np.pad(order.ravel(), (0, width - order.size), constant_values=len(runs) - 1) for order in orders]
            paired = pair(runs[np.stack(whole)], self._run_offsets())
            return paired.steps, paired.places, paired.starts, program
        runs = np.ascontiguousarray(np.pad(runs, ((0, 0), (0, 0), (0, -self.run % arithmetic.elements))))
        # Elements that stay together are moved as one: [cout][turn]
        steps = runs.reshape(len(runs), -1).view(f"u{arithmetic.elements * runs.itemsize}")
        turned = [np.ascontiguousarray(steps[order].transpose(2, 0, 1))[..., None].view(runs.dtype)
                   for order in orders]                                 # [turn][vector][lane][element]
        return np.concatenate([arithmetic.ready(isa, panel).ravel() for panel in turned]), program

    def made(self, isa: Isa, tactic: Tile | Winograd) -> Mapping[int, KernelSpec]:
        if isinstance(tactic, Winograd):
            return {0: winograd.made_weights(self, isa, self._panels(isa, tactic))}
        return widened(isa) if self.precision == "int8" and not tactic.paired else {}

    def _run_offsets(self) -> Array:
        """Bytes from tap (0, 0) to the start of each run."""
        rows, columns = (np.arange(n) * d * s for n, d, s in zip(
            (self.taps[0], 1 if self.one_run else self.taps[1]), self.dilation, self.x.strides[:2], strict=True))
        return (rows[:, None] + columns).ravel()

    def _panels(self, isa: Isa, tile: Tile | Winograd) -> list[Array]:
        """For each panel [vectors][lanes] -> absolute channel, or one past the last where there is none."""
        panels, width = [], self._panel(isa, tile)
        for group in range(self.groups):
            for start in range(0, self.cout, width):
                lanes = Lanes(isa, min(width, self.cout - start), self.y.dtype == "uint8")
                order = np.asarray(lanes.order())
                panels.append(np.where(order < lanes.channels, order + group * self.cout + start, self.y.shape[2]))
        return panels

    # ---- meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        wide: np.dtype[Any] = np.dtype(np.int64 if self.precision == "int8" else np.float32)
        arithmetic = arithmetic_for(self.precision, _ANY_MACHINE)
        weights = load_meaning(arithmetic.weights_dtype, arithmetic.store_weights(constants["weights"])).astype(wide)
        weights = weights.reshape(self.groups, self.cout, self.cin, *self.taps)
        x = load_meaning(self.x.dtype, x).astype(wide).reshape(*x.shape[:3], self.groups, self.cin)
        sums = np.zeros((len(x), self.rows, self.cols, self.groups, self.cout), wide)
        for p in range(self.taps[0]):
            for q in range(self.taps[1]):
                pixels = x[:, p * self.dilation[0]:, q * self.dilation[1]:]
                pixels = pixels[:, ::self.stride[0], ::self.stride[1]][:, :self.rows, :self.cols]
                sums += np.einsum("nijgc,goc->nijgo", pixels, weights[..., p, q], optimize=True)
        accumulator = sums.reshape(len(x), *self.y.shape).astype(np.float32)
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        return (store_meaning(self.y.dtype, self.program.meaning(accumulator, others, constants["program"])),)


_ANY_MACHINE = Isa("reference", 4, 16, "", "", frozenset())


def tiles_of_the_batch(pixels: int, cols: int) -> list[tuple[int, int]]:
    """(pixels, how many of them) of the tiles that so many pixels are cut into."""
    whole, rest = divmod(pixels, cols)
    return [(size, count) for size, count in ((cols, whole), *((tail, 1) for tail in TAILS if rest & tail)) if count]


def tile_shapes(isa: Isa, precision: str) -> Sequence[tuple[int, int]]:
    """(pixels, vectors) worth trying on a machine, the usual winner first."""
    return isa.tiles if precision == "int8" else isa.float_tiles or isa.tiles


@dataclass(frozen=True)
class _Part:
    """A tile as a micro-kernel of its own: its size and, where taps in the border are left out, where it lies."""
    rows: int
    cols: int
    tap_rows: tuple[Value, Value] | None = None     # the first, and how many
    column: int | None = None       # of its first pixel, at an edge of x; None: away from the edges, all taps are live


@dataclass(frozen=True)
class _Pointers:
    """What a micro-kernel is given: addresses of its first pixel and panel."""
    x: Value
    operands: tuple[Value, ...]
    y: Value


class _Emitter:
    """Writes one kernel: the loops around, and the micro-kernels they call."""

    def __init__(self, spec: Contraction, module: Module, name: str, isa: Isa, tile: Tile) -> None:
        self.spec, self.module, self.name, self.isa, self.tile = spec, module, name, isa, tile
        self.arithmetic = spec.arithmetic(isa)
        self.panel = tile.vectors * isa.lanes

    # ---- the loops around
    def kernel(self, by_batch: bool) -> None:
        count, packed = len(self.spec.operands), 4 if self.tile.paired else 2
        f, addresses, bounds = begin_kernel(self.module, self.name, 1 + count + packed + 1)
        x, *operands = addresses[:1 + count]
        *self.weights, self.constants, y = addresses[1 + count:]
        self.bounds = bounds
        here = _Pointers(x, tuple(operands), y)
        if by_batch:
            self._pixels_of_the_batch(f, here)
        else:
            self._blocks(f, here)

    def _blocks(self, f: Function, base: _Pointers) -> None:
        """Row u of the grid is line u % lines of item u // lines; a block of them meets one panel after the other."""
        begin, end = self.bounds[:2]
        lines = self.spec.lines(self.tile)
        block = self.tile.block or lines
        rows, cols = (0, self.tile.cols) if self.spec.rows == 1 else (self.tile.rows, 0)
        first_item = begin.divided(lines)
        for item in f.range("item", first_item, (end + (lines - 1)).divided(lines)):
            here = self._advance(base, *(item * view.item for view in self._views()))
            first = f.select(item.compare("eq", first_item), begin.remainder(lines), begin.like(0))
            last = (end - item * lines).at_most(lines)
            for start in f.range("block", first, last, block):
                stop = (start + block).at_most(last)
                self._panels(f, self._pixel(here, start * rows, start * cols), self._tiles(f, start, stop))

    def _tiles(self, f: Function, start: Value, stop: Value) -> Callable[[Callable[..., None]], None]:
        """The tiles of lines start..stop - 1, counted from the first, each with the size of its micro-kernel."""
        spec, tile = self.spec, self.tile
        across = -(-spec.cols // tile.cols)

        def visit(call: Callable[..., None]) -> None:
            if spec.rows == 1:
                for t, cols in self._lines(f, start, stop, spec.cols, tile.cols):
                    call(t.like(0), t * tile.cols, _Part(1, cols), t)
                return
            for t, rows in self._lines(f, start, stop, spec.rows, tile.rows):
                taps = spec.axes[0].live_of_several((start + t) * tile.rows, rows) if tile.skip else None
                for j, cols, column in self._columns(f):
                    call(t * tile.rows, j, _Part(rows, cols, taps, column), t * across + j.divided(tile.cols))
        return visit

    def _columns(self, f: Function) -> Iterator[tuple[Value, int, int | None]]:
        """(start, size, start where it is known now) of a row's tiles; with `skip` the first and the last are apart."""
        extent, step = self.spec.cols, self.tile.cols
        between = -(-extent // step) - 2
        if not self.tile.skip:
            for j, cols in f.tiles("column", extent, step):
                yield j, cols, None
            return
        yield f.constant(0, I64), min(step, extent), 0
        if between > 0:
            for j in f.loop("column", between):
                yield (j + 1) * step, step, None
        if between >= 0:
            last = (between + 1) * step
            yield f.constant(last, I64), extent - last, last

    @staticmethod
    def _lines(f: Function, start: Value, stop: Value, extent: int, step: int) -> Iterator[tuple[Value, int]]:
        """(number from `start` on, size) of each of the lines; only the last of an item may be smaller than step."""
        whole, rest = divmod(extent, step)
        if whole:
            for t in f.range("line", start.like(0), stop.at_most(whole) - start):
                yield t, step
        if rest:
            with f.when(stop.compare("ugt", whole)):
                yield stop.like(whole) - start, rest

    def _pixels_of_the_batch(self, f: Function, base: _Pointers) -> None:
        """Rows of the grid are pixels; full tiles, then one of TAILS for each bit of what remains."""
        step, cols = self.spec.block_of_the_batch(self.tile), self.tile.cols
        for start in f.range("pixels", self.bounds[0], self.bounds[1], step):
            count = (self.bounds[1] - start).at_most(step)
            whole, rest = count.divided(cols), count.remainder(cols)

            def visit(call: Callable[..., None], whole: Value = whole, rest: Value = rest) -> None:
                for t in f.range("tile", whole.like(0), whole):
                    call(whole.like(0), t * cols, _Part(1, cols), t)
                for size in TAILS:
                    if size < cols:
                        with f.when(rest.binary("and", size).compare("ne", 0)):
                            call(whole.like(0), whole * cols + rest.binary("and", -2 * size), _Part(1, size), whole)

            self._panels(f, self._pixel(base, start.like(0), start), visit)

    def _panels(self, f: Function, block: _Pointers, visit: Callable[[Callable[..., None]], None]) -> None:
        """The panels of couts that this call was given, over the tiles of a block."""
        spec, begin, end = self.spec, *self.bounds[2:]
        whole, tail = divmod(spec.cout, self.panel)
        if spec.groups > 1:
            for group in f.range("group", begin, end):
                inputs = self._advance(block, group * (spec.cin * spec.x.size), *self._channels(group * spec.cout))
                for start, channels in f.tiles("panel", spec.cout, self.panel):
                    self._panel(f, inputs, group * spec.cout, start, channels, visit)
            return
        if whole:
            for p in f.range("panel", begin, end.at_most(whole)):
                self._panel(f, block, p.like(0), p * self.panel, self.panel, visit)
        if tail:
            with f.when(end.compare("ugt", whole)):
                self._panel(f, block, end.like(0), end.like(whole * self.panel), tail, visit)

    def _panel(self, f: Function, block: _Pointers, first: Value, start: Value, channels: int,
               visit: Callable[[Callable[..., None]], None]) -> None:
        """One panel over all tiles; `first`: the group's first cout, `start`: the panel's, inside the group."""
        spec, isa = self.spec, self.isa
        # A last panel of fewer vectors is narrower in memory too, so a group's couts take this many places.
        panels = (min(self.panel, spec.cout - at) for at in range(0, spec.cout, self.panel))
        places = sum(isa.vectors_for(couts) * isa.lanes for couts in panels)
        before = first.divided(spec.cout) * places + start
        constants = self.constants + before * (4 * spec.program.constants)
        here = self._advance(block, start.like(0), *self._channels(start))
        weights = self._panel_weights(f, before, first, start)

        def call(i: Value, j: Value, part: _Part, tile: Value) -> None:
            pixel, arguments = self._pixel(here, i, j), dict(weights)
            if "ahead" in arguments and self.tile.prefetch:     # a line a turn: all of it after `vectors` tiles
                arguments["ahead"] += tile.at_most(self.tile.vectors) * (spec.turns(isa) * 64)
            x = pixel.x
            if part.tap_rows:
                first, arguments["tap_rows"] = part.tap_rows
                x += first * (spec.x.strides[0] * spec.dilation[0])
                turns = spec.turns(isa) // spec.taps[0]
                arguments["w"] += first * (isa.vectors_for(channels) * turns * self.arithmetic.weight_bytes(isa))
            f.run(self._microkernel(part, channels), x, constants, *pixel.operands, pixel.y, *arguments.values())

        visit(call)

    def _panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        """What a micro-kernel is told of a panel's weights, by the name of its parameter; `before`: couts in memory
        before the panel."""
        spec, isa = self.spec, self.isa
        if self.tile.paired:
            steps, places, starts = self.weights
            panel = first.divided(spec.cout) * -(-spec.cout // self.panel) + start.divided(self.panel)
            begin, end = (f.cast("zext", f.load(I32, starts + panel * 4 + at, 4, "step"), I64, "step") for at in (0, 4))
            return {"w": steps + begin * self.panel * STEP, "places": places + begin * PLACE, "count": end - begin}
        bytes_of_cout = spec.turns(isa) * self.arithmetic.weight_bytes(isa) // isa.lanes
        weights = self.weights[0] + before * bytes_of_cout
        return {"w": weights, "ahead": weights + self.panel * bytes_of_cout}

    # ---- addresses
    def _views(self) -> tuple[View, ...]:
        return (self.spec.x, *self.spec.operands, self.spec.y)

    @staticmethod
    def _advance(base: _Pointers, x: Value, *others: Value) -> _Pointers:
        """Bytes added to each pointer."""
        *operands, y = others
        return _Pointers(base.x + x, tuple(a + b for a, b in zip(base.operands, operands, strict=True)), base.y + y)

    def _channels(self, first: Value) -> list[Value]:
        return [first * view.strides[2] for view in self._views()[1:]]

    def _pixel(self, base: _Pointers, i: Value, j: Value) -> _Pointers:
        """Output pixel (i, j)."""
        x, stride = self.spec.x, self.spec.stride
        return self._advance(base, i * (x.strides[0] * stride[0]) + j * (x.strides[1] * stride[1]),
                             *(i * view.strides[0] + j * view.strides[1] for view in self._views()[1:]))

    # ---- the micro-kernel
    def _microkernel(self, part: _Part, channels: int) -> str:
        """rows x cols pixels of `channels` couts, all of K in registers; its name.

        Tactics that differ in their blocks only have it in common, where they are in one module.
        """
        name = "_".join([*str(replace(self.tile, block=0)).split(), f"{part.rows}x{part.cols}x{channels}",
                         *([] if part.column is None else [str(part.column)])])
        if name in self.module.functions:
            return name
        spec, isa, arithmetic = self.spec, self.isa, self.arithmetic
        operands = {f"operand{i}": PTR for i in range(len(spec.operands))}
        panel = dict(w=PTR, places=PTR, count=I64) if self.tile.paired else dict(w=PTR, ahead=PTR)
        panel |= {"tap_rows": I64} if part.tap_rows else {}
        f = self.module.function(name, internal=True, x=PTR, constants=PTR, **operands, y=PTR, **panel)
        lanes = Lanes(isa, channels, spec.y.dtype == "uint8")
        pixels = [(i, j) for i in range(part.rows) for j in range(part.cols)]
        acc = {(p, v): arithmetic.zero(isa, f.parameters["x"])
               for p in range(len(pixels)) for v in range(lanes.vectors)}
        if self.tile.paired:
            emit_steps(f, isa, acc, [self._offset(i, j) for i, j in pixels], lanes.vectors, self.panel * STEP,
                       self.tile.prefetch)
        else:
            self._sum(f, part, acc, pixels, lanes.vectors)
        emit_epilogue(f, lanes, spec.program, spec.operands, spec.y, pixels,
                      lambda p: [arithmetic.finish(isa, acc[p, v]) for v in range(lanes.vectors)])
        return name

    def _offset(self, i: int, j: int) -> int:
        """Bytes of x from the tile's first pixel to pixel (i, j)."""
        x, stride = self.spec.x, self.spec.stride
        return i * x.strides[0] * stride[0] + j * x.strides[1] * stride[1]

    def _sum(self, f: Function, part: _Part, acc: dict[tuple[int, int], Value], pixels: list[tuple[int, int]],
             vectors: int) -> None:
        """All of K, or its live taps, into acc {(pixel, vector)}."""
        spec, isa, arithmetic = self.spec, self.isa, self.arithmetic
        x_row, x_pixel, _ = spec.x.strides
        at = {key: f.parameters[key] for key in ("x", "w", "ahead")}
        live_rows = f.parameters.get("tap_rows")
        rows = f.loop("tap row", spec.taps[0], acc=acc, at=at) if live_rows is None else \
            f.range("tap row", live_rows.like(0), live_rows, acc=acc, at=at)
        for _ in rows:
            start = at["x"]
            for columns, live in self._tap_columns(part):
                alive = {p: pixel for p, pixel in enumerate(pixels) if pixel[1] in live}
                if spec.one_run:
                    steps = spec.steps(isa) if columns == spec.taps[1] else columns * spec.cin // arithmetic.elements
                    self._k_loop(f, steps, acc, at, alive, vectors)
                    continue
                for _ in f.loop("tap column", columns, acc=acc, at=at):
                    self._k_loop(f, spec.steps(isa), acc, at, alive, vectors)
                    at["x"] += x_pixel * spec.dilation[1] - spec.steps(isa) * arithmetic.step_bytes
            at["x"] = start + x_row * spec.dilation[0]

    def _tap_columns(self, part: _Part) -> list[tuple[int, frozenset[int]]]:
        """The taps of a kernel row as runs of (how many, the columns of the tile that they matter to)."""
        spec, every = self.spec, frozenset(range(part.cols))
        whole_steps = not spec.one_run or spec.cin % self.arithmetic.elements == 0
        if part.column is None or not whole_steps:
            return [(spec.taps[1], every)]
        runs = spec.axes[1].runs(range(part.column, part.column + part.cols))
        return [(taps, frozenset(column - part.column for column in live)) for taps, live in runs]

    def _k_loop(self, f: Function, steps: int, acc: dict[Any, Value], at: dict[str, Value],
                pixels: Mapping[int, tuple[int, int]], vectors: int) -> None:
        """`steps` turns for these pixels; the last one may be apart."""
        arithmetic = self.arithmetic
        apart = arithmetic.exact_end and self.spec.run % arithmetic.elements != 0
        if steps > apart:
            for _ in f.loop("k", steps - apart, acc=acc, at=at):
                self._turn(acc, at, pixels, vectors, arithmetic.pixel)
        if apart:
            self._turn(acc, at, pixels, vectors, arithmetic.last_pixel)

    def _turn(self, acc: dict[Any, Value], at: dict[str, Value], pixels: Mapping[int, tuple[int, int]], vectors: int,
              load: Callable[[Isa, Value], Operand]) -> None:
        """One step of each pixel meets one step of weights."""
        isa, arithmetic, first = self.isa, self.arithmetic, min(pixels, default=0)
        weights = self._weights(at["w"], vectors)
        for p, (i, j) in pixels.items():
            pixel = load(isa, at["x"] + self._offset(i, j))
            if p != first and len(weights[0]) > 1:      # too wide to keep: each pixel's products load them
                weights = self._weights(hidden(at["w"]), vectors)
            for v in range(vectors):
                acc[p, v] = arithmetic.dot(isa, acc[p, v], pixel, weights[v])
        at["x"] += arithmetic.step_bytes
        at["w"] += vectors * arithmetic.weight_bytes(isa)
        if self.tile.prefetch:
            isa.prefetch(at["ahead"])
            at["ahead"] += 64

    def _weights(self, address: Value, vectors: int) -> list[Operand]:
        """One step of a panel."""
        step = self.arithmetic.weight_bytes(self.isa)
        return [self.arithmetic.weights(self.isa, address + v * step) for v in range(vectors)]
