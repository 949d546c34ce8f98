"""Attention on tensor cores: a warp computes 16 queries of a head in registers.

    for each 32 bytes of keys:      x[query, key] = scale * q . k + mask;    maximum of x per query
    second pass:                    p = 2**(x - maximum), rounded to bytes in INT8; sum of p
                                    y[query, column] += p * v
    y = program(y / sum of p)

Scores are computed twice and stay in registers, so the number of keys is not limited. A lane's scores of the first
product are its fragment of the second one if keys are permuted, which does not change the sums: no exchange between
lanes is needed, except with quads (engines/backends/cuda/codegen/fragments.py).

INT8 multiplies q by k - 128, and subtracts q's zero point times the sum of k - 128, a product by ones.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from infer_server.engines.backends.cuda.codegen.fragments import COUTS, TILE, Words, fragments
from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import pick_bytes, shuffle_xor, wide
from infer_server.engines.backends.cuda.codegen.products import STEP, dot
from infer_server.engines.backends.cuda.kernels.access import (
    MAGIC,
    alignment,
    load_channels,
    load_constants,
    offset_in,
    packed_words,
    pixel_offset,
    run_program,
    store_channels,
    words_of_bytes,
)
from infer_server.engines.backends.cuda.kernels.matmul.powers import MAGIC_BITS, converts_by_adding, power
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.row_formulas import is_unmasked, softmax_scale, softmax_shift
from infer_server.engines.codegen.types import ELEMENTS, FLOAT, I16, I32
from infer_server.engines.lowering.problems.matmul import MIDDLE, Attention
from infer_server.engines.lowering.problems.problem import STORED
from infer_server.engines.lowering.problems.view import View

Rows = dict[int, Value]                     # values by row of a lane: 0 or 1
Scores = dict[tuple[int, int], Value]       # scores by row of a lane, and key
Sums = dict[tuple[int, int], Value]         # by COUTS columns and element of products.multiply's sums
QUERIES = TILE


class Block(NamedTuple):
    """Keys that are multiplied at once, `keys_at_once` of them."""
    first: Value
    row: int = 0                # number of the first among the keys of an iteration


FLIP = -0x7F7F7F80              # 0x80808080, which subtracts 128 from each byte
ONES = 0x01010101


def suits(problem: Attention, gpu: Gpu, aligned: Sequence[int]) -> bool:
    """Return True if the types have an mma, and q and k can be read in words."""
    return gpu.has_mma(problem.precision) and all(
        view.dtype == STORED[problem.precision] for view in (problem.q, problem.k, problem.v)) and all(
        view.strides[-1] == view.size and alignment(view, base) % 4 == 0 and view.shape[-1] * view.size % 4 == 0
        for view, base in zip((problem.q, problem.k), aligned, strict=False))


def tiles_of(problem: Attention) -> int:
    """Return the number of tiles per item."""
    return problem.heads * -(-problem.queries // QUERIES)


def words_of_column(view: View, addresses: Sequence[Value]) -> list[Value]:
    """Load elements at the given addresses as packed words; bytes are reduced by 128."""
    f = addresses[0].f
    bits = [f.load(ELEMENTS[view.dtype], address, view.size, "element") for address in addresses]
    if view.dtype == "float16":
        bits = [f.cast("bitcast", value, I16, "bits") for value in bits]
    wides = [f.cast("zext", value, I32, "wide") for value in bits]
    if view.dtype != "uint8":
        return [pick_bytes(a, b, 0x5410) for a, b in zip(wides[::2], wides[1::2], strict=True)]
    pairs = [pick_bytes(a, b, 0x0040) for a, b in zip(wides[::2], wides[1::2], strict=True)]
    return [pick_bytes(a, b, 0x5410) ^ FLIP for a, b in zip(pairs[::2], pairs[1::2], strict=True)]


def mean_of(gpu: Gpu, problem: Attention, total: Value, part: Value, any_key: Value, v_zero: Value) -> Value:
    """Return the weighted mean, the epilogue's input, from a sum of p * v.

    `part` is 1 / sum of p. `any_key` is true if the query attends to any key.
    """
    if problem.precision != "int8":
        return total * part
    mean = gpu.to_float(total) * part
    if problem.mask is None:
        return mean
    return mean + mean.f.select(any_key, mean.like(0), v_zero - float(MIDDLE), "nothing")


class QueryTile:
    """Emitter of QUERIES queries from `query0` on.

    All lanes of the warp take part; queries and keys past the end repeat the last one and are ignored.
    """

    def __init__(self, problem: Attention, gpu: Gpu, f: Function, operands: list[Value], head: Value, query0: Value,
                 lane: Value) -> None:
        self.problem, self.gpu, self.f, self.integers = problem, gpu, f, problem.precision == "int8"
        *self.inputs, numbers, self.constants, self.y = operands
        self.scale, self.q_zero, _, self.v_zero = (f.load(FLOAT, numbers + 4 * n, 4, "number") for n in range(4))
        self.lanes = fragments(gpu, problem.precision, lane)
        self.head, self.query0 = head, query0
        self.queries = [self.query0 + (self.lanes.row + row * self.lanes.apart) for row in (0, 1)]
        self.rows = [self._row(query) for query in self.queries]
        self.keys_at_once = STEP // problem.q.size
        self.turn = self.keys_at_once           # keys per iteration
        self.middle = MAGIC_BITS if self.integers and converts_by_adding(problem) else 0    # where integer scores start
        self.q, self.ones = self._queries()

    def write(self, valid: Value) -> None:
        peaks, (totals, acc) = self._nothing_seen(), self._nothing_summed()
        for block in self._blocks("block", False, peak=peaks):
            for (row, _), x in self._scores(block).items():
                peaks[row] = self.gpu.larger(peaks[row], x)
        peaks = {row: self._together(self.gpu.larger, peak) for row, peak in peaks.items()}
        tops = {row: softmax_shift(peak) for row, peak in peaks.items()}
        for block in self._blocks("again", True, acc=acc, total=totals):
            self._add(totals, acc, self._scores(block), tops, block)
        self._finish(peaks, totals, acc, valid)

    def _nothing_seen(self) -> Rows:
        return dict.fromkeys((0, 1), self.f.constant(-math.inf, FLOAT))

    def _nothing_summed(self) -> tuple[Rows, Sums]:
        """Return zero sums of p, and of p * v by [COUTS columns, element]."""
        zero = self.f.constant(0, I32 if self.integers else FLOAT)
        columns = -(-self.problem.v.shape[-1] // TILE) * (TILE // COUTS)
        return (dict.fromkeys((0, 1), zero),
                {(column, e): zero for column in range(columns) for e in range(4)})

    def _blocks(self, name: str, mixes: bool, **carried: dict[Any, Value]) -> Iterator[Block]:
        """Yield the blocks of keys. `mixes`: v is read, too."""
        for turn in self.f.loop(name, -(-self.problem.keys // self.turn), **carried):
            yield Block(self.f.cast("trunc", turn, I32, "turn") * self.turn)

    def _add(self, totals: Rows, acc: Sums, scores: Scores, tops: Rows, block: Block) -> None:
        """Add a block of keys to the sums."""
        powers = {at: power(self.gpu, self.problem, x, tops[at[0]]) for at, x in scores.items()}
        words = [self._words_of([p for (of, _), p in powers.items() if of == row]) for row in (0, 1)]
        for (row, _), p in () if self.integers else powers.items():
            totals[row] = totals[row] + p
        for row, of_row in enumerate(words if self.integers else ()):
            for word in of_row:
                totals[row] = dot(self.gpu, "int8", totals[row], word, word.like(ONES))
        self._mix(acc, words, block)

    def _words_of(self, powers: Sequence[Value]) -> list[Value]:
        """Pack exponentials as a fragment of the second product."""
        if self.integers:
            return words_of_bytes([self.gpu.bits(p) for p in powers])
        return packed_words(self.gpu, self.problem.v.dtype, powers)

    def _finish(self, peaks: Rows, totals: Rows, acc: Sums, valid: Value) -> None:
        f = self.f
        totals = {row: self._together(lambda a, b: a + b, total) for row, total in totals.items()}
        for row, query in enumerate(self.queries):
            total = self.gpu.to_float(totals[row]) if self.integers else totals[row]
            part, any_key = softmax_scale(peaks[row], total), is_unmasked(peaks[row])
            with f.when(valid & query.below(self.problem.queries)):
                for n, e in acc:
                    if e // 2 == row:
                        self._store(row, self._column(n, e % 2), acc[n, e], part, any_key)

    def _row(self, query: Value) -> Value:
        return self.head * self.problem.queries + query.at_most(self.problem.queries - 1)

    # ---- q * k
    def _queries(self) -> tuple[list[Words], list[Words]]:
        """Load q: per STEP bytes of columns, a lane's words, and ones where these are within the row."""
        q, one = self.problem.q, self.f.constant(ONES, I32)
        starts = [self.inputs[0] + offset_in(q, self._row(self.query0 + row)) for row in self.lanes.rows]
        words: list[Words] = []
        ones: list[Words] = []
        for step in range(-(-q.shape[-1] * q.size // STEP)):
            words.append([self._words(start, step) for start in starts])
            valid = [one if test is None else self.f.select(test, one, one.like(0), "ones")
                     for test in self._there(step)]
            ones.append([valid] * len(starts))
        return words, ones

    def _there(self, step: int) -> list[Value | None]:
        """Return, for each of a lane's words of a row of q or k, whether it is within the row (None: all are)."""
        size, first = self.problem.q.shape[-1] * self.problem.q.size, STEP * step
        return [None if first + STEP <= size else (byte + first).below(size) for byte in self.lanes.bytes]

    def _words(self, start: Value, step: int) -> list[Value]:
        words = []
        for byte, valid in zip(self.lanes.bytes, self._there(step), strict=True):
            offset, nothing = byte + STEP * step, byte.like(0)
            offset = self.f.select(valid, offset, nothing, "offset") if valid else offset
            word = self.f.load(I32, start + wide(offset), 4, "word")
            words.append(self.f.select(valid, word, nothing, "word") if valid else word)
        return words

    def _scores(self, block: Block) -> Scores:
        """Return the scores by the lane's row (0, 1) and key (2 t and 2 t + 1 of each COUTS)."""
        f = self.f
        found: Scores = {}
        for number in range(self.keys_at_once // TILE):
            zero = f.constant(0, I32 if self.integers else FLOAT)
            acc, sums = [zero.like(self.middle) if self.middle else zero] * 8, [zero] * 8
            for words, ones, b in zip(self.q, self.ones, self._keys(block, number), strict=True):
                if self.integers:
                    b = [[word ^ FLIP for word in column] for column in b]
                    sums = self.lanes.multiply(sums, ones, b)
                acc = self.lanes.multiply(acc, words, b)
            if self.integers:
                q_zero = self.gpu.round(self.q_zero)
                acc = [self._float(a - q_zero * s) for a, s in zip(acc, sums, strict=True)]
            for e, value in enumerate(acc):
                n, row, c = 2 * number + e // 4, e // 2 % 2, e % 2
                found[row, 2 * n + c] = self._score(value, row, block.first + self.lanes.t * 2 + (n * COUTS + c))
        return found

    def _float(self, total: Value) -> Value:
        """Convert an integer score to float, without its initial value."""
        return self.gpu.from_bits(total) - MAGIC if self.middle else self.gpu.to_float(total)

    def _keys(self, block: Block, number: int) -> list[Words]:
        """Load TILE keys, per STEP bytes of their columns."""
        k = self._of_head(1, self.problem.k)
        keys = [(block.first + column + number * TILE).at_most(self.problem.keys - 1) for column in self.lanes.columns]
        starts = [k + wide(key) * self.problem.k.strides[-2] for key in keys]
        return [[self._words(start, step) for start in starts] for step in range(len(self.q))]

    def _of_head(self, number: int, view: View) -> Value:
        return self.inputs[number] + pixel_offset(self.head, view.shape[:-2], view.strides[:-2], view.item)

    def _score(self, value: Value, row: int, key: Value) -> Value:
        mask, keys = self.problem.mask, self.problem.keys
        if mask is None:
            x = value * self.scale
        else:
            query, key_there = self.queries[row].at_most(self.problem.queries - 1), key.at_most(keys - 1)
            at = self._of_head(3, mask) + wide(query) * mask.strides[-2] + wide(key_there) * mask.strides[-1]
            hidden, = load_channels(self.gpu, mask, at, 1)
            x = self.gpu.fma(value, self.scale, hidden) if self.integers else value * self.scale + hidden
        if keys % self.turn == 0:
            return x
        return self.f.select(key.below(keys), x, x.like(-math.inf), "score")

    # ---- p * v
    def _mix(self, acc: Sums, powers: Words, block: Block) -> None:
        a = self.lanes.factor(powers)
        for pair, b in enumerate(self._values(block)):
            keys = [(2 * pair + n, e) for n in (0, 1) for e in range(4)]
            acc.update(zip(keys, self.lanes.multiply([acc[key] for key in keys], a, b), strict=True))

    def _values(self, block: Block) -> Iterator[Words]:
        """Yield the fragments of v, TILE columns at a time."""
        view = self.problem.v
        starts = [self._of_head(2, view) + wide((block.first + key).at_most(self.problem.keys - 1)) * view.strides[-2]
                  for key in self.lanes.factor_columns(self.keys_at_once)]
        for pair in range(-(-view.shape[-1] // TILE)):
            offsets = [wide((column + pair * TILE).at_most(view.shape[-1] - 1)) * view.strides[-1]
                       for column in self.lanes.columns]
            yield [words_of_column(view, [start + at_column for start in starts]) for at_column in offsets]

    def _column(self, n: int, c: int) -> Value:
        """Return the column of v and y of the lane's sum."""
        return self.lanes.t * 2 + (n * COUTS + c)

    # ---- y
    def _together(self, combine: Callable[[Value, Value], Value], value: Value) -> Value:
        """Reduce over the four lanes of a row."""
        for distance in self.lanes.sharing:
            value = combine(value, shuffle_xor(value, distance))
        return value

    def _store(self, row: int, column: Value, total: Value, part: Value, any_key: Value) -> None:
        problem, f, view = self.problem, self.f, self.problem.y
        mean = mean_of(self.gpu, problem, total, part, any_key, self.v_zero)
        with f.when(column.below(view.shape[-1])):
            numbers = load_constants(f, self.constants, column, 1, problem.program.constants, view.shape[-1])
            results = run_program(self.gpu, problem.program, [mean], [], numbers)
            at = self.y + offset_in(view, self.rows[row]) + wide(column) * view.strides[-1]
            store_channels(self.gpu, view, results, at)
