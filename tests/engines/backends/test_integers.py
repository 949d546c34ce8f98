import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.ir.graph import BATCH, Graph, Node, TensorType
from infer_server.engines.lowering.calls.calls import ProblemCall
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.problems.elementwise import OPERATIONS, STORED_INTEGERS, CumulativeSum, Integers
from infer_server.engines.lowering.problems.view import View, dense_view
from infer_server.engines.ops import OPS
from scripts.testing.suite import check, gapped, random_array, run
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import EVERY_WIDTH

ITEMS = 2
ARGUMENTS = {"copy": 1, "not": 1, "negate": 1, "invert": 1, "absolute": 1, "where": 3}


def draw(view, seed=0, wide=False):
    """Draw any number of the dtype; `wide`: with more bits than a float holds."""
    random = np.random.default_rng(seed)
    shape = (ITEMS, *(n if stride else 1 for n, stride in zip(view.shape, view.strides, strict=True)))
    array = random_array(random, view.dtype, shape)
    if wide and view.dtype in ("int32", "int64"):
        info = np.iinfo(view.dtype)
        array = random.integers(info.min, info.max, shape).astype(view.dtype)
    return np.broadcast_to(array, (ITEMS, *view.shape))


@EVERY_WIDTH
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_exact_for_any_64_bits(operation, runner):
    views = (dense_view("int64", (3, 37)),) * ARGUMENTS.get(operation, 2)
    spec = Integers(views, dense_view("int64", (3, 37)), operation)
    check(spec, runner, [draw(view, seed, wide=True) for seed, view in enumerate(views)], {}, pieces=2)


@EVERY_WIDTH
@pytest.mark.parametrize("target", STORED_INTEGERS)
@pytest.mark.parametrize("source", STORED_INTEGERS)
def test_every_stored_dtype_is_read_and_written_as_numpy_casts_it(source, target, runner):
    spec = Integers((dense_view(source, (37,)),), dense_view(target, (37,)), "copy")
    x = draw(spec.sources[0], wide=True)
    check(spec, runner, [x], {})
    np.testing.assert_array_equal(spec.reference([x], {})[0], x.astype(target))


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_an_operation_on_bytes_is_exact_though_it_is_made_in_few_bits(dtype, runner):
    view = dense_view(dtype, (71,))
    for operation in ("add", "less", "divide", "greatest", "absolute"):
        views = (view,) * ARGUMENTS.get(operation, 2)
        check(Integers(views, view, operation), runner, [draw(view, seed) for seed, _ in enumerate(views)], {})


@EVERY_WIDTH
@pytest.mark.parametrize("target", ["int64", "int32", "uint8"])
def test_floats_are_truncated(target, runner):
    spec = Integers((dense_view("float32", (37,)),), dense_view(target, (37,)), "copy")
    x = np.linspace(-1e6, 1e6, ITEMS * 37, dtype=np.float32).reshape(ITEMS, 37)
    x[0, :9] = 3e9, -1e12, 2 ** 31, -2 ** 31, 3 * 2 ** 31, 2 ** 32 - 256, -2 ** 32 - 512, 2 ** 31 - 128, 5 * 2 ** 40
    check(spec, runner, [x], {})


@EVERY_WIDTH
def test_strides_of_zero_broadcast_and_gaps_are_stepped_over(runner):
    shape = (3, 4, 19)
    column = View("bool", shape, (4, 1, 0), 12)
    row = View("int64", shape, (0, 0, 8), 19 * 8)
    spaced = View("int32", shape, (4 * 19 * 8, 19 * 8, 8), 3 * 4 * 19 * 8)
    for output in (gapped("int64", shape), spaced):
        views = (column, row, spaced)
        check(Integers(views, output, "where"), runner, [draw(v, i) for i, v in enumerate(views)], {}, pieces=2)


@EVERY_WIDTH
@pytest.mark.parametrize("operation", ["divide", "modulo", "remainder"])
def test_no_division_traps_and_signs_are_as_numpy_has_them(operation, runner):
    view = dense_view("int64", (7, 7))
    special = np.array([0, -1, 1, 7, -7, np.iinfo(np.int64).min, np.iinfo(np.int64).max])
    a, b = (np.broadcast_to(x, (ITEMS, 7, 7)) for x in (special[:, None], special))
    check(Integers((view, view), view, operation), runner, [a, b], {})


def test_a_wrong_operation_is_caught():
    view = dense_view("int64", (7,))
    x = [draw(view, 0), draw(view, 1)]
    got, = run(Integers((view, view), view, "less"), CpuRunner(PORTABLE), x, {})
    assert (got != Integers((view, view), view, "less_or_equal").reference([x[0], x[0]], {})[0]).any()


@EVERY_WIDTH
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("way", [{}, {"exclusive": True}, {"reverse": True}, {"exclusive": True, "reverse": True}],
                         ids=str)
def test_sums_run_along_any_axis_either_way(way, axis, dtype, runner):
    x = gapped(dtype, (4, 5, 19))
    spec = CumulativeSum(x, dense_view(dtype, x.shape), axis, **way)
    check(spec, runner, [draw(x)], {}, pieces=2)
    node = Node("CumSum", ("x",), ("y",), {"axis": axis + 1, **{key: int(value) for key, value in way.items()}})
    np.testing.assert_allclose(spec.reference([draw(x)], {})[0], OPS["CumSum"].reference(node, draw(x))[0], 1e-6)


@EVERY_WIDTH
def test_sums_run_along_the_tokens_of_a_request(runner):
    view = dense_view("int64", (37,))
    check(CumulativeSum(view, view, 0), runner, [draw(view)], {})


# ---- nodes
INT64, BOOL, FLOAT = (np.dtype(name) for name in ("int64", "bool", "float32"))


def only_call(op, kinds, made, shape=(BATCH, 5), **attrs):
    names = tuple(f"x{i}" for i in range(len(kinds)))
    types = {name: TensorType(np.dtype(kind), shape) for name, kind in zip(names, kinds, strict=True)}
    node = Node(op, names, ("y",), attrs, op)
    call, = lower(Graph("g", names, ("y",), (node,), {}, {**types, "y": TensorType(np.dtype(made), shape)}),
                  PORTABLE.lanes).calls
    return call


@pytest.mark.parametrize("op, kinds, made", [
    ("Add", [INT64, INT64], INT64), ("Equal", [INT64, INT64], BOOL), ("And", [BOOL, BOOL], BOOL), ("Not", [BOOL], BOOL),
    ("Where", [BOOL, INT64, INT64], INT64), ("Less", ["int32", "int32"], BOOL), ("Max", ["int32", "int32"], "int32"),
    ("Div", [INT64, INT64], INT64), ("Mod", [INT64, INT64], INT64)])
def test_a_node_on_integers_is_one_operation(op, kinds, made):
    call = only_call(op, kinds, made)
    assert isinstance(call, ProblemCall) and isinstance(call.problem, Integers), call.reason
    x = [draw(view, i) for i, view in enumerate(call.problem.sources)]
    np.testing.assert_array_equal(call.problem.reference(x, {})[0], OPS[op].reference(call.node, *x)[0])


@pytest.mark.parametrize("kind", ["int64", "float32"])
def test_without_a_batch_all_of_a_tensor_is_one_item(kind):
    call = only_call("Add", [kind, kind], kind, shape=(9, 3))
    assert [view.shape for view in (*call.problem.sources, call.problem.output)] == [(9, 3)] * 3
    assert call.outputs[0].items == 1


@pytest.mark.parametrize("kind, to", [("bool", "int64"), ("int64", "int32"), ("int64", "bool"), ("float32", "int64")])
def test_a_cast_to_integers_is_one_too(kind, to):
    assert isinstance(only_call("Cast", [kind], to, to=to).problem, Integers)


def test_what_has_no_operation_on_integers_is_a_nest_of_their_own_kind():
    assert only_call("Pow", [INT64, INT64], INT64).problem.family == "nest"
    assert only_call("Add", ["uint32", "uint32"], "uint32").problem.family == "nest"
