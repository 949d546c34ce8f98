"""Kernel of an Attention (problems/matmul.py), in which the scores of a block of queries stay in cache.

    for head:                                   k' and v are packed once a call; with few queries they are read in place
      for block of queries:
        tiles of k' :  x                        -> scratch
        rows of x   :  p, 1 / sum of p          -> scratch
        tiles of v  :  sums / sum of p          -> program -> y

The term that q's zero point adds to a score depends on the key only; the sums of scores begin with it.

Reference: Dao et al., FlashAttention (2022), for the order of the loops, without its running maximum: a row of scores
fits a cache.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    load_channels,
    load_constants,
    pack_panels,
    run_program,
)
from infer_server.engines.backends.llvm.kernels.contraction.direct import usual_tile_shapes
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.matmul.dots import dots, has_columns
from infer_server.engines.backends.llvm.kernels.matmul.operands import (
    Left,
    Matrix,
    Right,
    integer,
    product_arithmetic,
    store_tile,
)
from infer_server.engines.backends.llvm.kernels.matmul.product import vector_cycles
from infer_server.engines.backends.llvm.kernels.matmul.softmax import AttentionSoftmax
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.row_formulas import is_unmasked
from infer_server.engines.codegen.types import FLOAT, I64, PTR
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.matmul import MIDDLE, Attention
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.rows import PARTIALS
from infer_server.engines.lowering.problems.view import SIZES, View

FEW_QUERIES = 4         # queries up to which packing k and v costs at least as much as the products
SOFTMAX_ARRAYS = ("x", "peaks", "p", "totals", "inverse", "added")


@dataclass(frozen=True)
class Tiles(Tactic):
    """Tactic of attention: register tiles (rows, vectors) of the two products, and the queries of a block."""
    scores: tuple[int, int]
    mix: tuple[int, int]
    block: int
    packed: bool = True     # whether k and v are packed before the products

    def __str__(self) -> str:
        tiles = f"tiles {self.scores[0]}x{self.scores[1]}, {self.mix[0]}x{self.mix[1]} block {self.block}"
        return tiles + " unpacked" * (not self.packed)


@solves(Attention)
class AttentionKernel(Kernel[Attention]):
    """Attention of one head at a time. A row of the grid is a head, a column a block of queries.

    The packed constants are the scale and zero points, and the program's constants, [panel][constant][vector][lane].
    """

    def tactics(self, isa: Isa) -> Sequence[Tiles]:
        found: dict[Tiles, None] = {}
        for scores in self._shapes(isa, self.problem.keys)[:3]:
            for mix in self._shapes(isa, self.problem.v.shape[-1])[:2]:
                found[Tiles(scores, mix, self._block(scores[0], 2))] = None
        return (*self._unpacked(isa), *found)

    def _unpacked(self, isa: Isa) -> Sequence[Tiles]:
        """Return the tactics without packing, for few queries.

        Their tiles have all queries, by one vector of keys and by wide rows of values.
        """
        queries, width = self.problem.queries, isa.vectors_for(self.problem.v.shape[-1])
        k, v = factors(self.problem, isa)
        if queries > FEW_QUERIES or not (readable(k) or readable(v)):
            return ()
        return (Tiles((queries, 1), (queries, min((isa.registers - 4) // queries, width)), queries, packed=False),)

    def cost(self, isa: Isa, tactic: Tiles) -> float:
        """Return the cycles of both products, so that the first tactic wins."""
        return vector_cycles(self.problem.macs, self.problem.precision, isa)

    def refinements(self, isa: Isa, best: Tiles) -> Sequence[Tiles]:
        """Return the best tactic with other block sizes."""
        return [replace(best, block=self._block(best.scores[0], n)) for n in (1, 4, 8)] if best.packed else []

    def _block(self, rows: int, tiles: int) -> int:
        return min(rows * tiles, self.problem.queries)

    def _shapes(self, isa: Isa, columns: int) -> list[tuple[int, int]]:
        """Return register tiles for a right factor of so many columns."""
        widest = isa.vectors_for(columns)
        shapes = [shape for shape in usual_tile_shapes(isa, self.problem.precision) if shape[1] <= widest]
        return list(dict.fromkeys((min(rows, self.problem.queries), vectors) for rows, vectors in shapes))

    def grid(self, isa: Isa, tactic: Tiles) -> Grid:
        return Grid(self.problem.heads, 1, -(-self.problem.queries // tactic.block))

    def packing(self, tactic: Tiles) -> int:
        return tactic.mix[1]

    def pack(self, isa: Isa, tactic: Tiles, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        program = pack_panels(isa, constants, self.problem.v.shape[-1], packed=False, width=tactic.mix[1] * isa.lanes)
        return self.problem.numbers(constants), program

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tiles) -> None:
        AttentionEmitter(self.problem, module, name, isa, tactic).emit()


def factors(problem: Attention, isa: Isa, vectors: tuple[int, int] = (1, 1)) -> tuple[Right, Right]:
    """Return k' and v as right factors, packed in panels of so many vectors."""
    arithmetic = product_arithmetic(problem.precision, isa)
    return (Right(Matrix.of(problem.k).transposed, arithmetic, isa, vectors[0]),
            Right(Matrix.of(problem.v), arithmetic, isa, vectors[1]))


def readable(factor: Right) -> bool:
    """Return True if there is a product with the factor in place."""
    return factor.direct or has_columns(factor)


@dataclass(frozen=True)
class Head:
    """Addresses of one head's factors, mask and result."""
    q: Value
    k: Value
    v: Value
    mask: Value | None
    y: Value


class AttentionEmitter:
    """Emitter of one kernel: the outer loops, and the micro-kernels that they call.

    A subclass computes the products of a block by other instructions (`queries`, `sizes`).
    """

    def __init__(self, problem: Attention, module: Module, name: str, isa: Isa, tiles: Tiles) -> None:
        self.problem, self.module, self.name, self.isa, self.tiles = problem, module, name, isa, tiles
        self.arithmetic = product_arithmetic(problem.precision, isa)
        self.q = Left(Matrix.of(problem.q), self.arithmetic, isa)
        self.k, self.v = (replace(factor, packed=tiles.packed or not readable(factor)) for factor in factors(
            problem, isa, (tiles.scores[1], tiles.mix[1])))
        self.exact = self.q.exact
        self.adds_zero = self.exact and problem.mask is not None       # corrects queries whose keys are all masked

    # ---- layout of the scratch memory
    @property
    def pitch(self) -> int:
        """Return the floats of a row of scores."""
        return -(-self.problem.keys // PARTIALS) * PARTIALS

    @property
    def weight_pitch(self) -> int:
        """Return the bytes of a row of p."""
        return self.pitch * SIZES[self.arithmetic.dtype]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each array in scratch memory."""
        block = self.tiles.block
        return {"k": self.k.bytes * self.k.packed, "v": self.v.bytes * self.v.packed, "x": block * self.pitch * 4,
                "peaks": block * 4, "totals": block * self.isa.bytes, "inverse": block * 4,
                "added": block * 4 if self.adds_zero else 0,
                "p": 0 if self.arithmetic.dtype == "float32" else block * self.weight_pitch,
                "q": 0 if self.q.direct else block * self.q.pitch,
                "start": self.pitch * 4 if self.exact else 0}

    def _allocate(self, f: Function) -> None:
        """Allocate scratch memory, and set `at`: the address of each array."""
        sizes, offsets, total = self.sizes(), {}, 0
        for what, size in sizes.items():
            offsets[what] = total
            total += -(-size // ALIGNMENT) * ALIGNMENT
        memory = f.alloca(total, ALIGNMENT, "scratch")
        self.at = {what: memory + start for what, start in offsets.items()}
        if not sizes["p"]:
            self.at["p"] = self.at["x"]         # in place

    # ---- outer loops
    def emit(self) -> None:
        problem = self.problem
        f, addresses, (begin, end, first, last) = begin_kernel(self.module, self.name, 3 + bool(problem.mask) + 3)
        *tensors, numbers, constants, y = addresses
        self.numbers, self.constants = numbers, constants
        self._allocate(f)
        self.enter(f)
        self.zeros = [factor.zero(numbers, i) for i, factor in enumerate((self.q, self.k, self.v), 1)]
        views = [problem.q, problem.k, problem.v, *([problem.mask] if problem.mask else []), problem.y]
        for row in f.range("head", begin, end):
            here = item_addresses([*tensors, y], views, row.divided(problem.heads))
            head = unravel(row.remainder(problem.heads), problem.lead)
            q, k, v, *mask, result = (offset(a, head, view.strides[:-2]) for a, view in zip(here, views, strict=True))
            self._pack(k, v)
            for block in f.range("block", first, last):
                self._block(f, Head(q, k, v, mask[0] if mask else None, result), block * self.tiles.block)
        self.leave(f)

    def enter(self, f: Function) -> None:
        """Emit code that runs once before the loops."""

    def leave(self, f: Function) -> None:
        """Emit code that runs once after the loops."""

    def _pack(self, k: Value, v: Value) -> None:
        for what, factor, source, zero in (("k", self.k, k, self.zeros[1]), ("v", self.v, v, self.zeros[2])):
            if factor.packed:
                factor.pack(source, self.at[what], zero)
        if self.exact:
            self._start_sums(k.f)

    def _start_sums(self, f: Function) -> None:
        """Store start[t] = -(q's zero point) * sum over d of k[t, d] - MIDDLE."""
        isa, right = self.isa, self.k
        zero = integer(f, self.numbers, 1)
        minus = f.splat(zero.like(0) - zero, isa.lanes)
        for start, columns in f.tiles("started panel", right.padded_columns, right.width):
            panel = self.at["k"] + start.divided(right.width) * right.panel_bytes
            for v, total in enumerate(right.column_sums(panel, columns)):
                f.store(total * minus, self.at["start"] + start * 4 + v * isa.bytes, isa.bytes)

    def _block(self, f: Function, head: Head, first: Value) -> None:
        queries, block = self.problem.queries, self.tiles.block
        whole, tail = divmod(queries, block)
        is_dynamic = isinstance(queries, SymbolicInt)
        if not is_dynamic and not tail:
            self.queries(f, head, first, block)
            return
        if is_dynamic or whole:
            with f.when(first.below(whole * block)):
                self.queries(f, head, first, block)
        with f.when(first.compare("uge", whole * block)):
            self.queries(f, head, first, tail)

    def queries(self, f: Function, head: Head, first: Value, count: int) -> None:
        """Emit `count` queries from `first` on."""
        problem, scores, mix = self.problem, self.tiles.scores[0], self.tiles.mix[0]
        q = self.q.matrix.at(head.q, first, 0)
        if not self.q.direct:
            self.q.copy(q, count, self.at["q"], self.zeros[0])
            q = self.at["q"]
        mask = offset(head.mask, [first], problem.mask.strides[-2:-1]) if problem.mask and head.mask else None
        keys = self.k.padded_columns if self.k.packed else problem.keys
        for t, columns in f.tiles("panel of keys", keys, self.k.width, split_tail=not self.k.packed):
            panel = self.panel(self.k, head.k, "k", t)
            here = offset(mask, [t], problem.mask.strides[-1:]) if problem.mask and mask else self.at["x"]
            for row, rows in f.tiles("row of scores", count, scores, split_tail=True):
                moved = here + row * problem.mask.strides[-2] if problem.mask else here
                f.run(self._scores(rows, columns), q + row * self.q.pitch, panel, self.numbers,
                      self.at["start"] + t * 4, moved, self.at["x"] + row * (4 * self.pitch) + t * 4,
                      f.constant(problem.keys, I64) - t)
        f.run(self.softmax(), *self.softmax_arguments(), f.constant(count, I64))
        y = offset(head.y, [first], problem.y.strides[-2:-1])
        for e, columns in f.tiles("panel of values", problem.v.shape[-1], self.v.width):
            panel = self.panel(self.v, head.v, "v", e)
            constants = self.constants + e * (4 * problem.program.constants)
            for row, rows in f.tiles("row of values", count, mix, split_tail=True):
                f.run(self._mix(rows, columns), self.at["p"] + row * self.weight_pitch, panel,
                      self.at["inverse"] + row * 4, self.at["added"] + row * 4, constants,
                      y + row * problem.y.strides[-2] + e * problem.y.strides[-1])

    def panel(self, factor: Right, source: Value, packed: str, column: Value) -> Value:
        """Return the address of the panel that begins at a column."""
        if factor.packed:
            return self.at[packed] + column.divided(factor.width) * factor.panel_bytes
        return factor.matrix.at(source, 0, column)

    # ---- the micro-kernels
    def function(self, what: str, **types: str) -> tuple[str, Function | None]:
        """Return (name, function to write, or None if the module has it already)."""
        name = f"{self.name}_{what}"
        if name in self.module.functions:
            return name, None
        return name, self.module.function(name, internal=True, **types)

    def _scores(self, rows: int, columns: int) -> str:
        """Return the name of the micro-kernel for rows x columns scores x."""
        name, f = self.function(f"scores_{rows}x{columns}", q=PTR, k=PTR, numbers=PTR, start=PTR, mask=PTR, x=PTR,
                                left=I64)
        if f is None:
            return name
        isa, mask, lanes = self.isa, self.problem.mask, Lanes(self.isa, columns, packed=False)
        q, k, numbers, start, added, x, left = f.parameters.values()
        begin = [f.load(isa.ints, start + v * isa.bytes, isa.bytes, "start") for v in range(lanes.vectors)]
        if self.k.packed or self.k.direct:
            sums = self.k.multiply(q, self.q.pitch, k, (rows, columns), [begin] * rows if self.exact else ())
        else:
            sums = dots(self.k, q, self.q.pitch, k, (rows, columns))
        scale = f.splat(f.load(FLOAT, numbers, hint="scale"), isa.lanes)
        others: list[Value] = []
        for m in range(rows):
            if mask and (m == 0 or mask.strides[-2]):
                others = self._mask(lanes, mask, added + m * mask.strides[-2], left)
            for v in range(lanes.vectors):
                value = isa.fma(sums[m, v], scale, others[v]) if mask else sums[m, v] * scale
                if not self.k.packed:       # a tail may be several panels, of which only the last may be overrun
                    value = f.shuffle(value, None, range(min(columns - v * isa.lanes, isa.lanes)), "scores")
                f.store(value, x + (4 * self.pitch * m + v * isa.bytes), isa.bytes if self.k.packed else 4)
        return name

    def _mask(self, lanes: Lanes, mask: View, address: Value, left: Value) -> list[Value]:
        """Load the mask of a panel. left: keys from its first on.

        A padded panel may begin up to three vectors before its last key; vectors past it read the first one again.
        """
        if self.k.padded_columns is self.problem.keys:
            return load_channels(lanes, mask, address)
        f, width, one = address.f, self.isa.lanes, Lanes(self.isa, self.isa.lanes, packed=False)
        addresses = [f.select(left.compare("ugt", v * width), address + v * width * mask.strides[-1], address)
                     for v in range(lanes.vectors)]
        return [load_channels(one, mask, one_address)[0] for one_address in addresses]

    def softmax_arguments(self) -> list[Value]:
        """Return the arguments of the function `softmax`, except the number of rows."""
        return [*(self.at[what] for what in SOFTMAX_ARRAYS), self.numbers]

    def row_softmax(self) -> AttentionSoftmax:
        return AttentionSoftmax(self.isa, self.problem.keys, self.pitch, self.arithmetic.dtype,
                                natural=self.problem.mask is not None)

    def softmax(self, **more: str) -> str:
        """Return the name of the function that computes p, 1 / sum of p, and the correction of the means.

        more: types of further parameters, which a subclass uses.
        """
        name, f = self.function("softmax", **dict.fromkeys((*SOFTMAX_ARRAYS, "numbers"), PTR), rows=I64, **more)
        if f is None:
            return name
        peaks, totals, inverse, added, numbers, rows = (
            f.parameters[name] for name in ("peaks", "totals", "inverse", "added", "numbers", "rows"))
        softmax = self.row_softmax()
        self.peaks(softmax, f.parameters)
        self.weights(softmax, f.parameters)
        softmax.inverses(peaks, totals, inverse, rows)
        if self.adds_zero:
            zero = f.load(FLOAT, numbers + 12, hint="zero") - MIDDLE
            for row in f.loop("added", rows):
                peak = f.load(FLOAT, peaks + row * 4, hint="peak")
                f.store(f.select(is_unmasked(peak), zero.like(0), zero, "unseen"), added + row * 4)
        return name

    def peaks(self, softmax: AttentionSoftmax, parameters: Mapping[str, Value]) -> None:
        """Emit the peaks of the rows of scores."""
        softmax.peaks(parameters["x"], parameters["peaks"], parameters["rows"])

    def weights(self, softmax: AttentionSoftmax, parameters: Mapping[str, Value]) -> None:
        """Emit p and its sums."""
        x, peaks, p, totals, rows = (parameters[name] for name in ("x", "peaks", "p", "totals", "rows"))
        softmax.weights(x, peaks, p, totals, rows)

    def _mix(self, rows: int, columns: int) -> str:
        """Return the name of the micro-kernel for y = program(sums / sum of p + added), of rows x columns."""
        name, f = self.function(f"mix_{rows}x{columns}", p=PTR, v=PTR, inverse=PTR, added=PTR, constants=PTR, y=PTR)
        if f is None:
            return name
        lanes, p, v = Lanes(self.isa, columns, packed=False), f.parameters["p"], f.parameters["v"]
        self.means(lanes, rows, self.v.multiply(p, self.weight_pitch, v, (rows, columns)), f.parameters)
        return name

    def means(self, lanes: Lanes, rows: int, sums: Mapping[tuple[int, int], Value],
              parameters: Mapping[str, Value]) -> None:
        """Emit y = program(sums / sum of p + added) of a tile."""
        problem, isa = self.problem, self.isa
        inverse, added, constants, y = (parameters[name] for name in ("inverse", "added", "constants", "y"))
        f, numbers = y.f, load_constants(lanes, constants, problem.program.constants)

        def result(m: int) -> list[Value]:
            part = f.splat(f.load(FLOAT, inverse + 4 * m, hint="share"), isa.lanes)
            more = f.splat(f.load(FLOAT, added + 4 * m, hint="added"), isa.lanes) if self.adds_zero else None
            means = [isa.fma(sums[m, n], part, more) if more else sums[m, n] * part for n in range(lanes.vectors)]
            return run_program(lanes, problem.program, means, [], numbers)

        store_tile(lanes, problem.y, rows, result, y)
