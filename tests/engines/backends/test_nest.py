"""Nests on every backend, with every partition of their loops, compared with their programs in NumPy."""
import math

import numpy as np
import pytest

from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.lowering.nest import functions
from infer_server.engines.lowering.nest.meaning import evaluate
from infer_server.engines.lowering.nest.program import ARITHMETIC, COMPARISONS, FLOATING, KINDS, REDUCTIONS, Writer
from infer_server.engines.lowering.problems.nest import Nest, Scatter
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array
from tests.engines.backends.runners import ALL_COMBINATIONS, EVERY_ISA_WIDTH, EVERY_WIDTH, ISA_WIDTHS

ITEMS = 2
STORED = {"f32": "float32", "f64": "float64", "i32": "int32", "i64": "int64", "u64": "uint64", "i1": "bool"}
UNDEFINED = {        # operations of a kind that no rule writes
    "f32": ("mod", "rem", "and", "or", "xor", "shl", "shr", "invert"), "f64": ("mod", "rem", "and", "or", "xor", "shl",
                                                                              "shr", "invert"),
    "i1": ("add", "sub", "mul", "div", "mod", "rem", "shl", "shr", "neg", "abs"), "i32": (), "i64": (), "u64": ("neg",)}
ROUNDING = ("sqrt", "floor", "ceil", "rint")


def draw(view, seed=0):
    """Draw from few different numbers, so that some are equal; half of the unsigned integers have the top bit set."""
    random, shape = np.random.default_rng(seed), (ITEMS, *view.shape)
    if view.dtype in ("float32", "float64"):
        return (random.integers(-9, 9, shape) / 2).astype(view.dtype)
    if view.dtype in ("float16", "bfloat16"):
        return random_array(random, view.dtype, shape)
    if view.dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    top = np.iinfo(view.dtype).max
    return np.where(random.integers(0, 4, shape) > 0, random.integers(0, 7, shape), top).astype(view.dtype)


def shown(view, array):
    """Return the array as a view with strides of 0 shows it."""
    first = tuple(slice(None) if stride else slice(1) for stride in (1, *view.strides))
    return np.broadcast_to(array[first], array.shape)


@EVERY_WIDTH
@pytest.mark.parametrize("kind", STORED)
def test_an_operation_is_what_numpy_says_of_every_kind_of_number(kind, runner):
    view = dense_view(STORED[kind], (3, 21))
    w = Writer((3, 21))
    a, b = w.read(0, kind), w.read(1, kind)
    words = [op for op in ARITHMETIC if op not in UNDEFINED[kind] and (kind in FLOATING or op not in ROUNDING)]
    unary = ("neg", "abs", "invert", *ROUNDING)
    results = [a.unary(op) if op in unary else a.binary(op, b) for op in words]
    truth = [a.binary(op, b, "i1") for op in COMPARISONS] + [w.where(a < b, b, a).differs(a)]
    targets = (*(view for _ in words), *(dense_view("bool", (3, 21)) for _ in truth))
    spec = Nest((view, view), targets, (3, 21), (), w.program(*results, *truth))
    check(spec, runner, [draw(view, 0), draw(view, 1)], {}, pieces=2)


@EVERY_WIDTH
def test_every_dtype_is_read_and_written_as_numpy_casts_it(runner):
    shape = (5, 19)
    sources = tuple(dense_view(dtype, shape) for dtype in KINDS)
    w = Writer(shape)
    read = [w.read(i, KINDS[view.dtype]) for i, view in enumerate(sources)]
    halves = [x for x in read if x.kind == "f32"][1].to("f64").to("f32")
    targets = (*sources, dense_view("int8", shape), dense_view("float64", shape))
    results = [*read, read[list(KINDS).index("int16")].to("i64").to("i32"), halves.to("f64")]
    spec = Nest(sources, targets, shape, (), w.program(*results))
    check(spec, runner, [draw(view, i) for i, view in enumerate(sources)], {})


KINDS_REDUCED = ["f32", "f64", "i32", "u64", "i1"]


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("kind", KINDS_REDUCED)
def test_every_reduction_by_every_cut_of_the_loops(kind, cpu):
    """y[i, j] reduces x[i, k, j] and z[k] with some equal values; lanes run along each loop, with tails."""
    w = Writer((5, 11), (3, 19))
    x, z = w.read(0, kind), w.read(1, kind)
    term = x.binary("xor" if kind == "i1" else "max", z)
    how = [one for one in REDUCTIONS if kind != "i1" or one in ("max", "min", "sum")]
    views = (View(STORED[kind], (5, 11, 3, 19), (11 * 57 * x_size(kind), x_size(kind), 19 * 11 * x_size(kind),
                                                  11 * x_size(kind)), 5 * 11 * 57 * x_size(kind)),
             View(STORED[kind], (5, 11, 3, 19), (0, 0, 0, x_size(kind)), 19 * x_size(kind)))
    targets = tuple(dense_view("int64" if "_" in one else STORED[kind], (5, 11)) for one in how)
    spec = Nest(views, targets, (5, 11), (3, 19), w.program(*(w.reduce(one, term) for one in how)))
    arrays = [shown(view, draw(view, i)) for i, view in enumerate(views)]
    kernel, = kernels_for(spec)
    number = ISA_WIDTHS.index(cpu) + KINDS_REDUCED.index(kind)
    for tactic in kernel.tactics(cpu.isa)[number % 2::1 if ALL_COMBINATIONS else 2]:
        check(kernel, cpu, arrays, {}, 1e-5 if kind in FLOATING else 0, tactic=tactic, pieces=3)


def x_size(kind):
    return np.dtype(STORED[kind]).itemsize


@EVERY_WIDTH
def test_a_result_that_needs_two_passes_is_stored_inside_the_second(runner):
    w = Writer((4,), (2, 13))
    x = w.read(0, "f32")
    powers = (x - w.reduce("max", x)).unary("exp")
    spec = Nest((gapped("float32", (4, 2, 13)),), (gapped("float32", (4, 2, 13)),), (4,), (2, 13),
                w.program(powers / w.reduce("sum", powers)), inside=True)
    check(spec, runner, [draw(spec.sources[0])], {}, 1e-6)


@EVERY_WIDTH
def test_a_cycle_repeats_until_no_lane_passes_its_test(runner):
    """Each x is doubled until it is at least 90, and the steps are counted."""
    w = Writer((3, 21))
    doubled, count = w.repeat_while(
        [w.read(0, "f32").unary("abs") + 1, w.constant(0, "i64")],
        lambda now: [w.where(now[0] < 90, part, kept)
                     for part, kept in zip((now[0] + now[0], now[1] + 1), now, strict=True)],
        lambda now: now[0] < 90)
    x = dense_view("float32", (3, 21))
    spec = Nest((x,), (x, dense_view("int64", (3, 21))), (3, 21), (), w.program(doubled, count))
    check(spec, runner, [draw(x)], {}, pieces=2)


@EVERY_WIDTH
def test_a_reduction_takes_what_cycles_end_at(runner):
    """Walk a table in two loops at once and reduce over the ends.

    The table leads from each position to a higher one, or from the last three to themselves. sum[i] and most[i] reduce
    over j the ends of the walks that start at x[i, j] and x[i, j] + 1.
    """
    w = Writer((5,), (13,))
    start = w.read(0, "i64").within(8)
    ends = w.repeat_while([start, start + 1], lambda places: [w.pick(1, "i64", [place]) for place in places],
                          lambda places: (places[0] < 7) | (places[1] < 7))
    program = w.program(w.reduce("sum", ends[0] * 10 + ends[1]), w.reduce("max", ends[1]))
    x, table = dense_view("int64", (5, 13)), View("int64", (10,), (8,), 0)
    steps = np.minimum(np.arange(10) + np.array([3, 1, 2, 5, 1, 4, 2, 0, 0, 0]), 9)
    spec = Nest((x, table), (dense_view("int64", (5,)),) * 2, (5,), (13,), program)
    check(spec, runner, [draw(x), np.broadcast_to(steps, (ITEMS, 10))], {}, pieces=2)


@EVERY_WIDTH
def test_picks_by_loops_by_tensors_and_by_the_item(runner):
    """Lanes read forwards, backwards, with a stride, and by an index tensor."""
    shape, table = (3, 17), dense_view("float32", (9, 40))
    w = Writer(shape)
    i, j = w.index(0), w.index(1)
    chosen = w.read(1, "i64").within(9)
    picked = [w.pick(0, "f32", [i, j]), w.pick(0, "f32", [i * 2, j * -1 + 39]), w.pick(0, "f32", [chosen, j]),
              w.pick(0, "f32", [i, j * 2 + 1]), w.pick(0, "f32", [w.add("item", "i64"), chosen * 4])]
    index, target = View("int64", shape, (0, 8), 17 * 8), dense_view("float32", shape)
    spec = Nest((table, index), (target,) * len(picked), shape, (), w.program(*picked))
    check(spec, runner, [draw(table), shown(index, draw(index, 3))], {}, pieces=2)


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("shape", [(5, 3, 37), (9001, 1, 5), (3, 2, 3001)], ids=str)
def test_what_does_not_depend_on_a_loop_may_be_computed_before_it(shape, cpu):
    """y[i, j, k] is table[i, place[k]] * weight[k], with i or j inside the loop over lanes."""
    table = dense_view("float32", (shape[0], 40))
    w = Writer(shape)
    place = w.read(1, "i64").within(40)
    program = w.program(w.pick(0, "f32", [w.index(0), place]) * (w.read(2, "f32") + 0.5) + w.read(3, "f32"))
    along = [View(dtype, shape, (0, 0, size), size * shape[2]) for dtype, size in (("int64", 8), ("float32", 4))]
    across = View("float32", shape, (0, 4, 0), 4 * shape[1])
    spec = Nest((table, *along, across), (gapped("float32", shape),), shape, (), program)
    arrays = [draw(table), *(shown(view, draw(view, 1)) for view in (*along, across))]
    kernel, = kernels_for(spec)
    tactics = kernel.tactics(cpu.isa)
    assert {tactic.cut.within for tactic in tactics} & {0, 1}
    for tactic in tactics:
        check(kernel, cpu, arrays, {}, 1e-6, tactic=tactic, pieces=3)


@EVERY_WIDTH
@pytest.mark.parametrize("combined", ["", "add", "mul", "max", "min"])
def test_updates_that_meet_in_an_element_are_made_in_order(combined, runner):
    """In y[i, place[i, k], j] updates of different i and j never collide, those of different k may."""
    x, updates = gapped("float32", (3, 5, 19)), dense_view("float32", (3, 7, 19))
    places = View("int32", (3, 7, 19), (28, 4, 0), 84)
    w = Writer((3, 7, 19))
    place = w.read(2, "i32").to("i64").within(5)
    program = w.program(w.read(1, "f32"), w.index(0), place, w.index(2))
    spec = Scatter((x, updates, places), dense_view("float32", (3, 5, 19)), (3, 7, 19), program, combined)
    inputs = [draw(x), draw(updates, 1), shown(places, draw(places, 2))]
    check(spec, runner, inputs, {}, pieces=2)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
                                  "asinh", "acosh", "atanh"])
def test_elementary_functions_are_nearly_exact_in_double_precision(name):
    exact = getattr(np, name.replace("as", "arcs").replace("ac", "arcc").replace("at", "arct"))
    x = np.concatenate([np.linspace(-30, 30, 2001), np.linspace(-1, 1, 2001), [0.0, 700, -700, math.inf, -math.inf]])
    w = Writer((len(x),))
    program = w.program(getattr(functions, name)(w.read(0, "f64")))
    found = evaluate(program, (len(x),), (), [x[None]], 1)[program.results[0]][0]
    with np.errstate(all="ignore"):
        wanted = exact(x)
    if name in ("sin", "cos", "tan"):
        wanted, found = wanted[:-2], found[:-2]
    np.testing.assert_allclose(found, wanted, 1e-11, 3e-15)


def test_powers_and_remainders_have_the_signs_of_c():
    a = np.array([7.5, -7.5, 7.5, -7.5, 0.3, -2, 0, 0, 5, -8, 2])
    b = np.array([2.0, 2.0, -2.0, -2.0, 0.1, 3, 3, 0, -2, 0.375, math.inf])
    w = Writer((len(a),))
    x, y = w.read(0, "f64"), w.read(1, "f64")
    program = w.program(functions.power(x, y), functions.remainder(x, y), functions.modulo(x, y))
    values = evaluate(program, (len(a),), (), [a[None], b[None]], 1)
    with np.errstate(all="ignore"):
        wanted = [np.power(a, b), np.fmod(a, b), np.mod(a, b)]
    for number, right in zip(program.results, wanted, strict=True):
        np.testing.assert_allclose(values[number][0], right, 1e-12, 1e-15)
