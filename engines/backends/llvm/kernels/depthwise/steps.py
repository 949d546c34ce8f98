"""Which pixels of x a depthwise convolution multiplies at once.

A lane is a channel; one product takes as many *elements* of it as the arithmetic has: four bytes, two shorts or one
float. The taps of a window are cut into groups that fill them: some rows of x, and of the rows that are left over as
many neighbouring columns as there is room for.

    a a a       two elements, 3x3:          a a a a a       four elements, 5x5:
    a a a       a is three steps,           a a a a a       a is five steps,
    b b c       b and c two                 a a a a a       b and c two
                                            a a a a a
                                            b b b b c

What an output row reads is interleaved once for all outputs that read it, so two neighbouring rows share the groups of
which both read every row.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from engines.lowering.problems.convolution import Depthwise

Output = tuple[int, int]        # of a tile: row and column
Product = tuple[Output, int]    # ... and the number of a step


@dataclass(frozen=True)
class Group:
    """`across` neighbouring tap columns of these rows of x, which count from the first tap of output row 0 on."""
    rows: tuple[int, ...]
    across: int


@dataclass(frozen=True)
class Step:
    """One product into the sums of an output row: of a group, from this tap column on."""
    row: int
    group: Group
    tap: int

    def taps(self, problem: Depthwise) -> dict[int, tuple[int, int]]:
        """Element -> the tap that meets it; those without meet a zero weight."""
        found = {}
        for element, (row, k) in enumerate(product(self.group.rows, range(self.group.across))):
            p, other = divmod(row - self.row * problem.stride[0], problem.dilation[0])
            if not other and 0 <= p < problem.taps[0] and self.tap + k < problem.taps[1]:
                found[element] = p, self.tap + k
        return found


def steps_of(problem: Depthwise, elements: int, rows: int) -> tuple[Step, ...]:
    """The products of `rows` neighbouring output rows and one output column, in the order of their weights."""
    read = [rows_read(problem, i, i + 1) for i in range(rows)]
    ways = [_of_all_rows(problem, elements, read), _of_common_rows(problem, elements, read)]
    return min((_steps(problem, groups) for groups in ways), key=len)


def products_of(problem: Depthwise, steps: Sequence[Step], rows: int,
                cols: int) -> dict[int, dict[Group, list[Product]]]:
    """Column of x -> group that begins there -> the products of a tile of rows x cols outputs that take it."""
    found: dict[int, dict[Group, list[Product]]] = {column: {} for column in columns_read(problem, cols)}
    for j, (number, step) in product(range(cols), enumerate(steps)):
        if step.row < rows:
            column = j * problem.stride[1] + step.tap * problem.dilation[1]
            found[column].setdefault(step.group, []).append(((step.row, j), number))
    return found


def last_column(problem: Depthwise, steps: Sequence[Step], output: Output) -> int:
    """The column of x in which an output's last step begins."""
    return output[1] * problem.stride[1] + max(step.tap for step in steps) * problem.dilation[1]


def rows_read(problem: Depthwise, first: int, last: int) -> set[int]:
    """The rows of x that output rows first..last - 1 read, from the first tap of row 0 on."""
    return {i * problem.stride[0] + p * problem.dilation[0] for i in range(first, last) for p in range(problem.taps[0])}


def columns_read(problem: Depthwise, cols: int) -> list[int]:
    """The columns of x that `cols` neighbouring output columns read, from the first tap of column 0 on."""
    return sorted({j * problem.stride[1] + q * problem.dilation[1]
                   for j in range(cols) for q in range(problem.taps[1])})


def groups_of(steps: Iterable[Step]) -> list[Group]:
    """Each once, in the order of their first steps."""
    return list(dict.fromkeys(step.group for step in steps))


def _of_all_rows(problem: Depthwise, elements: int, read: Sequence[set[int]]) -> list[list[Group]]:
    """For each output row the groups that it meets, of all rows of x: with zero weights for those it does not read."""
    groups = _groups(problem, elements, sorted(set().union(*read)))
    return [[group for group in groups if not rows.isdisjoint(group.rows)] for rows in read]


def _of_common_rows(problem: Depthwise, elements: int, read: Sequence[set[int]]) -> list[list[Group]]:
    """Whole groups of rows that every output row reads, and what is left of each by itself, its own rows first."""
    common = sorted(set.intersection(*read))
    whole = len(common) // elements * elements
    shared = _groups(problem, elements, common[:whole])
    return [shared + _groups(problem, elements, sorted(rows.difference(common)) + common[whole:]) for rows in read]


def _groups(problem: Depthwise, elements: int, rows: Sequence[int]) -> list[Group]:
    pieces = [tuple(rows[first:first + elements]) for first in range(0, len(rows), elements)]
    return [Group(piece, min(elements // len(piece), problem.taps[1])) for piece in pieces]


def _steps(problem: Depthwise, groups: Sequence[Sequence[Group]]) -> tuple[Step, ...]:
    found = [Step(row, group, tap) for row, of_row in enumerate(groups) for group in of_row
             for tap in range(0, problem.taps[1], group.across)]
    order = groups_of(found)
    return tuple(sorted(found, key=lambda step: (order.index(step.group), step.row, step.tap)))
