"""Partition of a depthwise window's taps into steps: each tap once, and as few steps as possible."""
from collections import Counter
from itertools import product

import pytest

from infer_server.engines.backends.llvm.kernels.depthwise.steps import (
    groups_of,
    last_column,
    products_of,
    rows_read,
    steps_of,
)
from infer_server.engines.lowering.problems.convolution import Depthwise
from tests.engines.backends.test_depthwise import depthwise

WINDOWS = [((3, 3), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1)), ((5, 5), (1, 1), (1, 1)), ((5, 5), (2, 1), (1, 1)),
           ((7, 7), (1, 1), (1, 1)), ((1, 9), (1, 2), (1, 3)), ((4, 1), (1, 1), (1, 1)), ((3, 2), (3, 1), (2, 2))]


def window(taps, stride=(1, 1), dilation=(1, 1)) -> Depthwise:
    return depthwise(16, taps, stride, dilation)[0]


@pytest.mark.parametrize("taps, stride, dilation", WINDOWS)
@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_each_tap_of_each_output_row_is_multiplied_once(taps, stride, dilation, elements, rows):
    problem = window(taps, stride, dilation)
    steps = steps_of(problem, elements, rows)
    met = Counter((step.row, tap) for step in steps for tap in step.taps(problem).values())
    assert met == Counter(product(range(rows), product(*map(range, taps))))
    assert all(len(group.rows) * group.across <= elements for group in groups_of(steps))


@pytest.mark.parametrize("taps, elements, count", [
    ((3, 3), 2, 5), ((5, 5), 2, 13), ((3, 3), 4, 3), ((5, 5), 4, 7), ((1, 31), 4, 8), ((1, 31), 2, 16),
    ((31, 1), 4, 8)])
def test_rows_that_fill_no_group_are_multiplied_with_their_neighbours_along_the_row(taps, elements, count):
    assert len(steps_of(window(taps), elements, 1)) == count


@pytest.mark.parametrize("taps, stride, elements, groups, count", [
    ((3, 3), 1, 2, [(1, 2), (0,), (3,)], 10),       # output rows share input rows 1 and 2; each reads one more
    ((3, 3), 2, 2, [(0, 1), (2,), (3, 4)], 10),     # output rows share input row 2 only
    ((3, 3), 1, 4, [(0, 1, 2, 3)], 6),              # all four input rows in one group, with zero weights for the unread
    ((5, 5), 1, 4, [(1, 2, 3, 4), (0,), (5,)], 14)])
def test_two_output_rows_share_the_groups_that_both_read(taps, stride, elements, groups, count):
    steps = steps_of(window(taps, (stride, stride)), elements, 2)
    assert [group.rows for group in groups_of(steps)] == groups and len(steps) == count


@pytest.mark.parametrize("taps, stride, dilation", WINDOWS)
@pytest.mark.parametrize("rows, cols", [(1, 5), (2, 3)])
def test_a_tile_has_the_steps_of_its_outputs_each_before_the_output_is_done(taps, stride, dilation, rows, cols):
    problem = window(taps, stride, dilation)
    steps = steps_of(problem, 2, 2)
    found = [(column, output, number) for column, groups in products_of(problem, steps, rows, cols).items()
             for products in groups.values() for output, number in products]
    assert Counter((output, number) for _, output, number in found) == Counter(
        ((step.row, j), number) for number, step in enumerate(steps) if step.row < rows for j in range(cols))
    for output in product(range(rows), range(cols)):
        assert max(column for column, other, _ in found if other == output) == last_column(problem, steps, output)


def test_rows_of_x_count_from_the_first_tap_of_output_row_0():
    assert rows_read(window((3, 3), (2, 2)), 1, 3) == {2, 3, 4, 5, 6}
