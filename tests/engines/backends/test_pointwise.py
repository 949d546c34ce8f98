import math
from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import ALL, PORTABLE
from infer_server.engines.backends.llvm.kernels.common.access import BLOCK
from infer_server.engines.backends.llvm.kernels.elementwise.pointwise import PointwiseKernel
from infer_server.engines.lowering.epilogue.program import (
    INSTRUCTIONS,
    NUMPY,
    EpilogueProgram,
    Instruction,
    ProgramBuilder,
    Ref,
)
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import EVERY_BACKEND

BATCH = 2


def inputs_of(spec):
    """Return random tensors [BATCH, *shape], repeated along axes of stride 0."""
    random = np.random.default_rng(0)
    arrays = []
    for view in spec.sources:
        extents = [n if stride else 1 for n, stride in zip(view.shape, view.strides, strict=True)]
        arrays.append(np.broadcast_to(random_array(random, view.dtype, (BATCH, *extents)), (BATCH, *view.shape)))
    return arrays


@EVERY_BACKEND
@pytest.mark.parametrize("channels", [1, 3, 17, 24, 33, 116])
def test_a_requantised_sum_of_u8_tensors_equals_its_reference(channels, runner):
    program, constants = requantise(channels, np.random.default_rng(0), 0.5, residual=True, accumulator=False)
    shape = (3, 5, channels)
    spec = Pointwise((gapped("uint8", shape), dense_view("uint8", shape)), gapped("uint8", shape), program)
    check(spec, runner, inputs_of(spec), constants, pieces=2)


@EVERY_BACKEND
@pytest.mark.parametrize("source, target", [
    ("uint8", "float32"), ("float32", "uint8"), ("float16", "uint8"), ("bfloat16", "float32"), ("float32", "bfloat16"),
    ("float32", "float16"), ("int32", "float32"), ("int64", "float32"), ("bool", "float32"), ("int8", "uint8"),
    ("float32", "int8"), ("float32", "bool")])
def test_every_stored_dtype_is_read_and_written(source, target, runner):
    b = ProgramBuilder(False)
    b.add("fma", b.operand(), 20.0, 1.25)
    spec = Pointwise((dense_view(source, (2, 37)),), dense_view(target, (2, 37)), b.program(), uniform=True)
    check(spec, runner, inputs_of(spec), {"program": b.constants})


@EVERY_BACKEND
def test_a_dense_tensor_is_one_run_cut_in_blocks(runner):
    b = ProgramBuilder(False)
    b.add("max", b.add("fma", b.operand(), 0.5, 3.0), 10.0)
    view = dense_view("uint8", (3, 41, 2 * BLOCK // 100))
    spec = Pointwise((view,), view, b.program(), uniform=True)
    assert len(kernel_of(spec).runs.shape) == 1 and kernel_of(spec).runs.blocks == 3
    check(spec, runner, inputs_of(spec), {"program": b.constants}, pieces=2)


@EVERY_BACKEND
def test_a_stride_of_zero_broadcasts_on_any_axis(runner):
    b = ProgramBuilder(False)
    b.add("mul", b.add("add", b.operand(), b.operand()), b.operand())
    shape = (3, 4, 37)
    per_pixel = View("float32", shape, (16, 4, 0), 48)
    per_channel = View("float32", shape, (0, 0, 4), 37 * 4)
    spec = Pointwise((dense_view("float32", shape), per_pixel, per_channel), dense_view("float32", shape), b.program())
    check(spec, runner, inputs_of(spec), {"program": b.constants}, pieces=3)


@EVERY_BACKEND
def test_gaps_between_innermost_elements_are_stepped_over(runner):
    b = ProgramBuilder(False)
    b.add("add", b.operand(), 1.5)
    spaced = View("float32", (5, 19), (19 * 12, 12), 5 * 19 * 12)
    dense = dense_view("float32", (5, 19))
    for spec in (Pointwise((spaced,), dense, b.program()), Pointwise((dense,), spaced, b.program())):
        check(spec, runner, inputs_of(spec), {"program": b.constants})


@EVERY_BACKEND
def test_a_scalar_has_a_grid_of_one_row(runner):
    b = ProgramBuilder(False)
    b.add("add", b.operand(), 1.5)
    spec = Pointwise((dense_view("float32", ()),), dense_view("float32", ()), b.program(), uniform=True)
    check(spec, runner, inputs_of(spec), {"program": b.constants})


@EVERY_BACKEND
@pytest.mark.parametrize("op", INSTRUCTIONS)
def test_every_instruction_rounds_as_its_meaning_says(op, runner):
    two = ("add", "sub", "mul", "div", "max", "min", "max_or_nan", "min_or_nan", "less", "less_or_equal", "equal")
    arity = {"fma": 3, "where_positive": 3}.get(op, 2 if op in two else 1)
    instruction = Instruction(op, tuple(Ref("operand", i) for i in range(arity)))
    program = EpilogueProgram((instruction,), arity, 0, accumulator=False)
    view = dense_view("float32", (257,))
    spec = Pointwise((view,) * arity, view, program, uniform=True)
    inputs = [3 * x for x in inputs_of(spec)]
    if op in ("sqrt", "log_of_positive"):
        inputs = [np.abs(x) for x in inputs]
    if op in ("less", "less_or_equal", "equal"):
        inputs = [np.rint(x) for x in inputs]       # so that some elements are equal
    for place, x in enumerate(inputs):
        x[:, 7 * place + 1] = np.nan
    check(spec, runner, inputs, {"program": []})


@EVERY_BACKEND
@pytest.mark.parametrize("op, x, expected", [
    ("log", [0, -0.0, np.inf, -1, -np.inf, 1], [-np.inf, -np.inf, np.inf, np.nan, np.nan, 0]),
    ("exp", [0, -1e30, np.inf, 88.73, -np.inf, np.nan], [1, 0, np.inf, np.inf, 0, np.nan])])
def test_logarithms_and_exponentials_have_their_ends(op, x, expected, runner):
    """Masks are made by log 0; a negative number has no logarithm."""
    program = EpilogueProgram((Instruction(op, (Ref("operand", 0),)),), 1, 0, accumulator=False)
    view, x = dense_view("float32", (6,)), np.float32([x])
    np.testing.assert_array_equal(program.meaning(None, [x], []), np.float32([expected]))
    check(Pointwise((view,), view, program, uniform=True), runner, [x], {"program": []})


def test_an_exponential_is_as_accurate_as_it_says():
    x = np.linspace(-86, 88.7, 40001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(INSTRUCTIONS["exp"](NUMPY, x) - exact) / exact).max() < 4e-7


def test_a_logarithm_of_one_and_little_is_as_accurate_as_it_says():
    x = np.concatenate([np.linspace(0, 1, 40001)[1:], 0.5 ** np.arange(126)]).astype(np.float32)
    exact = np.log1p(x.astype(np.float64))
    assert (np.abs(INSTRUCTIONS["log1p"](NUMPY, x) - exact) / exact).max() < 2e-7
    assert INSTRUCTIONS["log1p"](NUMPY, np.float32([0])) == 0


def test_gelu_is_as_accurate_as_it_says():
    x = np.linspace(-40, 40, 40001).astype(np.float32)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)])
    error = np.abs(INSTRUCTIONS["gelu"](NUMPY, x) - exact)
    assert error[np.abs(x) <= 5].max() < 2.2e-6
    assert (error / np.abs(x).clip(5))[np.abs(x) > 5].max() < 3.4e-7


def test_the_exponential_of_negative_numbers_is_that_of_moderate_ones():
    x = np.float32([*np.linspace(-120, 0, 100_001), -np.inf, -0.0, np.nan])
    moderate, negative = (INSTRUCTIONS[f"exp_of_{word}"](NUMPY, x) for word in ("moderate", "negative"))
    np.testing.assert_array_equal(negative, moderate)
    np.testing.assert_allclose(negative[:60_000], np.exp(np.float64(np.maximum(x[:60_000], -87.3))), 2e-7)


EXACT = {"gelu_u8": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)), "silu_u8": lambda x: x / (1 + math.exp(-x)),
         "gelu_tanh_u8": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))}


@pytest.mark.parametrize("op, largest", [("gelu_u8", 1 / 16), ("gelu_tanh_u8", 1 / 16), ("silu_u8", 1 / 10)])
def test_what_is_stored_in_a_byte_is_as_fine_as_a_byte_shows(op, largest):
    """Errors are in units of a byte whose range ends at x, or at 1/2 if x is less."""
    x = np.linspace(-40, 40, 40001).astype(np.float32)
    error = np.abs(INSTRUCTIONS[op](NUMPY, x) - np.array([EXACT[op](v) for v in x.astype(np.float64)]))
    assert (error / np.abs(x).clip(0.5) * 255).max() < largest


@pytest.mark.parametrize("op, exact", [("sin", np.sin), ("cos", np.cos)])
def test_sine_and_cosine_are_as_accurate_as_they_say(op, exact):
    x = np.concatenate([np.linspace(-40, 40, 40001), np.linspace(-2**16, 2**16, 400001)]).astype(np.float32)
    assert np.abs(INSTRUCTIONS[op](NUMPY, x) - exact(x.astype(np.float64))).max() < 2e-7


@pytest.mark.parametrize("op, exact, bounds", [("atan", np.arctan, 30), ("asin", np.arcsin, 1), ("acos", np.arccos, 1)])
def test_arcs_are_as_accurate_as_they_say_and_of_all_numbers(op, exact, bounds):
    x = np.concatenate([np.linspace(-bounds, bounds, 100001), np.linspace(-0.01, 0.01, 10001), [math.inf, -math.inf, 2,
                        -2, math.nan, 3e38, 1e-40]]).astype(np.float32)
    with np.errstate(all="ignore"):
        found, wanted = INSTRUCTIONS[op](NUMPY, x), exact(x.astype(np.float64))
    np.testing.assert_allclose(found, wanted, 4e-7, 4e-7 if op == "acos" else 0)


@EVERY_BACKEND
def test_quantising_saturates_whatever_the_size_of_the_number(runner):
    b = ProgramBuilder(False)
    b.operand()
    x = np.array([[-np.inf, -3e12, -0.5, 0.5, 1.5, 254.5, 255.5, 3e12, np.inf]], np.float32)
    spec = Pointwise((dense_view("float32", (9,)),), dense_view("uint8", (9,)), b.program(), uniform=True)
    result, = run(spec, runner, [x], {"program": []})
    assert result.tolist() == [[0, 0, 0, 0, 2, 254, 255, 255, 255]]


def test_a_wrong_constant_is_caught():
    b = ProgramBuilder(False)
    b.add("add", b.operand(), 1.5)
    view = dense_view("float32", (9,))
    spec = Pointwise((view,), view, b.program(), uniform=True)
    with pytest.raises(AssertionError):
        expected = spec.reference(inputs_of(spec), {"program": [np.float32([1.25])]})
        np.testing.assert_array_equal(run(spec, CpuRunner(ALL[0]), inputs_of(spec), {"program": b.constants}), expected)


@pytest.mark.parametrize(("narrow", "message"), [(0, "read outside"), (1, "write outside")])
def test_a_window_that_is_too_narrow_is_caught(narrow, message):
    view = gapped("uint8", (4, 30, 8))

    class Narrow(PointwiseKernel):
        def windows(self, isa, tactic):
            windows = super().windows(isa, tactic)
            windows[narrow] = replace(windows[narrow], end=windows[narrow].end - 1)
            return windows

    b = ProgramBuilder(False)
    b.operand()
    kernel = Narrow(Pointwise((view,), view, b.program(), uniform=True))
    x = np.random.default_rng(0).integers(0, 256, (2, *view.shape)).astype(np.uint8)
    with pytest.raises(AssertionError, match=message):
        check(kernel, CpuRunner(PORTABLE), [x], {"program": []})


def test_writing_past_the_output_is_caught():
    view = dense_view("uint8", (9,))

    class Overrun(PointwiseKernel):
        def emit(self, module, name, isa, tactic):
            longer = dense_view("uint8", (12,))
            problem = Pointwise((longer,), longer, self.problem.program, True)
            PointwiseKernel(problem).emit(module, name, isa, tactic)

    b = ProgramBuilder(False)
    b.operand()
    spec = Pointwise((view,), view, b.program(), uniform=True)
    with pytest.raises(AssertionError, match="write outside"):
        run(Overrun(spec), CpuRunner(PORTABLE), inputs_of(spec), {"program": []}, slack=8)
