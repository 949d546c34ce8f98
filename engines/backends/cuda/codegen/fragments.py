"""Fragments of mma products whose factors may lie anywhere: elements that a lane loads, and sums that it holds.

A product is 16 rows by 16 columns by STEP bytes of K (products.py). A lane reads words of four bytes:

    a[row of `rows`][byte of `bytes`]           row in 0..15, byte in 0..STEP-1
    b[column of `columns`][byte of `bytes`]
    sums[4 n + 2 r + c]                         row `row` + r * `apart`, column 8 n + 2 t + c

With m8n8k4 ("quads") a lane loads whole rows, otherwise halves of two rows.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import shuffle_xor
from infer_server.engines.backends.cuda.codegen.products import STEP, multiply, multiply_quads, quad_rows, sums_of
from infer_server.engines.codegen.ir_builder import Value

TILE, COUTS = 16, 8             # rows and columns of a product; columns per n
WORD = 4                        # bytes

Words = Sequence[Sequence[Value]]


class Fragments(ABC):
    """Fragments of one lane.

    `sharing` are the bits of the lane's number that differ among the lanes of a row's sums.
    """
    rows: Sequence[Value]
    columns: Sequence[Value]
    bytes: Sequence[Value]
    sharing: tuple[int, int]

    def __init__(self, gpu: Gpu, precision: str, lane: Value) -> None:
        self.gpu, self.precision, self.lane = gpu, precision, lane
        self.row, self.apart, self.t = sums_of(gpu, precision, lane)

    @abstractmethod
    def multiply(self, acc: Sequence[Value], a: Words, b: Words) -> list[Value]:
        """Return acc + a * b, with as many sums as b has columns."""

    @abstractmethod
    def factor(self, sums: Words) -> Words:
        """Rearrange packed sums into the `a` fragment of a second product, as in P = QK^T, then PV.

        `sums` is [r][word], with as many columns as STEP bytes hold. The columns become K of the second product.
        """

    @abstractmethod
    def factor_columns(self, count: int) -> list[Value]:
        """Return the columns of `factor`'s fragment, `count` in all, in the order that `b`'s words need."""


class _WarpFragments(Fragments):
    """Fragments of mma.m16n8, where four lanes share a row."""
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
        """Return the lane's own columns: the order of K does not change a sum."""
        return [self.t * 2 + (i // 2 * COUTS + i % 2) for i in range(count // 4)]


class _QuadFragments(Fragments):
    """Fragments of mma.m8n8k4.

    The sums of a row belong to four lanes, whose numbers differ in bits 1 and 3. Bit 1 also selects which of two rows a
    lane loads.
    """
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
        """Exchange halves of two rows between pairs of lanes, so that each lane holds one whole row."""
        f, second = self.lane.f, (self.lane & 2).compare("ne", 0)
        row = []
        for of_first, of_second in zip(*sums, strict=True):
            mine = f.select(second, of_second, of_first, "mine")
            theirs = shuffle_xor(f.select(second, of_first, of_second, "theirs"), 2)
            row += [f.select(second, theirs, mine, "low"), f.select(second, mine, theirs, "high")]
        return [[*row, *(shuffle_xor(word, 8) for word in row)]]

    def factor_columns(self, count: int) -> list[Value]:
        """Return four columns of each n, then the four that the other lanes held."""
        first = self.lane.binary("lshr", 1) & 4
        return [part + (n * COUTS + i) for part in (first, first ^ 4) for n in range(count // COUTS)
                for i in range(4)]


def fragments(gpu: Gpu, precision: str, lane: Value) -> Fragments:
    """Return the fragments for a precision on a GPU."""
    return (_QuadFragments if gpu.by_quads(precision) else _WarpFragments)(gpu, precision, lane)
