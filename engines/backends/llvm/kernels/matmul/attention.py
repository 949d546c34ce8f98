"""Attention as one kernel: the scores of a block of queries live and die in the cache.

    y[n, h, s] = program(sum over t of p[s, t] * v[n, h, t] / sum over t of p[s, t])
    p[s, t]    = e**(x[s, t] - max over t of x[s])              x = scale * q[n, h, s] . k[n, h, t] + mask[n, h, s, t]

    for head:                                   k' and v are packed, once a call
      for block of queries:
        tiles of k' :  x                        -> scratch
        rows of x   :  p, 1 / sum of p          -> scratch
        tiles of v  :  sums / sum of p          -> program -> y

q, k and v are read as they lie: heads may be an axis inside a wider tensor, and so may y's.

In int8 p is round(255 * e**...), a byte that uses its whole range in every row, and the sum that divides is that of
these bytes: an exact mean. What q's zero point adds to a score depends on t and is what the sums begin with; what k's
adds is the same for a whole row, which a softmax does not see.

A query that sees no key, all x being minus infinity, has the mean 0: p and 1 / sum of p are 0, and in int8, where sums
are of v - MIDDLE, v's zero point less MIDDLE is added.

Source: Vaswani et al., Attention Is All You Need, equation 1; the order of the loops is that of FlashAttention (Dao et
al. 2022) without its running maximum: a row of scores fits a cache.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import FLOAT, PTR, Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes, from_float, to_float
from engines.backends.llvm.kernels.common.access import (
    item_addresses,
    load_channels,
    load_constants,
    offset,
    panels,
    run_program,
    unravel,
)
from engines.backends.llvm.kernels.contraction.contraction import tile_shapes
from engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, KernelSpec, Tactic, begin_kernel, pack_channels
from engines.backends.llvm.kernels.matmul.exp2 import LOG2_E, power, power_meaning
from engines.backends.llvm.kernels.matmul.operands import (
    MIDDLE,
    Left,
    Matrix,
    Right,
    integer,
    product_arithmetic,
    store_tile,
)
from engines.backends.llvm.kernels.rows.passes import PARTIALS, At, fold, fold_rows, live
from engines.backends.llvm.kernels.rows.softmax import less_peak, share, share_meaning
from engines.lowering.epilogue.functions import fma
from engines.lowering.epilogue.program import EpilogueProgram, Floats, load_meaning, store_meaning
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import SIZES, View


@dataclass(frozen=True)
class Tiles(Tactic):
    """Register tiles (rows, vectors) of the two products, and how many queries are a block."""
    scores: tuple[int, int]
    mix: tuple[int, int]
    block: int

    def __str__(self) -> str:
        return f"tiles {self.scores[0]}x{self.scores[1]}, {self.mix[0]}x{self.mix[1]} block {self.block}"


@dataclass(frozen=True)
class Attention(KernelSpec):
    """Views of one item: q [..., S, D], k [..., T, D], v [..., T, E], mask [..., S, T], y [..., S, E]; ... are heads.

    The innermost axis of q and y is contiguous; of k and v it or the one before it. mask: floats, repeated by strides
    of 0. value 0 of the program is the mean of v in v's units: less its zero point, or in int8 less MIDDLE.
    """
    q: View
    k: View
    v: View
    y: View
    mask: View | None
    program: EpilogueProgram
    precision: str                  # int8, fp32, bf16, fp16
    family = "attention"

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.q, self.k, self.v, *((self.mask,) if self.mask else ()))

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)

    @property
    def lead(self) -> tuple[int, ...]:
        return self.q.shape[:-2]

    @property
    def heads(self) -> int:
        return math.prod(self.lead)

    @property
    def queries(self) -> int:
        return self.q.shape[-2]

    @property
    def keys(self) -> int:
        return self.k.shape[-2]

    @property
    def macs(self) -> int:
        return self.heads * self.queries * self.keys * (self.q.shape[-1] + self.v.shape[-1])

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[Tiles]:
        found: dict[Tiles, None] = {}
        for scores in self._shapes(isa, self.keys)[:3]:
            for mix in self._shapes(isa, self.v.shape[-1])[:2]:
                found[Tiles(scores, mix, self._block(scores[0], 2))] = None
        return tuple(found)

    def refinements(self, isa: Isa, best: Tiles) -> Sequence[Tiles]:
        """The best tiles with other blocks."""
        return [Tiles(best.scores, best.mix, self._block(best.scores[0], n)) for n in (1, 4, 8)]

    def _block(self, rows: int, tiles: int) -> int:
        return min(rows * tiles, self.queries)

    def _shapes(self, isa: Isa, columns: int) -> list[tuple[int, int]]:
        """Register tiles for a right factor of so many columns."""
        widest = isa.vectors_for(columns)
        shapes = [shape for shape in tile_shapes(isa, self.precision) if shape[1] <= widest]
        return list(dict.fromkeys((min(rows, self.queries), vectors) for rows, vectors in shapes))

    def grid(self, isa: Isa, tactic: Tiles) -> Grid:
        return Grid(self.heads, 1, -(-self.queries // tactic.block))

    def packing(self, tactic: Tiles) -> int:
        return tactic.mix[1]

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tiles) -> None:
        _Emitter(self, module, name, isa, tactic).kernel()

    # ---- constants
    def pack(self, isa: Isa, tactic: Tiles, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"numbers": the scale of the scores, the zero points of q, k and v; "program": float32 [1] or [E] ->
        [panel][constant][vector][lane]."""
        columns = self.v.shape[-1]
        order = panels(isa, columns, packed=False, width=tactic.mix[1] * isa.lanes)
        return self._numbers(constants), pack_channels(constants["program"], columns, order)

    @property
    def _units(self) -> np.float32:
        """What makes units of log 2 of differences of scores: 1 where the scale has done it already, for no mask."""
        return np.float32(LOG2_E if self.mask else 1.0)

    def _numbers(self, constants: Mapping[str, Any]) -> Floats:
        scale, *zeros = constants["numbers"]
        return np.asarray([scale * LOG2_E / float(self._units), *zeros], np.float32)

    # ---- meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        scale, *zeros = self._numbers(constants)
        factors = [load_meaning(view.dtype, x) for view, x in zip(self.inputs, inputs, strict=True)]
        mask = factors[3] if self.mask else None
        if self.precision == "int8":
            return self._exact_meaning(factors, scale, zeros, mask, constants["program"])
        q, k, v = (x - np.float32(zero) for x, zero in zip(factors, zeros, strict=False))
        x = _product(q, k.swapaxes(-1, -2)) * scale
        x = x if mask is None else x + mask
        peak = fold_rows("max", x)
        p = power_meaning(less_peak(x, peak) * self._units, "float32")
        mean = _product(p, v) * share_meaning(peak, fold_rows("sum", p))
        return (store_meaning(self.y.dtype, self.program.meaning(mean, [], constants["program"])),)

    def _exact_meaning(self, factors: Sequence[Floats], scale: np.float32, zeros: Sequence[np.float32],
                       mask: Floats | None, program: Sequence[Floats]) -> tuple[Array, ...]:
        q, k, v = (x.astype(np.int64) for x in factors[:3])
        sums = ((q - int(zeros[0])) @ (k - MIDDLE).swapaxes(-1, -2)).astype(np.float32)
        x = sums * scale if mask is None else fma(sums, scale, mask)
        peak = fold_rows("max", x)
        p = np.rint(power_meaning(less_peak(x, peak) * self._units, "uint8"))
        mixed = (p.astype(np.int64) @ (v - MIDDLE)).astype(np.float32)
        mean = mixed * share_meaning(peak, fold_rows("sum", p))
        if self.mask:
            mean = mean + np.where(peak > -np.inf, np.float32(0), zeros[2] - np.float32(MIDDLE))
        return (store_meaning(self.y.dtype, self.program.meaning(mean, [], program)),)


def _product(a: Floats, b: Floats) -> Floats:
    """a @ b in float32."""
    return np.asarray(np.matmul(a, b), np.float32)


@dataclass(frozen=True)
class _Head:
    """The addresses of one head's factors, mask and result."""
    q: Value
    k: Value
    v: Value
    mask: Value | None
    y: Value


class _Emitter:
    """Writes one kernel: the loops around, and the micro-kernels they call."""

    def __init__(self, spec: Attention, module: Module, name: str, isa: Isa, tiles: Tiles) -> None:
        self.spec, self.module, self.name, self.isa, self.tiles = spec, module, name, isa, tiles
        self.arithmetic = product_arithmetic(spec.precision, isa)
        self.q = Left(Matrix.of(spec.q), self.arithmetic, isa)
        self.k = Right(Matrix.of(spec.k).transposed, self.arithmetic, isa, tiles.scores[1])
        self.v = Right(Matrix.of(spec.v), self.arithmetic, isa, tiles.mix[1])
        self.exact = self.q.exact
        self.adds_zero = self.exact and spec.mask is not None       # to the mean of a query that sees no key

    # ---- scratch: where what lies, in bytes
    @property
    def pitch(self) -> int:
        """Floats of a row of scores."""
        return -(-self.spec.keys // PARTIALS) * PARTIALS

    @property
    def weight_pitch(self) -> int:
        """Bytes of a row of p."""
        return self.pitch * SIZES[self.arithmetic.dtype]

    @cached_property
    def scratch(self) -> dict[str, tuple[int, int]]:
        """{what: (offset, bytes)}"""
        block = self.tiles.block
        sizes = {"k": self.k.bytes, "v": self.v.bytes, "x": block * self.pitch * 4, "inverse": block * 4,
                 "added": block * 4 if self.adds_zero else 0,
                 "p": 0 if self.arithmetic.dtype == "float32" else block * self.weight_pitch,
                 "q": 0 if self.q.direct else block * self.q.pitch,
                 "start": self.pitch * 4 if self.exact else 0}
        found, at = {}, 0
        for what, size in sizes.items():
            found[what] = (at, size)
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return found

    # ---- the loops around
    def kernel(self) -> None:
        spec = self.spec
        f, addresses, (begin, end, first, last) = begin_kernel(self.module, self.name, 3 + bool(spec.mask) + 3)
        *tensors, numbers, constants, y = addresses
        self.numbers, self.constants = numbers, constants
        total = sum(-(-size // ALIGNMENT) * ALIGNMENT for _, size in self.scratch.values())
        memory = f.op(PTR, f"alloca [{total} x i8], align {ALIGNMENT}", "scratch")
        self.at = {what: memory + start for what, (start, _) in self.scratch.items()}
        if not self.scratch["p"][1]:
            self.at["p"] = self.at["x"]         # in place
        self.zeros = [factor.zero(numbers, i) for i, factor in enumerate((self.q, self.k, self.v), 1)]
        views = [spec.q, spec.k, spec.v, *([spec.mask] if spec.mask else []), spec.y]
        for row in f.range("head", begin, end):
            here = item_addresses([*tensors, y], views, row.divided(spec.heads))
            head = unravel(row.remainder(spec.heads), spec.lead)
            q, k, v, *mask, result = (offset(a, head, view.strides[:-2]) for a, view in zip(here, views, strict=True))
            self._pack(k, v)
            for block in f.range("block", first, last):
                self._block(f, _Head(q, k, v, mask[0] if mask else None, result), block * self.tiles.block)

    def _pack(self, k: Value, v: Value) -> None:
        self.k.pack(k, self.at["k"], self.zeros[1])
        self.v.pack(v, self.at["v"], self.zeros[2])
        if self.exact:
            self._start_sums(k.f)

    def _start_sums(self, f: Function) -> None:
        """start[t] = -(q's zero point) * sum over d of k[t, d] - MIDDLE."""
        isa, right = self.isa, self.k
        zero = integer(f, self.numbers, 1)
        minus = f.splat(zero.like(0) - zero, isa.lanes)
        for start, columns in f.tiles("started panel", right.matrix.columns, right.width):
            panel = self.at["k"] + start.divided(right.width) * right.panel_bytes
            for v, total in enumerate(right.column_sums(panel, columns)):
                f.store(total * minus, self.at["start"] + start * 4 + v * isa.bytes, isa.bytes)

    def _block(self, f: Function, head: _Head, first: Value) -> None:
        queries, block = self.spec.queries, self.tiles.block
        whole, tail = divmod(queries, block)
        if not tail:
            self._queries(f, head, first, block)
            return
        if whole:
            with f.when(first.below(whole * block)):
                self._queries(f, head, first, block)
        with f.when(first.compare("uge", whole * block)):
            self._queries(f, head, first, tail)

    def _queries(self, f: Function, head: _Head, first: Value, count: int) -> None:
        """`count` queries from `first` on."""
        spec, scores, mix = self.spec, self.tiles.scores[0], self.tiles.mix[0]
        q = self.q.matrix.at(head.q, first, 0)
        if not self.q.direct:
            self.q.copy(q, count, self.at["q"], self.zeros[0])
            q = self.at["q"]
        mask = offset(head.mask, [first], spec.mask.strides[-2:-1]) if spec.mask and head.mask else None
        for t, columns in f.tiles("panel of keys", spec.keys, self.k.width):
            panel = self.at["k"] + t.divided(self.k.width) * self.k.panel_bytes
            here = offset(mask, [t], spec.mask.strides[-1:]) if spec.mask and mask else self.at["x"]
            for row, rows in f.tiles("row of scores", count, scores):
                moved = here + row * spec.mask.strides[-2] if spec.mask else here
                f.run(self._scores(rows, columns), q + row * self.q.pitch, panel, self.numbers,
                      self.at["start"] + t * 4, moved, self.at["x"] + row * (4 * self.pitch) + t * 4)
        f.run(self._softmax(), self.at["x"], self.at["p"], self.at["inverse"], self.at["added"], self.numbers,
              f.constant(count, "i64"))
        y = offset(head.y, [first], spec.y.strides[-2:-1])
        for e, columns in f.tiles("panel of values", spec.v.shape[-1], self.v.width):
            panel = self.at["v"] + e.divided(self.v.width) * self.v.panel_bytes
            constants = self.constants + e * (4 * spec.program.constants)
            for row, rows in f.tiles("row of values", count, mix):
                f.run(self._mix(rows, columns), self.at["p"] + row * self.weight_pitch, panel,
                      self.at["inverse"] + row * 4, self.at["added"] + row * 4, constants,
                      y + row * spec.y.strides[-2] + e * spec.y.strides[-1])

    # ---- the micro-kernels
    def _function(self, what: str, **types: str) -> tuple[str, Function | None]:
        """(name, the function to write, or None if it is there already)"""
        name = f"{self.name}_{what}"
        if name in self.module.functions:
            return name, None
        return name, self.module.function(name, internal=True, **types)

    def _scores(self, rows: int, columns: int) -> str:
        """x, of rows x columns scores."""
        name, f = self._function(f"scores_{rows}x{columns}", q=PTR, k=PTR, numbers=PTR, start=PTR, mask=PTR, x=PTR)
        if f is None:
            return name
        isa, mask, lanes = self.isa, self.spec.mask, Lanes(self.isa, columns, packed=False)
        q, k, numbers, start, added, x = f.parameters.values()
        begin = [f.load(isa.ints, start + v * isa.bytes, isa.bytes, "start") for v in range(lanes.vectors)]
        sums = self.k.multiply(q, self.q.pitch, k, (rows, columns), [begin] * rows if self.exact else ())
        scale = f.splat(f.load(FLOAT, numbers, hint="scale"), isa.lanes)
        others: list[Value] = []
        for m in range(rows):
            if mask and (m == 0 or mask.strides[-2]):
                others = load_channels(lanes, mask, added + m * mask.strides[-2])
            for v in range(lanes.vectors):
                value = isa.fma(sums[m, v], scale, others[v]) if mask else sums[m, v] * scale
                f.store(value, x + (4 * self.pitch * m + v * isa.bytes), isa.bytes)
        return name

    def _softmax(self) -> str:
        """Rows of x -> p, 1 / its sum, and what is added to the mean."""
        name, f = self._function("softmax", x=PTR, p=PTR, inverse=PTR, added=PTR, numbers=PTR, rows="i64")
        if f is None:
            return name
        isa, keys, dtype = self.isa, self.spec.keys, self.arithmetic.dtype
        x, p, inverse, added, numbers, rows = f.parameters.values()
        for row in f.loop("row", rows):
            here, there = x + row * (4 * self.pitch), p + row * self.weight_pitch

            def score(at: At, here: Value = here) -> Value:
                return f.load(isa.floats, here + at.column * 4, isa.bytes, "score")

            peak = fold(f, isa, keys, "max", score)

            def weight(at: At, there: Value = there, peak: Value = peak, score: Any = score) -> Value:
                less = score(at) - peak
                less = less * LOG2_E if self.spec.mask else less
                value = live(isa, power(isa, less, dtype), at.count, 0)
                if dtype == "uint8":
                    ints = isa.round(value)
                    f.store(f.cast("trunc", ints, f"<{isa.lanes} x i8>", "bytes"), there + at.column)
                    return isa.to_float(ints)
                stored = from_float(isa, dtype, value)
                f.store(stored, there + at.column * SIZES[dtype])
                return to_float(isa, dtype, stored)

            total = fold(f, isa, keys, "sum", weight)
            one = f.op(FLOAT, f"extractelement {share(peak, total)}, i32 0", "inverse")
            f.store(one, inverse + row * 4)
            if self.adds_zero:
                zero = f.splat(f.load(FLOAT, numbers + 12, hint="zero"), isa.lanes) - MIDDLE
                unseen = f.select(peak.compare("ogt", -math.inf), zero.like(0), zero, "unseen")
                f.store(f.op(FLOAT, f"extractelement {unseen}, i32 0", "added"), added + row * 4)
        return name

    def _mix(self, rows: int, columns: int) -> str:
        """y = program(sums / sum of p + added), of rows x columns."""
        name, f = self._function(f"mix_{rows}x{columns}", p=PTR, v=PTR, inverse=PTR, added=PTR, constants=PTR, y=PTR)
        if f is None:
            return name
        spec, isa, lanes = self.spec, self.isa, Lanes(self.isa, columns, packed=False)
        p, v, inverse, added, constants, y = f.parameters.values()
        sums = self.v.multiply(p, self.weight_pitch, v, (rows, columns))
        numbers = load_constants(lanes, constants, spec.program.constants)

        def result(m: int) -> list[Value]:
            part = f.splat(f.load(FLOAT, inverse + 4 * m, hint="share"), isa.lanes)
            means = [sums[m, n] * part for n in range(lanes.vectors)]
            if self.adds_zero:
                more = f.splat(f.load(FLOAT, added + 4 * m, hint="added"), isa.lanes)
                means = [mean + more for mean in means]
            return run_program(lanes, spec.program, means, [], numbers)

        store_tile(lanes, spec.y, rows, result, y)
        return name
