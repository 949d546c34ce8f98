"""Softmax, norms and reductions: bit for bit as their references on every machine; the references against float64."""
import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_VNNI, PORTABLE
from infer_server.engines.backends.llvm.kernels.rows import kernels
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.rows import Extreme, Lrn, Norm, Reduce, ScaledNorm, ScaledRows, Softmax
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.runner import CpuRunner, DynamicRunner, kernel_of
from tests.engines.backends.runners import EVERY_WIDTH

BATCH = 2
FAMILIES = {
    "softmax": lambda *a, **k: Softmax(*a, **k),
    "log softmax": lambda *a, **k: Softmax(*a, **k, log=True),
    "layer norm": lambda *a, **k: Norm(*a, **k),
    "rms norm": lambda *a, **k: Norm(*a, **k, kind="rms"),
    "l2 norm": lambda *a, **k: Norm(*a, **k, kind="l2"),
    "lrn": lambda *a, **k: Lrn(*a, **k, alpha=0.3),
    "lrn of an even window": lambda *a, **k: Lrn(*a, **k, size=4, alpha=0.3, beta=0.5, bias=2.0),
    "lrn by logarithms": lambda *a, **k: Lrn(*a, **k, alpha=0.3, beta=0.6),
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def data(spec, spread=3):
    random = np.random.default_rng(0)
    arrays = [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]
    return [spread * x if x.dtype == np.float32 else x for x in arrays]


def dequantise():
    b = ProgramBuilder(False)
    b.add("fma", b.operand(), 0.05, -6.4)
    return b.program(), b.constants


@EVERY_WIDTH
@EVERY_FAMILY
@pytest.mark.parametrize("width", [1, 7, 24, 65, 197])
def test_a_row_program_equals_its_reference(family, width, runner):
    view = gapped("float32", (3, 2, width))
    spec = family((view,), view)
    check(spec, runner, data(spec), {}, pieces=2)


@EVERY_FAMILY
def test_a_row_is_read_at_most_the_slack_past_its_end_if_its_width_is_dynamic(family):
    view = dense_view("float32", (2, 65))
    spec = family((view,), view)
    check(spec, DynamicRunner(AVX512_VNNI), data(spec), {}, pieces=2)


@EVERY_WIDTH
@EVERY_FAMILY
@pytest.mark.parametrize("width", [15, 37])
def test_rows_of_u8_are_dequantised_before_and_quantised_after(width, family, runner):
    prologue, before = dequantise()
    program, constants = requantise(width, np.random.default_rng(0), 30, residual=True)
    x = gapped("uint8", (5, width))
    spec = family((x,), x, (dense_view("uint8", (5, width)),), prologue, program)
    check(spec, runner, data(spec), {"prologue": before, **constants})


@EVERY_WIDTH
@pytest.mark.parametrize("width", [7, 65])
def test_a_program_may_read_one_number_for_each_row(width, runner):
    b = ProgramBuilder(True)
    b.add("fma", b.accumulator, b.operand(), b.operand())
    view, of_row = gapped("float32", (3, 5, width)), View("float32", (3, 5, width), (20, 4, 0), 60)
    spec = Norm((view,), view, (of_row, of_row), program=b.program())
    x, *_ = data(spec)
    numbers = [np.broadcast_to(random_array(np.random.default_rng(i), "float32", (BATCH, 3, 5, 1)), x.shape)
               for i in (1, 2)]
    check(spec, runner, [x, *numbers], {"program": b.constants}, pieces=2)


def scaled(x, dtype="uint8"):
    """Return the problem of scaled rows, as bytes with zero point 128 or as floats."""
    return ScaledRows((x,), dense_view(dtype, x.shape), scales=dense_view("float32", (*x.shape[:-1], 1)))


@EVERY_WIDTH
@pytest.mark.parametrize("width", [1, 7, 64, 65, 384])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_scaled_rows_and_their_scales_equal_the_reference(dtype, width, runner):
    spec = scaled(gapped("float32", (3, 2, width)), dtype)
    (x,) = data(spec)
    x[0] *= 1e-3 * np.arange(1, 4, dtype=np.float32)[:, None, None]
    x[1, 0] = 0         # rows of zeros
    x[1, 1] = 1e-44     # the least scale
    check(spec, runner, [x], {}, pieces=2)
    y, scales = run(spec, runner, [x], {})
    largest = np.abs(x).max(-1, keepdims=True)
    np.testing.assert_allclose(scales, np.maximum(largest / 127, np.finfo(np.float32).tiny), rtol=1e-6)
    real = (y.astype(np.float64) - (128 if dtype == "uint8" else 0)) * scales
    assert (np.abs(real - x) <= 0.5001 * scales).all()
    assert (y[1, 0] == (128 if dtype == "uint8" else 0)).all()


@EVERY_WIDTH
@pytest.mark.parametrize("width", [7, 65])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_also_writes_its_rows_scaled(kind, width, runner):
    b = ProgramBuilder(True)
    b.add("fma", b.accumulator, b.constant(np.linspace(0.1, 3, width)), 0.25)
    view = gapped("float32", (3, 2, width))
    spec = ScaledNorm((view,), view, program=b.program(), kind=kind, numbers=dense_view("uint8", (3, 2, width)),
                      scales=dense_view("float32", (3, 2, 1)))
    check(spec, runner, data(spec), {"program": b.constants}, pieces=2)


@EVERY_WIDTH
@pytest.mark.parametrize("width", [1, 7, 65])
@pytest.mark.parametrize("column", [0, -1])
def test_a_row_that_is_not_finite_has_a_scale_that_is_not(column, width, runner):
    spec = scaled(dense_view("float32", (3, width)))
    (x,) = data(spec)
    x[0, 0, column], x[0, 1, column], x[1, 2, column] = np.nan, np.inf, -np.inf
    _, scales = run(spec, runner, [x], {})
    np.testing.assert_array_equal(np.isnan(scales[0, 0]), True)
    np.testing.assert_array_equal(scales[[0, 1], [1, 2]], np.inf)
    assert np.isfinite(scales[[0, 1, 1], [2, 0, 1]]).all()


@EVERY_WIDTH
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("source, target", [("uint8", "uint8"), ("float32", "float32"), ("bfloat16", "float32")])
def test_a_reduction_makes_one_element_a_row(source, target, kind, runner):
    b = ProgramBuilder(True)
    b.add("fma", b.accumulator, 0.01, 10)
    spec = Reduce((gapped(source, (3, 4, 70)),), dense_view(target, (3, 4, 1)), (), program=b.program(), kind=kind)
    check(spec, runner, data(spec), {"program": b.constants}, pieces=2)


@EVERY_WIDTH
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("shape", [(5,), (3, 70)], ids=str)
def test_the_extreme_of_a_batch_is_one_element(shape, kind, runner):
    b = ProgramBuilder(True)
    b.add("fma", b.accumulator, 0.01, 10)
    spec = Extreme((gapped("float32", shape),), View("float32", (1,), (4,), 0), (), program=b.program(), kind=kind)
    (x,) = data(spec)
    check(spec, runner, [np.concatenate([x, 2 * x, x])], {"program": b.constants})


@EVERY_WIDTH
def test_a_mask_is_added_on_the_way_in(runner):
    b = ProgramBuilder(False)
    b.add("fma", b.operand(), 0.125, b.operand())
    mask = View("float32", (4, 3, 33), (0, 33 * 4, 4), 3 * 33 * 4)
    spec = Softmax((dense_view("float32", (4, 3, 33)), mask), dense_view("float32", (4, 3, 33)), (), b.program())
    x, _ = data(spec)
    drawn = np.random.default_rng(1).standard_normal((BATCH, 1, 3, 33)).astype(np.float32)
    check(spec, runner, [x, np.broadcast_to(drawn, x.shape)], {"prologue": b.constants})


@EVERY_WIDTH
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed twice"])
def test_a_row_that_may_look_at_nothing_becomes_zeros(kept, runner, monkeypatch):
    if not kept:
        monkeypatch.setattr(kernels, "KEPT", 16)
    view = dense_view("float32", (3, 37))
    spec, (x,) = Softmax((view,), view), data(Softmax((view,), view))
    x[:, 1] = -np.inf
    x[:, 2, :5] = -np.inf
    result, = spec.reference([x], {})
    assert not result[:, 1].any() and result[:, [0, 2]].sum(-1).min() > 0.99
    check(spec, runner, [x], {})


@EVERY_WIDTH
@pytest.mark.parametrize("hidden", [-1e3, -1e8, np.finfo(np.float32).min, -np.inf])
def test_what_is_masked_has_no_share_at_all(hidden, runner):
    """The logarithm of a masked element is -inf, not that of the smallest float32."""
    view = dense_view("float32", (3, 37))
    spec, (x,) = Softmax((view,), view), data(Softmax((view,), view))
    x[..., 5:20] = hidden
    check(spec, runner, [x], {})
    result, = run(spec, runner, [x], {})
    assert not result[..., 5:20].any() and result[..., :5].all()


@EVERY_WIDTH
@pytest.mark.parametrize("width", [40, 65, 129])
def test_one_element_that_is_no_number_makes_its_whole_row_so_wherever_it_is(width, runner):
    view = dense_view("float32", (width, width))
    x = np.stack([data(Softmax((view,), view))[0][0], np.full((width, width), -np.inf, np.float32)])
    x[:, range(width), range(width)] = np.nan
    result, = run(Softmax((view,), view), runner, [x], {})
    assert np.isnan(result).all()


@EVERY_WIDTH
def test_a_row_too_wide_for_the_stack_is_computed_twice(runner, monkeypatch):
    monkeypatch.setattr(kernels, "KEPT", 128)
    view = dense_view("float32", (2, 129))
    spec = Softmax((view,), view)
    assert not kernel_of(spec).scratch
    check(spec, runner, data(spec), {})


@EVERY_FAMILY
@pytest.mark.parametrize("shift", [0, -300])
def test_the_references_agree_with_float64(family, shift):
    view = dense_view("float32", (5, 100))
    spec = family((view,), view)
    x = data(spec)[0] + np.float32(shift if isinstance(spec, Softmax) else 0)
    got = spec.reference([x], {})[0]
    wide = x.astype(np.float64)
    if isinstance(spec, Softmax):
        e = np.exp(wide - wide.max(-1, keepdims=True))
        expected = e / e.sum(-1, keepdims=True)
        expected = np.log(expected) if spec.log else expected
    elif isinstance(spec, Lrn):
        near = [sum(wide[..., max(c - (spec.size - 1) // 2, 0):c + spec.size // 2 + 1].T ** 2).T for c in range(100)]
        expected = wide / (spec.bias + spec.alpha / spec.size * np.stack(near, -1)) ** spec.beta
    elif spec.kind == "layer":
        expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + spec.epsilon)
    elif spec.kind == "rms":
        expected = wide / np.sqrt((wide ** 2).mean(-1, keepdims=True) + spec.epsilon)
    else:
        expected = wide / np.sqrt((wide ** 2).sum(-1, keepdims=True))
    np.testing.assert_allclose(got, expected, 2e-6, 2e-6)


def test_a_wrong_epsilon_is_caught():
    view = dense_view("float32", (2, 20))
    spec, other = Norm((view,), view), Norm((view,), view, epsilon=1e-3)
    assert (run(spec, CpuRunner(PORTABLE), data(spec), {})[0] != other.reference(data(spec), {})[0]).any()
