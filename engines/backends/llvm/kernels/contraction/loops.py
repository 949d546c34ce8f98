"""Code of a tiled contraction around its sums: the loops over blocks, panels and tiles, and the micro-kernel.

tiled.py describes the loops. Each kernel has a subclass of TiledLoops that emits the sums of a tile.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import tails
from infer_server.engines.backends.llvm.kernels.common.pixels import panels_between
from infer_server.engines.backends.llvm.kernels.contraction.store import emit_epilogue
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, begin_kernel
from infer_server.engines.backends.llvm.kernels.rows.passes import RowCode
from infer_server.engines.backends.llvm.kernels.rows.scaling import scale_row
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.ir.symbolic import SymbolicInt

CACHE_LINE = 64         # bytes, the size of a prefetch
Visit = Callable[[Callable[..., None]], None]       # calls its argument for each tile of a block


@dataclass(frozen=True)
class Part:
    """Variant of a tile with its own micro-kernel: its size and, if border taps are skipped, its position."""
    rows: int
    cols: int
    tap_rows: tuple[Value, Value] | None = None     # first live row of taps, number of live rows
    column: int | None = None       # column of its first pixel at an edge of x; None: all taps of a row are live

    @property
    def pixels(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.rows) for j in range(self.cols)]


class TiledLoops(ABC):
    """Emitter of one kernel: the outer loops, and the micro-kernels that they call.

    The loops pass tensors on as lists of addresses (x, the operands, y) of the current block, panel or tile.
    """
    arrays: ClassVar[int]       # number of packed weight arrays

    def __init__(self, kernel: TiledContraction, module: Module, name: str, isa: Isa, tile: Tile) -> None:
        self.kernel, self.module, self.name, self.isa, self.tile = kernel, module, name, isa, tile
        self.problem = kernel.flat
        self.views = (*self.problem.inputs, self.problem.y)
        self.arithmetic = kernel.arithmetic(isa)
        self.panel = tile.vectors * isa.lanes

    @abstractmethod
    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        """Return the arguments of a micro-kernel for a panel's weights, by parameter name.

        before: couts in memory before the panel, padding included; first: the first cout of the group; start: the
        panel's first cout in the group.
        """

    @property
    def form(self) -> str:
        """Return the part of the tactic that a micro-kernel depends on, as text."""
        return str(replace(self.tile, block=0))

    @abstractmethod
    def parameters(self, part: Part) -> Mapping[str, str]:
        """Return the types of the parameters that `panel_weights` and `tile_arguments` give values to."""

    @abstractmethod
    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        """Emit the sums over all of K into acc, {(pixel of the part, vector): accumulator}."""

    def tile_arguments(self, part: Part, x: Value, arguments: dict[str, Value], tile: Value,
                       channels: int) -> tuple[Value, dict[str, Value]]:
        """Return x and the panel's `arguments` adapted to one micro-kernel call, the block's `tile`-th."""
        return x, arguments

    # ---- outer loops
    def emit(self) -> None:
        inputs = len(self.problem.inputs)
        outputs = len(self.problem.outputs)
        f, addresses, self.bounds = begin_kernel(self.module, self.name, inputs + self.arrays + 1 + outputs)
        *self.weights, self.constants = addresses[inputs:-outputs]
        self.outputs = addresses[-outputs:]
        size = self.kernel.scratch_bytes(self.tile)
        self.scratch = f.alloca(size, ALIGNMENT, "rows") if size else None
        self.loops(f, [*addresses[:inputs], self.outputs[0] if self.scratch is None else self.scratch])

    def loops(self, f: Function, tensors: list[Value]) -> None:
        """Emit all tiles of the part of the grid that the kernel is called for."""
        if self.kernel.by_batch:
            self._pixels_of_the_batch(f, tensors)
        else:
            self.blocks(f, tensors)

    def blocks(self, f: Function, base: list[Value]) -> None:
        """Emit the loops over items and blocks of rows.

        Row u of the grid is row u % tile_rows of item u // tile_rows (or of that plane, counted over all items). A
        block of rows is processed by one panel after the other.
        """
        begin, end = self.bounds[:2]
        tile_rows = self.kernel.tile_rows(self.tile)
        block = self.kernel.block(self.tile)
        rows, cols = (0, self.tile.cols) if self.problem.rows == 1 else (self.tile.rows, 0)
        first_item = begin.divided(tile_rows)
        for item in f.range("item", first_item, (end + (tile_rows - 1)).divided(tile_rows)):
            here = _moved(base, self.kernel.planes.offsets(item, self.views))
            first = f.select(item.compare("eq", first_item), begin.remainder(tile_rows), begin.like(0))
            last = (end - item * tile_rows).at_most(tile_rows)
            for start in f.range("block", first, last, block):
                stop = (start + block).at_most(last)
                self.panels(f, self._start_of_block(here, start * rows, start * cols), self.tiles(f, start, stop))
                self.scale(f, item, start * cols, (stop * cols).at_most(self.problem.cols))

    def scale(self, f: Function, item: Value, begin: Value, end: Value) -> None:
        """Emit the scaling of the pixels begin..end - 1 of a matrix product's item, if the problem includes it."""
        scaled = self.problem.scaled
        if scaled is None:
            return
        for pixel in f.range("pixel", begin, end):
            rows = [start + (item * view.item + pixel * view.strides[1])
                    for start, view in zip(self.outputs, self.problem.outputs, strict=True)]
            if self.scratch is not None:
                rows.insert(0, self.scratch + (pixel - begin) * self.problem.y.strides[1])
            scale_row(RowCode.bare(f, self.isa, scaled, rows[0], rows[1:]), scaled)

    def tiles(self, f: Function, start: Value, stop: Value) -> Visit:
        """Return a visitor of the tiles in rows start..stop - 1 of tiles.

        It calls with positions counted from row `start`.
        """
        problem, tile = self.problem, self.tile
        across = -(-problem.cols // tile.cols)

        def visit(call: Callable[..., None]) -> None:
            if problem.rows == 1:
                for t, first, cols in self._tile_rows(f, start, stop, problem.cols, tile.cols):
                    call(t.like(0), first, Part(1, cols), t)
                return
            for t, first, rows in self._tile_rows(f, start, stop, problem.rows, tile.rows):
                taps = self.kernel.axes[0].live_of_several(start * tile.rows + first, rows) if tile.skip else None
                for number, j, cols, column in self._columns(f):
                    call(first, j, Part(rows, cols, taps, column), t * across + number)
        return visit

    def _columns(self, f: Function) -> Iterator[tuple[Value, Value, int, int | None]]:
        """Yield (number, start, size, start if it is needed at build time) of a row's tiles.

        With `skip` the first and the last tile are separate. If the extent is symbolic, all tiles but the last ones
        have one size, and taps are skipped at the left edge only.
        """
        extent, step = self.problem.cols, self.tile.cols
        if isinstance(extent, SymbolicInt):
            edge = step if self.tile.skip else 0
            if edge:
                yield f.constant(0, I64), f.constant(0, I64), min(step, extent), 0
            for j, cols in f.tiles("column", extent - edge, step, split_tail=True):
                yield (j + edge).divided(step), j + edge, cols, None
            return
        widths = self.kernel.widths(self.tile)
        edges = {0, len(widths) - 1} if self.tile.skip else set()
        for (cols, edge), some in groupby(range(len(widths)), lambda n: (widths[n], n if n in edges else None)):
            first, *others = some
            start = sum(widths[:first])
            for n in f.loop("column", 1 + len(others)):
                yield n + first, n * cols + start, cols, None if edge is None else start

    @staticmethod
    def _tile_rows(f: Function, start: Value, stop: Value, extent: int,
                   step: int) -> Iterator[tuple[Value, Value, int]]:
        """Yield (number, first pixel, size) of each row of tiles, counted from the `start`-th.

        Only the rest after the last whole row of tiles of an item may be smaller than step.
        """
        whole, rest = divmod(extent, step)
        if isinstance(extent, SymbolicInt) or whole:
            for t in f.range("tile row", start.like(0), stop.at_most(whole) - start):
                yield t, t * step, step
        if isinstance(rest, SymbolicInt) or rest:
            with f.when(stop.compare("ugt", whole)):
                for first, size in f.tail(extent, step):
                    yield stop.like(whole) - start, first - start * step, size

    def _pixels_of_the_batch(self, f: Function, base: list[Value]) -> None:
        """Emit full tiles and then the tails of the rest; rows of the grid are pixels."""
        step, cols = self.kernel.block_of_the_batch(self.tile), self.tile.cols
        for start in f.range("pixels", self.bounds[0], self.bounds[1], step):
            count = (self.bounds[1] - start).at_most(step)
            whole, rest = count.divided(cols), count.remainder(cols)

            def visit(call: Callable[..., None], whole: Value = whole, rest: Value = rest) -> None:
                for t in f.range("tile", whole.like(0), whole):
                    call(whole.like(0), t * cols, Part(1, cols), t)
                for tail, size in tails(whole, rest, cols):
                    call(whole.like(0), tail, Part(1, size), whole)

            self.panels(f, self._start_of_block(base, start.like(0), start), visit)
            self.scale(f, start.like(0), start, start + count)

    def panels(self, f: Function, block: list[Value], visit: Visit) -> None:
        """Emit the panels of couts that this call was given, over the tiles of a block."""
        problem, begin, end = self.problem, *self.bounds[2:]
        if problem.scaled is not None:
            begin, end = begin.like(0), begin.like(-(-problem.cout // self.panel))
        if problem.groups > 1:
            for group in f.range("group", begin, end):
                here = _moved(block, [group * (problem.cin * problem.x.size), *self._channels(group * problem.cout)])
                for start, channels in f.tiles("panel", problem.cout, self.panel):
                    self._panel(f, here, group * problem.cout, start, channels, visit)
            return
        for start, channels in panels_between(f, begin, end, problem.cout, self.panel):
            self._panel(f, block, start.like(0), start, channels, visit)

    def _panel(self, f: Function, block: list[Value], first: Value, start: Value, channels: int, visit: Visit) -> None:
        """Emit one panel over all tiles.

        `first`: the group's first cout, `start`: the panel's first cout in the group.
        """
        problem, isa = self.problem, self.isa
        # Lanes of a group in memory; the last panel may have fewer vectors.
        panels = (min(self.panel, problem.cout - at) for at in range(0, problem.cout, self.panel))
        lanes = sum(isa.vectors_for(couts) * isa.lanes for couts in panels)
        before = first.divided(problem.cout) * lanes + start
        constants = self.constants + before * (4 * problem.program.constants)
        here = _moved(block, [start.like(0), *self._channels(start)])
        weights = self.panel_weights(f, before, first, start)

        def call(i: Value, j: Value, part: Part, tile: Value, item: Sequence[Value] = ()) -> None:
            """Call the micro-kernel of a tile.

            item: bytes from the block to the tile's item, in x, the operands and y.
            """
            x, *others = self._pixel(_moved(here, item) if item else here, i, j)
            x, arguments = self.tile_arguments(part, x, dict(weights), tile, channels)
            f.run(self.microkernel(part, channels), x, constants, *others, *arguments.values())

        visit(call)

    # ---- addresses
    def _channels(self, first: Value) -> list[Value]:
        """Return the bytes from cout 0 to another one, in the operands and y."""
        return [first * view.strides[2] for view in self.views[1:]]

    def _start_of_block(self, base: list[Value], i: Value, j: Value) -> list[Value]:
        """Return the addresses of a block whose first output pixel is (i, j)."""
        addresses = self._pixel(base, i, j)
        return addresses if self.scratch is None else [*addresses[:-1], self.scratch]

    def _pixel(self, base: list[Value], i: Value, j: Value) -> list[Value]:
        """Return the addresses of output pixel (i, j)."""
        x, stride = self.problem.x, self.problem.stride
        return _moved(base, [i * (x.strides[0] * stride[0]) + j * (x.strides[1] * stride[1]),
                             *(i * view.strides[0] + j * view.strides[1] for view in self.views[1:])])

    def offset(self, i: int, j: int) -> int:
        """Return the bytes of x from the tile's first pixel to pixel (i, j)."""
        x, stride = self.problem.x, self.problem.stride
        return i * x.strides[0] * stride[0] + j * x.strides[1] * stride[1]

    # ---- the micro-kernel
    def microkernel(self, part: Part, channels: int) -> str:
        """Return the name of the micro-kernel for rows x cols pixels of `channels` couts, emitted once.

        Tactics in one module that differ only in their blocks share it.
        """
        name = "_".join([*self.form.split(), f"{part.rows}x{part.cols}x{channels}",
                         *([] if part.column is None else [str(part.column)])])
        if name in self.module.functions:
            return name
        problem, isa, arithmetic = self.problem, self.isa, self.arithmetic
        operands = {f"operand{i}": PTR for i in range(len(problem.operands))}
        f = self.module.function(name, internal=True, x=PTR, constants=PTR, **operands, y=PTR, **self.parameters(part))
        lanes = Lanes(isa, channels, problem.y.dtype == "uint8")
        acc = {(p, v): arithmetic.zero(isa, f.parameters["x"])
               for p in range(len(part.pixels)) for v in range(lanes.vectors)}
        self.sum(f, part, acc, lanes.vectors)
        emit_epilogue(f, lanes, problem.program, problem.operands, problem.y, part.pixels,
                      lambda p: [arithmetic.finish(isa, acc[p, v]) for v in range(lanes.vectors)])
        return name


def _moved(addresses: list[Value], offsets: Sequence[Value]) -> list[Value]:
    return [address + offset for address, offset in zip(addresses, offsets, strict=True)]
