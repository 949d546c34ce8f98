"""Grouping of the pixels that one product of a depthwise convolution multiplies.

A lane is a channel; one product takes as many *elements* of it as the arithmetic has: four bytes, two shorts or one
float. The taps of a kernel are divided into groups of that size: rows of x, and for the rows that are left over, as
many neighbouring columns as fit.

    a a a       two elements, 3x3:          a a a a a       four elements, 5x5:
    a a a       a is three steps,           a a a a a       a is five steps,
    b b c       b and c two                 a a a a a       b and c two
                                            a a a a a
                                            b b b b c

Pixels are interleaved once for all outputs that read them, so two neighbouring rows share the groups of which both read
every row.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from infer_server.engines.lowering.problems.convolution import Depthwise

Output = tuple[int, int]        # (row, column) in the tile
Product = tuple[Output, int]    # (output, number of a step)


@dataclass(frozen=True)
class Group:
    """Pixels of one operand: `across` neighbouring tap columns of some rows of x.

    Rows are counted from the first tap of output row 0.
    """
    rows: tuple[int, ...]
    across: int


@dataclass(frozen=True)
class TapStep:
    """One product for an output row: a group from tap column `tap` on."""
    row: int
    group: Group
    tap: int

    def taps(self, problem: Depthwise) -> dict[int, tuple[int, int]]:
        """Return {element: its tap}; elements without a tap have a zero weight."""
        found = {}
        for element, (row, k) in enumerate(product(self.group.rows, range(self.group.across))):
            p, other = divmod(row - self.row * problem.stride[0], problem.dilation[0])
            if not other and 0 <= p < problem.taps[0] and self.tap + k < problem.taps[1]:
                found[element] = p, self.tap + k
        return found


def steps_of(problem: Depthwise, elements: int, rows: int) -> tuple[TapStep, ...]:
    """Return the products of `rows` neighbouring output rows and one output column, in the order of their weights."""
    read = [rows_read(problem, i, i + 1) for i in range(rows)]
    ways = [_of_all_rows(problem, elements, read), _of_common_rows(problem, elements, read)]
    return min((_steps(problem, groups) for groups in ways), key=len)


def products_of(problem: Depthwise, steps: Sequence[TapStep], rows: int,
                cols: int) -> dict[int, dict[Group, list[Product]]]:
    """Return {column of x: {group that begins there: products of a tile of rows x cols outputs that take it}}."""
    found: dict[int, dict[Group, list[Product]]] = {column: {} for column in columns_read(problem, cols)}
    for j, (number, step) in product(range(cols), enumerate(steps)):
        if step.row < rows:
            column = j * problem.stride[1] + step.tap * problem.dilation[1]
            found[column].setdefault(step.group, []).append(((step.row, j), number))
    return found


def last_column(problem: Depthwise, steps: Sequence[TapStep], output: Output) -> int:
    """Return the column of x in which an output's last step begins."""
    return output[1] * problem.stride[1] + max(step.tap for step in steps) * problem.dilation[1]


def rows_read(problem: Depthwise, first: int, last: int) -> set[int]:
    """Return the rows of x that output rows first..last - 1 read, counted from the first tap of row 0."""
    return {i * problem.stride[0] + p * problem.dilation[0] for i in range(first, last) for p in range(problem.taps[0])}


def columns_read(problem: Depthwise, cols: int) -> list[int]:
    """Return the columns of x that `cols` neighbouring output columns read, counted from the first tap of column 0."""
    return sorted({j * problem.stride[1] + q * problem.dilation[1]
                   for j in range(cols) for q in range(problem.taps[1])})


def groups_of(steps: Iterable[TapStep]) -> list[Group]:
    """Return each group once, in the order of their first steps."""
    return list(dict.fromkeys(step.group for step in steps))


def _of_all_rows(problem: Depthwise, elements: int, read: Sequence[set[int]]) -> list[list[Group]]:
    """Group the rows of x that any output row reads; an output row has zero weights for those that it does not read."""
    groups = _groups(problem, elements, sorted(set().union(*read)))
    return [[group for group in groups if not rows.isdisjoint(group.rows)] for rows in read]


def _of_common_rows(problem: Depthwise, elements: int, read: Sequence[set[int]]) -> list[list[Group]]:
    """Group the rows of x that all output rows read, and the remaining ones of each output row separately."""
    common = sorted(set.intersection(*read))
    whole = len(common) // elements * elements
    shared = _groups(problem, elements, common[:whole])
    return [shared + _groups(problem, elements, sorted(rows.difference(common)) + common[whole:]) for rows in read]


def _groups(problem: Depthwise, elements: int, rows: Sequence[int]) -> list[Group]:
    pieces = [tuple(rows[first:first + elements]) for first in range(0, len(rows), elements)]
    return [Group(piece, min(elements // len(piece), problem.taps[1])) for piece in pieces]


def _steps(problem: Depthwise, groups: Sequence[Sequence[Group]]) -> tuple[TapStep, ...]:
    found = [TapStep(row, group, tap) for row, of_row in enumerate(groups) for group in of_row
             for tap in range(0, problem.taps[1], group.across)]
    order = groups_of(found)
    return tuple(sorted(found, key=lambda step: (order.index(step.group), step.row, step.tap)))
