"""Code of a contraction on a matrix unit.

A micro-kernel multiplies a tile and leaves its sums in the accumulator registers. The next call stores each of them to
scratch memory before its own first product with that register, and runs their epilogue between its further products, so
that the vector units, the stores and the matrix unit work at the same time:

    products of tile 0
    stores of tile 0, products of tile 1, epilogue of tile 0
    stores of tile 1, products of tile 2, epilogue of tile 1
    ...
    stores and epilogue of the last tile

A record on the stack describes the pending tile: the address of the function that stores it and runs its epilogue,
which also identifies its micro-kernel, and the addresses of its constants, y and operands. If the next tile has another
size, that function runs first.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.codegen.tiles import AMX, Tiles
from infer_server.engines.backends.llvm.kernels.contraction.loops import Part, TiledLoops
from infer_server.engines.backends.llvm.kernels.contraction.store import emit_epilogue
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.matrix_unit.pending import LINE, Pending, StoredSums
from infer_server.engines.backends.llvm.kernels.matrix_unit.registers import PixelRuns, Registers
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I1, I16, I32, PTR, vector

WOVEN_PRODUCTS = 16             # products of a tile between which the epilogue of the tile before is distributed
GROUP = 4                       # pixels in each turn of an epilogue that is not interleaved with products
AHEAD = 8 << 10                 # prefetch distance in bytes of weights
SCRATCH = STAGE = 4 << 10       # bytes of a tile's accumulators (four registers), and of the pixels that are copied
Level = tuple[str, int, int]    # a loop of K: name, iterations, bytes of x per iteration


class MatrixLoops(TiledLoops):
    """Emitter of a matrix-unit kernel.

    Its micro-kernels have two more parameters: the panel's weights, the pending record.
    """
    arrays = 1

    def __init__(self, kernel: TiledContraction, module: Module, name: str, isa: Isa, tile: Tile, depth: int,
                 block_starts: Sequence[int], wide: int, staged: int, items: int) -> None:
        """Make an emitter.

        Parameters
        ----------
        depth : bytes of x in a block of K.
        block_starts : bytes from the start of a run to each block.
        wide : positions between two rows in one run (see PixelRuns), or 0.
        staged : elements of a run that is copied, or 0.
        items : items that are processed with one panel of weights before the next one is read.
        """
        super().__init__(kernel, module, name, isa, tile)
        assert isa.matrix is not None
        self.unit, self.depth, self.block_starts = isa.matrix, depth, block_starts
        self.wide, self.staged, self.items = wide, staged, items
        self.product = isa.matrix.product(self.problem.precision)
        self.exact = self.arithmetic.exact

    def parameters(self, part: Part) -> Mapping[str, str]:
        return dict(w=PTR, record=PTR)

    def panel_weights(self, f: Function, before: Value, first: Value, start: Value) -> dict[str, Value]:
        blocks = len(self.block_starts) * len(self.kernel.run_offsets())
        return {"w": self.weights[0] + before * (blocks * self.depth), "record": self.pending.record}

    def sum(self, f: Function, part: Part, acc: dict[Any, Value], vectors: int) -> None:
        raise NotImplementedError("the sums are in tile registers: see microkernel")

    def loops(self, f: Function, tensors: list[Value]) -> None:
        operands = len(self.problem.operands)
        size = Pending(f.parameters["operands"], operands).size + SCRATCH + (STAGE if self.staged else 0)
        self.pending = Pending(f.alloca(size, LINE, "record"), operands)
        null = Value(f, PTR, "null")
        self.pending.finish, self.pending.configuration = null, null
        super().loops(f, tensors)
        self.pending.run()
        Tiles(f, self.unit).release()

    def blocks(self, f: Function, base: list[Value]) -> None:
        """Emit the loops over blocks of pixels.

        A block may span several items, which then share reads of weights beyond L2.
        """
        if self.items == 1 or self.tile.block or self.module.trace:
            super().blocks(f, base)
            return
        begin, end = self.bounds[:2]
        tile_rows = self.kernel.tile_rows(self.tile)
        rows, cols = (0, self.tile.cols) if self.problem.rows == 1 else (self.tile.rows, 0)
        first_item, last_item = begin.divided(tile_rows), (end + (tile_rows - 1)).divided(tile_rows)
        for start in f.range("items", first_item, last_item, self.items):
            stop = (start + self.items).at_most(last_item)

            def visit(call: Callable[..., None], start: Value = start, stop: Value = stop) -> None:
                for item in f.range("item", start, stop):
                    first = f.select(item.compare("eq", first_item), begin.remainder(tile_rows), begin.like(0))
                    last = (end - item * tile_rows).at_most(tile_rows)
                    offsets = self.kernel.planes.offsets(item, self.views)
                    self.tiles(f, first, last)(_of_item(call, first * rows, first * cols, offsets))

            self.panels(f, base, visit)

    def scale(self, f: Function, item: Value, begin: Value, end: Value) -> None:
        if self.problem.scaled is not None:
            self.pending.run()
            super().scale(f, item, begin, end)

    # ---- the micro-kernel
    def microkernel(self, part: Part, channels: int) -> str:
        name = "_".join([*self.form.split(), f"{part.rows}x{part.cols}x{channels}"])
        if name in self.module.functions:
            return name
        problem = self.problem
        operands = {f"operand{n}": PTR for n in range(len(problem.operands))}
        f = self.module.function(name, internal=True, x=PTR, constants=PTR, **operands, y=PTR, **self.parameters(part))
        finish = self._finish(f"{name}_finish", part, channels)
        pending, work = self._products(f, part, channels)
        if self._weaves:
            waiting = pending.finish.compare("eq", Value(f, PTR, finish))
            with f.when(waiting.compare("eq", 0)):
                pending.run()
                work.configured(pending)
                work.write()
            with f.when(waiting):
                work.write(lambda: self._epilogue(f, part, channels, {**pending.addresses(), "sums": pending.scratch}))
        else:
            pending.run()
            work.configured(pending)
            work.write()
        pending.finish = Value(f, PTR, finish)
        pending.remember(f.parameters)
        return name

    def _products(self, f: Function, part: Part, channels: int) -> tuple[Pending, _TileProducts]:
        pending = Pending(f.parameters["record"], len(self.problem.operands))
        return pending, _TileProducts(self, f, part, self._lanes(channels).vectors, pending.scratch)

    @property
    def _weaves(self) -> bool:
        """Return True if epilogue and products are interleaved.

        Kernels with symbolic extents run them one after the other.
        """
        return self.module.trace is None

    def cut(self, part: Part) -> PixelRuns:
        return PixelRuns(part.rows, part.cols, self.wide if part.rows > 1 else 0)

    def _lanes(self, channels: int) -> Lanes:
        return Lanes(self.isa, channels, self.problem.y.dtype == "uint8")

    def _finish(self, name: str, part: Part, channels: int) -> str:
        """Write the function that stores a pending tile of this micro-kernel and runs its epilogue; return its name."""
        f = self.module.function(name, internal=True, record=PTR)
        pending, work = self._products(f, part, channels)
        work.store()
        self._looped_epilogue(f, part, channels, pending)
        pending.finish = Value(f, PTR, "null")
        return f"@{name}"

    def _looped_epilogue(self, f: Function, part: Part, channels: int, pending: Pending) -> None:
        """Emit a tile's epilogue as loops over its rows and over groups of its pixels."""
        views = {"y": self.problem.y, **{f"operand{n}": view for n, view in enumerate(self.problem.operands)}}
        row_positions, pitch = self.cut(part).position(1, 0), self._lanes(channels).vectors * LINE

        def advance(at: dict[str, Value], start: Mapping[str, Value], axis: int, count: int, positions: int) -> None:
            at |= {name: start[name] + count * view.strides[axis] for name, view in views.items()}
            at["sums"] = start["sums"] + positions * pitch

        at = {**pending.addresses(), "sums": pending.scratch}
        groups, rest = divmod(part.cols, GROUP)
        for _ in f.loop("row", part.rows, at=at):
            start = dict(at)
            for _ in f.loop("pixels", groups, at=at) if groups else ():
                self._epilogue(f, Part(1, GROUP), channels, at)
                advance(at, dict(at), 1, GROUP, GROUP)
            if rest:
                self._epilogue(f, Part(1, rest), channels, at)
            advance(at, start, 0, 1, row_positions)

    def _epilogue(self, f: Function, part: Part, channels: int, addresses: Mapping[str, Value]) -> None:
        """Emit the epilogue of the pixels of a tile, whose sums are in memory at addresses["sums"]."""
        problem, lanes = self.problem, self._lanes(channels)
        pitch, positions = lanes.vectors * LINE, [self.cut(part).position(i, j) for i, j in part.pixels]
        emit_epilogue(f, lanes, problem.program, problem.operands, problem.y, part.pixels,
                      lambda p: StoredSums(self.isa, addresses["sums"] + positions[p] * pitch, lanes.vectors,
                                            self.exact), addresses, sums_in_memory=True)


def _of_item(call: Callable[..., None], row: Value, column: Value, offsets: Sequence[Value]) -> Callable[..., None]:
    """Return `call` for tiles whose positions count from a row and a column of an item."""
    def moved(i: Value, j: Value, part: Part, tile: Value) -> None:
        call(i + row, j + column, part, tile, offsets)
    return moved


class _TileProducts:
    """Emitter of a tile's products; scratch: memory for its accumulators."""

    def __init__(self, loops: MatrixLoops, f: Function, part: Part, vectors: int, scratch: Value) -> None:
        cut = loops.cut(part)
        self.loops, self.f, self.scratch = loops, f, scratch
        self.registers = Registers(loops.unit, [count for _, _, count in cut.runs], vectors, loops.depth)
        self.offsets = [loops.offset(i, j) for i, j, _ in cut.runs]     # bytes of x from the tile's first pixel
        self.positions = [cut.position(i, j) for i, j, _ in cut.runs]
        self.tiles, self.step = Tiles(f, loops.unit), loops.depth * loops.isa.lanes
        self.x_pitch = loops.problem.x.strides[1] * loops.problem.stride[1]
        starts = loops.block_starts
        self.even = all(start == number * loops.depth for number, start in enumerate(starts))
        self.whole_blocks = len(starts) - (not self.even)

    def configured(self, pending: Pending) -> None:
        """Configure the tile registers unless they have these shapes already."""
        address = self.tiles.configuration(self.registers.shapes)
        with self.f.when(pending.configuration.compare("ne", address)):
            self.tiles.configure(self.registers.shapes)
            pending.configuration = address

    def write(self, epilogue: Any = None) -> None:
        """Sum over all of K.

        epilogue: that of the pending tile, whose accumulators are still in the registers; writes straight-line code.
        """
        if not epilogue:
            for t in range(len(self.registers.rows)):
                for v in range(self.registers.vectors):
                    self.tiles.zero(self.registers.c(t, v))
        kernel, problem = self.loops.kernel, self.loops.problem
        x_row, x_pixel, _ = problem.x.strides
        levels = [("tap plane", kernel.planes.taps, kernel.planes.tap_step),
                  ("tap row", problem.taps[0], x_row * problem.dilation[0]),
                  ("tap column", 1 if kernel.one_run else problem.taps[1], x_pixel * problem.dilation[1])]
        at = {key: self.f.parameters[key] for key in ("x", "w")}
        self._taps(levels, at, epilogue)

    def store(self) -> None:
        """Store all accumulators."""
        for t in range(len(self.positions)):
            for v in range(self.registers.vectors):
                self._store(t, v)

    def _store(self, t: int, v: int) -> None:
        """Store an accumulator; the layout of the scratch memory is [position][vector][lane]."""
        pitch = self.registers.vectors * LINE
        self.tiles.store(self.registers.c(t, v), self.scratch + (self.positions[t] * pitch + v * LINE), pitch)

    def _taps(self, levels: Sequence[Level], at: dict[str, Value], epilogue: Any) -> None:
        """Emit the loops over taps; with an epilogue, the first run is separate from the others."""
        if not levels:
            self._run(at, epilogue)
            return
        (name, count, step), *inner = levels
        if epilogue:
            start = at["x"]
            self._taps(inner, at, epilogue)
            if count == 1:
                return
            at["x"], count = start + step, count - 1
        for _ in self.f.loop(name, count, at=at):
            start = at["x"]
            self._taps(inner, at, None)
            at["x"] = start + step

    def _run(self, at: dict[str, Value], epilogue: Any) -> None:
        """Emit the blocks of one run."""
        apart = 0
        if epilogue:
            products = len(self.registers.rows) * self.registers.vectors
            apart = min(self.whole_blocks, 1 + max(WOVEN_PRODUCTS // products, 1))
            self._woven(at, apart, epilogue)
        if self.whole_blocks - apart:
            for _ in self.f.loop("k", self.whole_blocks - apart, at=at):
                self._block(at)
        if not self.even:
            starts = self.loops.block_starts
            at["x"] = at["x"] + (starts[-1] - (len(starts) - 1) * self.loops.depth)
            self._block(at)

    def _woven(self, at: dict[str, Value], blocks: int, epilogue: Any) -> None:
        """Emit the first blocks: the first one stores the pending tile, and the others overlap with its epilogue."""
        f = self.f
        self._block(at, stores=True)
        start = len(f.lines)
        for _ in range(blocks - 1):
            self._block(at)
        middle = len(f.lines)
        epilogue()
        f.lines[start:] = _spread(f.lines[start:middle], f.lines[middle:], f"@llvm.x86.{self.loops.product}",
                                  f"@emulated.x86.{self.loops.product}")

    def _block(self, at: dict[str, Value], stores: bool = False) -> None:
        """Emit one block of K. A register is loaded just before the first product that reads it.

        stores: store and clear each accumulator of the pending tile before the first product that adds to it.
        """
        registers, tiles = self.registers, self.tiles
        for v in range(registers.vectors):
            weights = at["w"] + v * self.step
            tiles.load(registers.b(v), weights, LINE)
            for t, offset in enumerate(self.offsets):
                if v == 0:
                    self._load_x(t, at["x"] + offset)
                if stores:
                    self._store(t, v)
                    tiles.zero(registers.c(t, v))
                tiles.multiply(self.loops.product, registers.c(t, v), registers.a(t), registers.b(v))
                for line in range(t, self.step // LINE, len(self.offsets)) if self.loops.tile.prefetch else ():
                    self.loops.isa.prefetch(weights + (AHEAD + line * LINE))
        at["w"] += registers.vectors * self.step
        at["x"] += self.loops.depth

    def _load_x(self, t: int, address: Value) -> None:
        """Load a register of x.

        A run that ends inside a group is copied and padded with zeros: elements past its end may be infinite, and
        infinity times a zero weight is NaN.
        """
        register, f = self.registers.a(t), self.f
        if not self.loops.staged:
            self.tiles.load(register, address, self.x_pitch)
            return
        elements = LINE // self.loops.problem.x.size
        row, mask = vector(elements, I16), vector(elements, I1)
        valid = ", ".join(f"{I1} {int(n < self.loops.staged)}" for n in range(elements))
        stage = self.scratch + (SCRATCH + t * AMX.rows * LINE)
        for row_index in range(self.registers.rows[t]):
            copied = f.call(row, f"llvm.masked.load.v{elements}i16.p0", address + row_index * self.x_pitch,
                            f.constant(1, I32), Value(f, mask, f"<{valid}>"), f.constant(0, row), hint="pixel")
            f.store(copied, stage + row_index * LINE, LINE)
        self.tiles.load(register, stage, LINE)


def _spread(products: Sequence[str], epilogue: Sequence[str], *names: str) -> Iterator[str]:
    """Yield the lines of `products`, with those of `epilogue` spread evenly after the instructions of these names."""
    count = sum(any(name in line for name in names) for line in products)
    done = written = 0
    for line in products:
        yield line
        if any(name in line for name in names):
            written += 1
            upto = len(epilogue) * written // count
            yield from epilogue[done:upto]
            done = upto
    yield from epilogue[done:]
