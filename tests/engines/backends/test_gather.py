import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.lowering.problems.movement import GatherElements, Lookup, Take
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array, run
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import EVERY_WIDTH

BATCH = 2


def data(view):
    return random_array(np.random.default_rng(0), view.dtype, (BATCH, *view.shape))


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_constant_index_picks_along_any_axis(axis, dtype, runner):
    x = dense_view(dtype, (4, 5, 7))
    index = [2, 0, -1, 2, 1, 3]
    shape = (*x.shape[:axis], len(index), *x.shape[axis + 1:])
    check(Take(x, dense_view(dtype, shape), axis), runner, [data(x)], {"index": index}, pieces=2)


@EVERY_WIDTH
def test_channels_are_put_in_another_order(runner):
    view = gapped("uint8", (3, 4, 116))
    order = np.random.default_rng(0).permutation(116)
    check(Take(view, view, 2), runner, [data(view)], {"index": order})


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("width", [3, 500])
def test_rows_of_a_table_are_looked_up(width, dtype, runner):
    table = np.random.default_rng(0).standard_normal((11, width)).astype(np.float32)
    index = np.random.default_rng(1).integers(-11, 11, (BATCH, 3, 4)).astype(dtype)
    spec = Lookup(dense_view(dtype, (3, 4)), gapped("float32", (3, 4, width)), 11)
    check(spec, runner, [index], {"table": table}, pieces=2)
    np.testing.assert_array_equal(spec.reference([index], {"table": table})[0], table[index])


def test_no_index_reads_beside_the_table():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    spec = Lookup(dense_view("int64", (4,)), dense_view("float32", (4, 3)), 4)
    index = np.array([[4, 1 << 60, -5, -(1 << 62)]])
    got, = run(spec, CpuRunner(PORTABLE), [index], {"table": table})
    np.testing.assert_array_equal(got, np.broadcast_to(table[3], (1, 4, 3)))


def test_a_wrong_index_is_caught():
    view = dense_view("uint8", (6,))
    got, = run(Take(view, view, 0), CpuRunner(PORTABLE), [data(view)], {"index": [5, 4, 3, 2, 1, 0]})
    assert (got != data(view)).any()


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_are_picked_along_any_axis(axis, dtype, runner):
    x = gapped(dtype, (4, 5, 19))
    shape = (*x.shape[:axis], 21, *x.shape[axis + 1:])
    index = np.random.default_rng(1).integers(-x.shape[axis], x.shape[axis], (BATCH, *shape))
    spec = GatherElements(x, dense_view(dtype, shape), dense_view("int64", shape), axis)
    check(spec, runner, [data(x), index], {}, pieces=2)


@EVERY_WIDTH
def test_places_that_are_alike_for_all_items_and_heads_are_repeated(runner):
    x, y = dense_view("float32", (3, 5, 9)), dense_view("float32", (3, 5, 7))
    places = View("int32", y.shape, (0, 7 * 4, 4), 0)
    index = np.broadcast_to(np.random.default_rng(1).integers(0, 9, (5, 7), np.int32), (BATCH, *y.shape))
    spec = GatherElements(x, y, places, 2)
    check(spec, runner, [data(x), index], {})
    np.testing.assert_array_equal(spec.reference([data(x), index], {})[0], np.take_along_axis(data(x), index, 3))


def test_no_place_reads_beside_the_axis():
    x, y = dense_view("int64", (3, 4)), dense_view("int64", (3, 4))
    index = np.broadcast_to([4, 1 << 60, -5, -(1 << 62)], (BATCH, 3, 4))
    got, = run(GatherElements(x, y, y, 1), CpuRunner(PORTABLE), [data(x), index], {})
    np.testing.assert_array_equal(got, np.broadcast_to(data(x)[..., -1:], (BATCH, 3, 4)))
