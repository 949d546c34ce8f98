import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.images import Resize, taps_of
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import EVERY_WIDTH

BATCH = 2
PLAIN = EpilogueProgram((), 0, 0)


def nearest(outputs, inputs):
    index = (np.arange(outputs) * inputs // outputs)[:, None]
    return index, np.ones(index.shape, np.float32)


def linear(outputs, inputs):
    """Return taps and weights of linear interpolation with half-pixel centres, clamped to the edge."""
    places = np.clip((np.arange(outputs) + 0.5) * inputs / outputs - 0.5, 0, inputs - 1)
    matrix = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(inputs))).astype(np.float32)
    return taps_of(matrix)


def data(spec):
    random = np.random.default_rng(0)
    return [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]


@EVERY_WIDTH
@pytest.mark.parametrize("channels", [1, 3, 33, 116])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_nearest_copies_its_neighbour(dtype, channels, runner):
    spec = Resize(gapped(dtype, (3, 4, channels)), gapped(dtype, (6, 5, channels)), (), PLAIN)
    tables = {"rows": nearest(6, 3), "columns": nearest(5, 4)}
    check(spec, runner, data(spec), {**tables, "program": []}, pieces=2)
    rows, columns = (tables[key][0][:, 0] for key in ("rows", "columns"))
    expected, = spec.reference(data(spec), {**tables, "program": []})
    np.testing.assert_array_equal(expected, data(spec)[0][:, rows][:, :, columns])


@EVERY_WIDTH
@pytest.mark.parametrize("channels", [3, 24, 80])
@pytest.mark.parametrize("source, target", [("uint8", "uint8"), ("float32", "float32"), ("uint8", "float32")])
def test_linear_blends_two_by_two(source, target, channels, runner):
    program, constants = requantise(channels, np.random.default_rng(0), residual=True)
    constants |= {"rows": linear(7, 3), "columns": linear(4, 8)}
    spec = Resize(gapped(source, (3, 8, channels)), gapped(target, (7, 4, channels)),
                  (dense_view(source, (7, 4, channels)),), program, (2, 2))
    check(spec, runner, data(spec), constants, pieces=2)


@EVERY_WIDTH
def test_an_operand_may_be_one_number_for_all_channels(runner):
    program, constants = requantise(80, np.random.default_rng(0), residual=True)
    constants |= {"rows": nearest(6, 3), "columns": nearest(5, 4)}
    one = View("float32", (6, 5, 80), (0, 0, 0), 4)
    spec = Resize(gapped("float32", (3, 4, 80)), gapped("float32", (6, 5, 80)), (one,), program)
    x, numbers = data(spec)
    check(spec, runner, [x, np.broadcast_to(numbers[:, :1, :1, :1], numbers.shape)], constants)


@EVERY_WIDTH
def test_any_number_of_taps(runner):
    random = np.random.default_rng(0)
    rows, columns = (taps_of(random.random(shape).astype(np.float32)) for shape in ((4, 3), (3, 4)))
    spec = Resize(dense_view("float32", (3, 4, 20)), dense_view("float32", (4, 3, 20)), (), PLAIN, (3, 4))
    check(spec, runner, data(spec), {"rows": rows, "columns": columns, "program": []})


def test_taps_are_the_weights_that_are_not_zero():
    matrix = np.float32([[0, 0, 1, 0], [0.25, 0, 0.75, 0], [0, 0, 0, 1]])
    index, weight = taps_of(matrix)
    assert index.shape == (3, 2) and index[1].tolist() == [0, 2]
    rebuilt = np.zeros_like(matrix)
    np.add.at(rebuilt, (np.arange(3)[:, None], index), weight)
    np.testing.assert_array_equal(rebuilt, matrix)


def test_a_wrong_table_is_caught():
    b = ProgramBuilder(True)
    spec = Resize(dense_view("uint8", (4, 4, 8)), dense_view("uint8", (4, 4, 8)), (), b.program())
    right = {"rows": nearest(4, 4), "columns": nearest(4, 4), "program": []}
    wrong = {**right, "rows": (right["rows"][0][::-1], right["rows"][1])}
    got, = run(spec, CpuRunner(PORTABLE), data(spec), wrong)
    assert (got != spec.reference(data(spec), right)[0]).any()
