"""Attention one query at a time, for all types and GPUs: a warp or a block per query, several keys side by side.

    lanes l of a key:   x[t] = scale * q . k[t] + mask[t]               each lane has some columns
                        floats: running maximum of x; earlier sums are rescaled when it grows (online softmax)
                        y[e] += p[t] * v[t, e];  sum of p               p = 2**(x - maximum)
    then the sums are reduced over the warp, and over the warps of a block

A lane has 16 bytes of four keys in flight, and reads k and v once, so that decoding (one query, thousands of keys) runs
at memory bandwidth. INT8 makes two passes over the keys, because p is rounded to bytes relative to the global maximum
(engines/lowering/problems/matmul.py); products are dp4a over four columns and over four keys.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import barrier, elements, pick_bytes, shared, shuffle_xor, wide
from infer_server.engines.backends.cuda.codegen.products import dot
from infer_server.engines.backends.cuda.cost import PLAIN, Card
from infer_server.engines.backends.cuda.kernels.access import (
    load_channels,
    load_constants,
    load_stored,
    offset_in,
    pixel_offset,
    run_program,
    store_channels,
    store_stored,
    to_float,
    vector_width,
    words_of_bytes,
)
from infer_server.engines.backends.cuda.kernels.matmul.powers import power
from infer_server.engines.backends.cuda.kernels.matmul.query_tiles import FLIP, ONES, mean_of, words_of_column
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.row_formulas import is_unmasked, softmax_scale, softmax_shift
from infer_server.engines.codegen.types import FLOAT, I32, vector
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.view import View

# INT8 or not, counted in SASS: a lane's instructions per key, and in addition per column of k or v.
INSTRUCTIONS = {True: (43, 1), False: (19, 2)}
KEYS = 4                # per group of lanes and iteration; INT8 multiplies four keys at once
WORD = 4                # bytes

Columns = list[Value]   # a lane's columns, as floats or as words of bytes


@dataclass(frozen=True)
class Chunks:
    """Partition of a row of k or v into chunks of `each` columns. `whole`: a chunk is one contiguous load."""
    view: View
    each: int
    whole: bool

    @property
    def count(self) -> int:
        return -(-self.view.shape[-1] // self.each)


def chunks_of(view: View, base: int) -> Chunks:
    """Partition the rows of a view. `base` is its alignment in bytes."""
    each = vector_width([(view, base)], view.shape[-1], 16 // view.size)
    if view.dtype == "uint8" and each < WORD:
        return Chunks(view, WORD, False)        # gathered bytewise; the last word may be partial
    return Chunks(view, each, True)


@dataclass(frozen=True)
class LanePartition:
    """Partition of keys and columns among the lanes of a block."""
    k: Chunks
    v: Chunks
    warps: int

    @property
    def lanes(self) -> int:
        """Lanes per key."""
        return min(WARP, 1 << (max(self.k.count, self.v.count) - 1).bit_length())

    @property
    def turn(self) -> int:
        """Keys per iteration."""
        return self.warps * WARP // self.lanes * KEYS

    @property
    def columns(self) -> int:
        """Columns of y, including padding."""
        return -(-self.v.count // self.lanes) * self.lanes * self.v.each

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for each warp's sums, total of p and maximum."""
        return self.warps * (self.columns + 2) * WORD if self.warps > 1 else 0


def partition_of(problem: Attention, aligned: Sequence[int], warps: int) -> LanePartition:
    """Partition an attention for `warps` warps per query."""
    return LanePartition(chunks_of(problem.k, aligned[1]), chunks_of(problem.v, aligned[2]), warps)


def seconds(problem: Attention, cut: LanePartition, card: Card, rows: int, items: int, parts: int = 1) -> float:
    """Return the estimated seconds of a launch for `rows` queries, over all heads, items and slices of keys."""
    turns, threads = -(-problem.keys // (parts * cut.turn)), rows * cut.warps * WARP
    integers, columns = problem.precision == "int8", sum(
        -(-chunks.count // cut.lanes) * chunks.each for chunks in (cut.k, cut.v))
    score, column = INSTRUCTIONS[integers]
    macs = int(threads * turns * KEYS * (score + column * columns) / PLAIN)
    return max(card.read_seconds(problem.bytes * items, threads, KEYS * 16), card.scalar_seconds(macs, threads))


class OneQuery:
    """Emitter of the row-th query, over all heads and items, and the keys begin..end - 1. All threads take part."""

    def __init__(self, problem: Attention, gpu: Gpu, cut: LanePartition, operands: Sequence[Value], row: Value,
                 thread: Value, begin: Value, keys: int) -> None:
        """Begin the code of a query. `operands` are q, k, v, the mask if there is one, and the table of numbers."""
        self.problem, self.gpu, self.cut, self.f = problem, gpu, cut, row.f
        self.integers = problem.precision == "int8"
        inputs = len(problem.inputs)
        self.inputs, numbers = operands[:inputs], operands[inputs]
        self.scale, *self.zeros = (self.f.load(FLOAT, numbers + 4 * n, 4, "number") for n in range(4))
        self.row, self.head = row, row.divided(problem.queries)
        self.thread, self.warp = thread, thread.divided(WARP)
        self.lane = thread & cut.lanes - 1              # among the lanes of a key
        self.begin, self.end = begin, (begin + keys).at_most(problem.keys)
        self.turns, self.ragged = -(-keys // cut.turn), bool(keys % cut.turn or problem.keys % keys)
        self.q = self._query()

    # ---- passes over the keys
    def peak(self) -> Value:
        """Return the maximum score, in every lane."""
        peak = {"": self.f.constant(-math.inf, FLOAT)}
        for keys in self._keys("peak", peak=peak):
            for x in self._scores(keys):
                peak[""] = self.gpu.larger(peak[""], x)
        found = self._over_groups(self.gpu.larger, peak[""])
        return self._of_all_warps(found) if self.cut.warps > 1 else found

    def bytes_below(self, peak: Value) -> tuple[Value, Columns]:
        """Return, for INT8, the sum of p and the lane's sums of p * v. They are complete where `first` is true."""
        zero, top = self.f.constant(0, I32), softmax_shift(peak)
        sums = dict.fromkeys(range(-1, self._columns), zero)
        for keys in self._keys("sums", sums=sums):
            scores = self._scores(keys)
            values = [self._row(self.cut.v, 2, key) for key in keys]
            word, = words_of_bytes([self.gpu.bits(power(self.gpu, self.problem, x, top)) for x in scores])
            sums[-1] = dot(self.gpu, "int8", sums[-1], word, zero.like(ONES))
            for n, column in enumerate(column for words in zip(*values, strict=True) for column in _transposed(words)):
                sums[n] = dot(self.gpu, "int8", sums[n], word, column)
        total, *columns = (self._over_groups(lambda a, b: a + b, value) for value in sums.values())
        return self._over_warps(total, columns)

    def floats(self) -> tuple[Value, Value, Columns]:
        """Return the maximum score, the sum of p and the lane's sums of p * v."""
        zero = self.f.constant(0, FLOAT)
        peak, sums = {"": zero.like(-math.inf)}, dict.fromkeys(range(-1, self._columns), zero)
        for keys in self._keys("keys", peak=peak, sums=sums):
            values = [self._row(self.cut.v, 2, key) for key in keys]
            scores, before = self._scores(keys), peak[""]
            peak[""] = self._largest([before, *scores])
            top = softmax_shift(peak[""])
            less, powers = self._power(before, top), [self._power(x, top) for x in scores]
            sums.update({n: value * less for n, value in sums.items()})
            for p, row in zip(powers, values, strict=True):
                sums[-1] = sums[-1] + p
                for n, value in enumerate(row):
                    sums[n] = self.gpu.fma(p, value, sums[n])
        largest = self._over_groups(self.gpu.larger, peak[""])
        less = self._power(peak[""], softmax_shift(largest))
        total, *columns = (self._over_groups(lambda a, b: a + b, value * less) for value in sums.values())
        if self.cut.warps == 1:
            return largest, total, columns
        of_all = self._of_all_warps(largest)
        less = self._power(largest, softmax_shift(of_all))
        return of_all, *self._over_warps(total * less, [value * less for value in columns])

    def _power(self, x: Value, top: Value) -> Value:
        return power(self.gpu, self.problem, x, top)

    def _largest(self, values: Sequence[Value]) -> Value:
        result, *others = values
        for other in others:
            result = self.gpu.larger(result, other)
        return result

    def _keys(self, name: str, **carried: dict[Any, Value]) -> Iterator[list[Value]]:
        """Yield KEYS keys of the lane's group per iteration. They may be past the end."""
        f, cut = self.f, self.cut
        first = self.begin + self.thread.divided(cut.lanes)
        for turn in f.loop(name, self.turns, **carried):
            key = first + f.cast("trunc", turn, I32, "turn") * cut.turn
            yield [key + n * (cut.turn // KEYS) for n in range(KEYS)]

    # ---- scores
    def _query(self) -> list[Columns]:
        """Load q's columns for the lane's chunks; missing ones are 0."""
        q, f = self.problem.q, self.f
        at, zero = self.inputs[0] + offset_in(q, self.row), self.zeros[0]
        found = []
        for chunk in self._chunks(self.cut.k):
            columns = [chunk * self.cut.k.each + n for n in range(self.cut.k.each)]
            valid = [column.below(q.shape[-1]) for column in columns]
            stored = [load_stored(q, at + wide(column.at_most(q.shape[-1] - 1)) * q.strides[-1], 1)[0]
                      for column in columns]
            if self.integers:
                bits = [f.select(test, f.cast("zext", byte, I32, "byte"), chunk.like(0), "byte")
                        for test, byte in zip(valid, stored, strict=True)]
                found.append([*words_of_bytes(bits), *words_of_bytes([
                    f.select(test, chunk.like(1), chunk.like(0), "one") for test in valid])])
                continue
            found.append([f.select(test, self._float(q, x, zero), zero.like(0), "q")
                          for test, x in zip(valid, stored, strict=True)])
        return found

    def _float(self, view: View, stored: Value, zero: Value) -> Value:
        number = to_float(self.gpu, view.dtype, stored)
        return number - zero if view.dtype == "uint8" else number

    def _scores(self, keys: Sequence[Value]) -> list[Value]:
        rows = [self._row(self.cut.k, 1, key) for key in keys]
        return [self._score(row, key) for row, key in zip(rows, keys, strict=True)]

    def _score(self, row: Columns, key: Value) -> Value:
        f, gpu, mask = self.f, self.gpu, self.problem.mask
        each = len(row) // len(self.q)
        pairs = [(q, row[n * each:(n + 1) * each]) for n, q in enumerate(self.q)]
        if self.integers:
            acc = ones = f.constant(0, I32)
            for q, words in pairs:
                for n, word in enumerate(words):
                    acc = dot(gpu, "int8", acc, q[n], word)
                    ones = dot(gpu, "int8", ones, q[each + n], word)
            value = gpu.to_float(self._over_lanes(acc - gpu.round(self.zeros[0]) * ones))
        else:
            total = f.constant(0, FLOAT)
            for (q, columns), chunk in zip(pairs, self._chunks(self.cut.k), strict=True):
                before = total
                for a, b in zip(q, columns, strict=True):
                    total = gpu.fma(a, b, total)
                if self.cut.k.count % self.cut.lanes:       # 0 * inf would be NaN
                    total = f.select(chunk.below(self.cut.k.count), total, before, "total")
            value = self._over_lanes(total)
        if mask is None:
            x = value * self.scale
        else:
            at = (self._of_head(3, mask) + wide(self.row.remainder(self.problem.queries)) * mask.strides[-2]
                  + wide(key.at_most(self.problem.keys - 1)) * mask.strides[-1])
            hidden, = load_channels(gpu, mask, at, 1)
            x = gpu.fma(value, self.scale, hidden) if self.integers else value * self.scale + hidden
        return f.select(key.below(self.end), x, x.like(-math.inf), "score") if self.ragged else x

    # ---- rows
    @property
    def _columns(self) -> int:
        """Columns of y that a lane accumulates."""
        return len(self._chunks(self.cut.v)) * self.cut.v.each

    def _chunks(self, chunks: Chunks) -> list[Value]:
        """Return the numbers of the lane's chunks."""
        return [self.lane + first for first in range(0, chunks.count, self.cut.lanes)]

    def _row(self, chunks: Chunks, number: int, key: Value) -> Columns:
        """Load the lane's columns of a row of k or v, as floats or words of bytes minus MIDDLE. Indices are clamped."""
        view, zero = chunks.view, self.zeros[number]
        row = self._of_head(number, view) + wide(key.at_most(self.problem.keys - 1)) * view.strides[-2]
        result = []
        for chunk in self._chunks(chunks):
            first = chunk.at_most(chunks.count - 1) * chunks.each
            if not chunks.whole:
                last = view.shape[-1] - 1
                result += words_of_column(view, [row + wide((first + n).at_most(last)) * view.strides[-1]
                                                 for n in range(chunks.each)])
            elif self.integers:
                words = self.f.load(vector(chunks.each // WORD, I32), row + wide(first), chunks.each, "words")
                result += [word ^ FLIP for word in elements(words)]
            else:
                stored = load_stored(view, row + wide(first) * view.strides[-1], chunks.each)
                result += [self._float(view, x, zero) for x in stored]
        return result

    def _of_head(self, number: int, view: View) -> Value:
        return self.inputs[number] + pixel_offset(self.head, view.shape[:-2], view.strides[:-2], view.item)

    # ---- lanes, groups of them, warps
    def _over_lanes(self, value: Value) -> Value:
        return _over(value, lambda a, b: a + b, 1, self.cut.lanes)

    def _over_groups(self, combine: Callable[[Value, Value], Value], value: Value) -> Value:
        return _over(value, combine, self.cut.lanes, WARP)

    def _of_warp(self, warp: Value) -> Value:
        """Return the address of a warp's sums in shared memory: [column], total, maximum."""
        return shared(self.f) + warp * ((self.cut.columns + 2) * WORD)

    def _of_all_warps(self, peak: Value) -> Value:
        """Return the maximum over all warps, in every lane."""
        offset = (self.cut.columns + 1) * WORD
        with self.f.when((self.thread & WARP - 1).compare("eq", 0)):
            self.f.store(peak, self._of_warp(self.warp) + offset, WORD)
        barrier(self.f)
        return self._largest([self.f.load(FLOAT, self._of_warp(warp) + offset, WORD, "peak")
                              for warp in map(self.warp.like, range(self.cut.warps))])

    def _over_warps(self, total: Value, columns: Columns) -> tuple[Value, Columns]:
        """Return the sums over all warps, in every lane."""
        cut, f = self.cut, self.f
        if cut.warps == 1:
            return total, columns
        with f.when((self.thread & WARP - 1).below(cut.lanes)):
            for offset, part in self._pieces(columns):
                for n, value in enumerate(part):
                    f.store(value, self._of_warp(self.warp) + (offset + n) * WORD, WORD)
        with f.when((self.thread & WARP - 1).compare("eq", 0)):
            f.store(total, self._of_warp(self.warp) + cut.columns * WORD, WORD)
        barrier(f)
        warps = [self._of_warp(self.warp.like(warp)) for warp in range(cut.warps)]

        def whole(offset: Value | int) -> Value:
            first, *others = (f.load(total.type, at + offset * WORD, WORD, "sum") for at in warps)
            for other in others:
                first = first + other
            return first
        return whole(cut.columns), [whole(offset + n) for offset, part in self._pieces(columns)
                                    for n in range(len(part))]

    def _pieces(self, columns: Columns) -> list[tuple[Value, Columns]]:
        """Return the lane's columns by chunk, each with the number of its first column."""
        each = self.cut.v.each
        return [(chunk * each, columns[n * each:(n + 1) * each])
                for n, chunk in enumerate(self._chunks(self.cut.v))]

    # ---- y
    @property
    def first(self) -> Value:
        """True (i1) in the lanes that store: those of the first key."""
        return self.thread.below(self.cut.lanes)

    def store(self, y: Value, base: int, constants: Value, peak: Value, total: Value, columns: Columns,
              valid: Value) -> None:
        """Normalise the sums, run the program and store y, whose alignment is `base` bytes."""
        problem, f, gpu, width = self.problem, self.f, self.gpu, self.problem.y.shape[-1]
        part = softmax_scale(peak, gpu.to_float(total) if self.integers else total)
        step = vector_width([(problem.y, base)], width, self.cut.v.each)
        for offset, some in self._pieces(columns):
            for n in range(0, len(some), step):
                column = offset + n
                with f.when(valid & self.first & column.below(width)):
                    means = [mean_of(gpu, problem, x, part, is_unmasked(peak), self.zeros[2]) for x in some[n:n + step]]
                    numbers = load_constants(f, constants, column, step, problem.program.constants, width)
                    results = run_program(gpu, problem.program, means, [], numbers)
                    at = y + offset_in(problem.y, self.row) + wide(column) * problem.y.strides[-1]
                    store_channels(gpu, problem.y, results, at)

    def store_sums(self, view: View, base: int, to: Value, row: Value, columns: Columns, valid: Value) -> None:
        """Store the sums without normalisation in a row of `view`."""
        width = view.shape[-1]
        step = vector_width([(view, base)], width, self.cut.v.each)
        for offset, some in self._pieces(columns):
            for n in range(0, len(some), step):
                with self.f.when(valid & self.first & (offset + n).below(width)):
                    at = to + (wide(row) * width + wide(offset + n)) * view.size
                    store_stored(view, some[n:n + step], at)


def _over(value: Value, combine: Callable[[Value, Value], Value], first: int, end: int) -> Value:
    """Reduce over the lanes whose numbers differ in the bits first, 2 * first, ... below end."""
    while first < end:
        value, first = combine(value, shuffle_xor(value, first)), 2 * first
    return value


def _transposed(words: Sequence[Value]) -> list[Value]:
    """Transpose four words of four bytes."""
    a, b, c, d = words
    ab, cd, ab_high, cd_high = (pick_bytes(*pair, order) for order in (0x5140, 0x7362) for pair in ((a, b), (c, d)))
    return [pick_bytes(low, high, order) for low, high in ((ab, cd), (ab_high, cd_high))
            for order in (0x5410, 0x7632)]
