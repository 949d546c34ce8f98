"""What a lane brings to products of a warp whose factors lie anywhere, and which of their sums it has.

A product is of 16 rows by 16 columns, STEP bytes of K (products.py). A lane reads whole words of four bytes:

    a[row of `rows`][byte of `bytes`]           rows of the 16, bytes of the STEP
    b[column of `columns`][byte of `bytes`]
    sums[4 n + 2 r + c]                         row `row` + r * `apart`, column 8 n + 2 t + c

By quads (m8n8k4) a lane brings all of one row; by mma halves of two.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import across
from engines.backends.cuda.codegen.products import STEP, multiply, multiply_quads, quad_rows, sums_of
from engines.codegen.ir_builder import Value

TILE, COUTS = 16, 8             # rows and columns of a product; columns of one n
WORD = 4                        # bytes

Words = Sequence[Sequence[Value]]


class Fragments(ABC):
    """Of one lane. `sharing`: lanes of a row's sums, as bits of their numbers."""
    rows: Sequence[Value]
    columns: Sequence[Value]
    bytes: Sequence[Value]
    sharing: tuple[int, int]

    def __init__(self, gpu: Gpu, precision: str, lane: Value) -> None:
        self.gpu, self.precision, self.lane = gpu, precision, lane
        self.row, self.apart, self.t = sums_of(gpu, precision, lane)

    @abstractmethod
    def multiply(self, acc: Sequence[Value], a: Words, b: Words) -> list[Value]:
        """acc + a * b, of as many sums as there are columns of b."""

    @abstractmethod
    def factor(self, sums: Words) -> Words:
        """Sums of a product's rows r, packed as they are stored, as the `a` of another product, over what were columns
        in the first: [r][word], of as many columns as STEP bytes hold."""

    @abstractmethod
    def factor_columns(self, count: int) -> list[Value]:
        """Which of those columns the words of its `b` are to be of, `count` in all: element after element."""


class _ByWarp(Fragments):
    sharing = 1, 2

    def __init__(self, gpu: Gpu, precision: str, lane: Value) -> None:
        super().__init__(gpu, precision, lane)
        self.rows = self.columns = self.row, self.row + self.apart
        self.bytes = self.t * WORD, self.t * WORD + STEP // 2

    def multiply(self, acc: Sequence[Value], a: Words, b: Words) -> list[Value]:
        words, result = [a[0][0], a[1][0], a[0][1], a[1][1]], []
        for n, column in enumerate(b):
            result += multiply(self.gpu, self.precision, acc[4 * n:4 * n + 4], words, column)
        return result

    def factor(self, sums: Words) -> Words:
        return sums

    def factor_columns(self, count: int) -> list[Value]:
        """Its own: no sum minds their order."""
        return [self.t * 2 + (i // 2 * COUTS + i % 2) for i in range(count // 4)]


class _ByQuads(Fragments):
    """The sums of a row are those of four lanes, whose numbers differ in bits 1 and 3; bit 1 also says which of two
    rows a lane brings."""
    sharing = 2, 8

    def __init__(self, gpu: Gpu, precision: str, lane: Value) -> None:
        super().__init__(gpu, precision, lane)
        row, column = quad_rows(lane)
        self.rows, self.columns = (row,), (column,)
        self.bytes = [lane.like(at) for at in range(0, STEP, WORD)]

    def multiply(self, acc: Sequence[Value], a: Words, b: Words) -> list[Value]:
        (row,), (column,), result = a, b, list(acc)
        for k in range(0, len(row), 2):
            result = multiply_quads(result, row[k:k + 2], column[k:k + 2])
        return result

    def factor(self, sums: Words) -> Words:
        """The lane that has the other two of four columns brings the other row: each gives what the other needs."""
        f, second = self.lane.f, (self.lane & 2).compare("ne", 0)
        row = []
        for of_first, of_second in zip(*sums, strict=True):
            mine = f.select(second, of_second, of_first, "mine")
            theirs = across(f.select(second, of_first, of_second, "theirs"), 2)
            row += [f.select(second, theirs, mine, "low"), f.select(second, mine, theirs, "high")]
        return [[*row, *(across(word, 8) for word in row)]]

    def factor_columns(self, count: int) -> list[Value]:
        """Four of each n; then the four that the other lanes had."""
        first = self.lane.binary("lshr", 1) & 4
        return [part + (n * COUTS + i) for part in (first, first ^ 4) for n in range(count // COUTS)
                for i in range(4)]


def fragments(gpu: Gpu, precision: str, lane: Value) -> Fragments:
    return (_ByQuads if gpu.by_quads(precision) else _ByWarp)(gpu, precision, lane)
