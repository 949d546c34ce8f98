import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.images import GlobalPool
from infer_server.engines.lowering.problems.view import dense_view
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import EVERY_WIDTH

BATCH = 3


def data(spec):
    random = np.random.default_rng(0)
    return [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]


@EVERY_WIDTH
@pytest.mark.parametrize("channels", [1, 3, 24, 33, 116, 200])
@pytest.mark.parametrize("source", ["uint8", "float32"])
@pytest.mark.parametrize("target", ["uint8", "float32"])
def test_a_mean_over_all_pixels(channels, source, target, runner):
    program, constants = requantise(channels, np.random.default_rng(0), 1 / 35, residual=True)
    y = dense_view(target, (1, 1, channels))
    spec = GlobalPool(gapped(source, (5, 7, channels)), y, (y,), program, "sum")
    check(spec, runner, data(spec), constants, pieces=2)


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
@pytest.mark.parametrize("shape", [(4, 3, 50), (9, 17), (17,)])
def test_a_maximum_over_any_axes(shape, dtype, runner):
    spec = GlobalPool(dense_view(dtype, shape), dense_view(dtype, shape[-1:]), (), EpilogueProgram((), 0, 0), "max")
    check(spec, runner, data(spec), {"program": []}, pieces=2)


def test_a_wrong_divisor_is_caught():
    b, wrong = ProgramBuilder(True), ProgramBuilder(True)
    b.add("mul", b.accumulator, 1 / 12)
    wrong.add("mul", wrong.accumulator, 1 / 13)
    spec = GlobalPool(dense_view("uint8", (3, 4, 5)), dense_view("float32", (1, 1, 5)), (), b.program(), "sum")
    got, = run(spec, CpuRunner(PORTABLE), data(spec), {"program": wrong.constants})
    assert (got != spec.reference(data(spec), {"program": b.constants})[0]).all()


@EVERY_WIDTH
def test_a_long_sum_of_floats_rounds_no_more_than_its_runs(runner):
    """A sequential sum of so many floats would be off by a thousandth."""
    pixels = (1 << 17) + 77
    spec = GlobalPool(dense_view("float32", (pixels, 8)), dense_view("float32", (8,)), (), EpilogueProgram((), 0, 0),
                      "sum")
    got, = run(spec, runner, [np.full((1, pixels, 8), 0.1, np.float32)], {"program": []})
    np.testing.assert_allclose(got, pixels * np.float64(np.float32(0.1)), 1e-5)
