import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.movement import Permute
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array, run
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import EVERY_WIDTH, WIDTHS, by_name, rotated

BATCH = 2


def permuted(view, axes):
    """Return the view with its axes permuted, as a transpose reads it."""
    return View(view.dtype, tuple(view.shape[a] for a in axes), tuple(view.strides[a] for a in axes), view.item)


def data(view):
    return [random_array(np.random.default_rng(0), view.dtype, (BATCH, *view.shape))]


def quantise():
    b = ProgramBuilder(False)
    b.add("fma", b.operand(), 40.0, 128.0)
    return b.program(), {"program": b.constants}


@EVERY_WIDTH
@pytest.mark.parametrize("channels, shape", [(3, (5, 37)), (2, (9, 8)), (4, (3, 17)), (3, (1, 3)), (3, (60, 70))])
@pytest.mark.parametrize("halo", [0, 2])
def test_a_float_image_becomes_u8_pixels(channels, shape, halo, runner):
    program, constants = quantise()
    x = permuted(dense_view("float32", (channels, *shape)), (1, 2, 0))
    spec = Permute(x, gapped("uint8", (*shape, channels), halo), program)
    assert kernel_of(spec).way == "planes"
    check(spec, runner, data(x), constants, pieces=2)


TRANSPOSED = {str(shape): shape for shape in (
    (3, 5, 7), (2, 4, 29), (24, 3, 11), (33, 4, 5), (1, 5, 5), (116, 1, 1))}


@rotated("shape, runner, dtype", TRANSPOSED, by_name(WIDTHS),
         {dtype: dtype for dtype in ("uint8", "float32", "float16", "int64")})
def test_channels_first_and_last_are_transposes(dtype, shape, runner):
    first = dense_view(dtype, shape)
    last = dense_view(dtype, (*shape[1:], shape[0]))
    to_last, to_first = Permute(permuted(first, (1, 2, 0)), last), Permute(permuted(last, (2, 0, 1)), first)
    for spec in (to_last, to_first):
        check(spec, runner, data(spec.x), {}, pieces=2)


@EVERY_WIDTH
@pytest.mark.parametrize("source, target, channels", [
    ("float32", "uint8", 5), ("uint8", "float32", 33), ("bfloat16", "float32", 16)])
def test_a_program_runs_on_the_way_through_a_transpose(source, target, channels, runner):
    program, constants = quantise()
    first, last = dense_view(source, (channels, 3, 7)), gapped(target, (3, 7, channels))
    for uniform in (False, True):
        spec = Permute(permuted(first, (1, 2, 0)), last, program, uniform)
        assert kernel_of(spec).way == "transpose"
        check(spec, runner, data(spec.x), constants)
    b = ProgramBuilder(False)
    b.add("mul", b.operand(), b.constant(np.arange(channels) + 1))
    check(Permute(permuted(first, (1, 2, 0)), last, b.program()), runner, data(spec.x), {"program": b.constants})


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool", "int64"])
def test_a_slice_is_copied_in_runs(dtype, runner):
    view = gapped(dtype, (5, 7, 100))
    spec = Permute(view, dense_view(dtype, (5, 7, 100)))
    assert kernel_of(spec).way == "runs"
    check(spec, runner, data(view), {}, pieces=3)


@EVERY_WIDTH
def test_a_long_run_is_cut_in_blocks(runner):
    view = dense_view("uint8", (30_007,))
    check(Permute(view, view), runner, data(view), {}, pieces=2)


@EVERY_WIDTH
def test_channels_are_shuffled_between_groups(runner):
    x = dense_view("uint8", (4, 5, 2, 29))
    spec = Permute(permuted(x, (0, 1, 3, 2)), dense_view("uint8", (4, 5, 29, 2)))
    assert kernel_of(spec).way == "planes"
    check(spec, runner, data(spec.x), {})


@EVERY_WIDTH
@pytest.mark.parametrize("axes", [(3, 2, 1, 0), (2, 0, 3, 1), (1, 0, 2, 3), (0, 3, 1, 2)])
def test_any_permutation_of_four_axes(axes, runner):
    x = permuted(dense_view("float32", (3, 4, 5, 6)), axes)
    check(Permute(x, dense_view("float32", x.shape)), runner, data(x), {}, pieces=2)


@EVERY_WIDTH
def test_neither_side_contiguous_is_copied_by_elements(runner):
    x = View("uint8", (3, 5), (20, 3), 60)
    spec = Permute(x, View("uint8", (3, 5), (30, 2), 90))
    assert kernel_of(spec).way == "elements"
    check(spec, runner, data(x), {})


def test_a_wrong_order_of_axes_is_caught():
    x = permuted(dense_view("float32", (6, 6)), (1, 0))
    spec = Permute(x, dense_view("float32", (6, 6)))
    result, = run(spec, CpuRunner(PORTABLE), data(x), {})
    assert (result != data(x)[0].transpose(0, 2, 1)).any()
