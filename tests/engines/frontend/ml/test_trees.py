"""Tree ensembles give ONNX Runtime's results."""
import math
import random

import numpy as np
import pytest
from onnx import numpy_helper

from infer_server.engines.backends.llvm.codegen.isa import AVX2
from infer_server.engines.backends.llvm.kernels.nest.nest import NestKernel
from infer_server.engines.codegen.nest.order import NONE
from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.problems.nest import Nest
from infer_server.engines.onnx_backend import EngineBackend
from tests.engines.frontend.one_node import check, feeds_of, imported, model_of, normal, onnx_runtime

ML = {"domain": "ai.onnx.ml"}
COLUMNS = 5
THRESHOLDS = [-0.5, 0.0, 0.25, 1.0]
LEQ, LT, GTE, GT, EQ, NEQ = (f"BRANCH_{mode}" for mode in ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ"))


def forest(modes=(LEQ,), targets=1, prefix="target", trees=4, depth=3, missing=False, ids=None, positive=False, seed=3):
    """Return attributes of random trees whose leaves have weights for some targets, those in `ids` if given."""
    rng = random.Random(seed)
    nodes = []          # (tree, number, column, mode, threshold, true, false, missing)
    leaves = []         # (tree, number, id, weight)

    def grow(tree, numbers, left):
        number = next(numbers)
        if not left or rng.random() < 0.2:
            nodes.append((tree, number, 0, "LEAF", 0.0, 0, 0, 0))
            for target in ids or rng.sample(range(targets), rng.randint(1, targets)):
                leaves.append((tree, number, target, rng.uniform(0 if positive else -1, 1) / trees))
            return number
        place = len(nodes)
        nodes.append(None)
        children = [grow(tree, numbers, left - 1) for _ in range(2)]
        nodes[place] = (tree, number, rng.randrange(COLUMNS), rng.choice(modes), rng.choice(THRESHOLDS), *children,
                        rng.randint(0, 1) if missing else 0)
        return number

    for tree in range(trees):
        grow(tree, iter(range(1000)), depth)
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids",
             "missing_value_tracks_true")
    attrs = {f"nodes_{name}": list(values) for name, values in zip(names, zip(*nodes, strict=True), strict=True)}
    weights = zip(*leaves, strict=True)
    return attrs | {f"{prefix}_{name}": list(values)
                    for name, values in zip(("treeids", "nodeids", "ids", "weights"), weights, strict=True)}


def rows(missing=False):
    """Return inputs of which some equal thresholds and, with `missing`, some are NaN."""
    x = normal(40, COLUMNS)
    places = np.random.default_rng(1).integers(0, 12, x.shape)
    x = np.where(places < len(THRESHOLDS), np.float32(THRESHOLDS)[places % len(THRESHOLDS)], x)
    return np.where(places == 11, np.float32(math.nan), x) if missing else x


@pytest.mark.parametrize("modes", [(LEQ,), (LT,), (GTE,), (GT,), (EQ,), (NEQ,), (LEQ, LT, GTE, GT, EQ, NEQ)])
@pytest.mark.parametrize("missing", [False, True])
def test_every_comparison_and_what_is_missing(modes, missing):
    check("TreeEnsembleRegressor", [rows(missing)], n_targets=1, **forest(modes, missing=missing), **ML)


def test_nothing_but_infinity_is_less_than_the_least_number():
    """XGBoost writes this split for a column that may be missing."""
    least = np.finfo(np.float32).min
    trees = {"nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0] * 3,
             "nodes_modes": [LT, "LEAF", "LEAF"], "nodes_values": [float(least), 0.0, 0.0],
             "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0],
             "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0]}
    check("TreeEnsembleRegressor", [np.float32([[-math.inf], [least], [0]])], n_targets=1, **trees, **ML)


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("base", [False, True])
def test_trees_predict_numbers(aggregate, targets, base):
    """Without base_values not every leaf has a weight for every target.

    ONNX Runtime ignores a target's base value if no leaf with a weight for it is reached.
    """
    more = {"base_values": [0.5, -0.25, 2.0][:targets]} if base else {}
    check("TreeEnsembleRegressor", [rows()], n_targets=targets, aggregate_function=aggregate,
          **forest(targets=targets, ids=range(targets) if base else None), **more, **ML)


@pytest.mark.parametrize("aggregate, depths", [("SUM", [2, 9]), ("AVERAGE", [2, 9]), ("MIN", [9]), ("MAX", [9])])
def test_trees_of_unlike_depths_take_no_more_steps_than_they_need(aggregate, depths):
    """Trees are grouped by depth, here in two groups, and each group is walked as many steps as its deepest tree."""
    shallow, deep = (forest(targets=2, trees=trees, depth=depth, ids=[0, 1]) for trees, depth in ((120, 2), (3, 9)))
    trees = {name: [*values, *((120 + tree for tree in deep[name]) if name.endswith("treeids") else deep[name])]
             for name, values in shallow.items()}
    attrs = {"n_targets": 2, "aggregate_function": aggregate, **trees, **ML}
    check("TreeEnsembleRegressor", [rows()], base_values=[0.5, -0.25], **attrs)
    graph = graph_from_onnx(model_of("TreeEnsembleRegressor", [rows()], **attrs))
    assert sorted(node.attrs["depth"] for node in graph.nodes if node.op == "Forest") == depths


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("base", [False, True])
def test_trees_tell_classes(transform, base):
    more = {"base_values": [0.5, -0.25, 0.1]} if base else {}
    check("TreeEnsembleClassifier", [rows()], (), 2, classlabels_int64s=[4, 7, 9], post_transform=transform,
          **forest(targets=3, prefix="class"), **more, **ML)


@pytest.mark.parametrize("base", [[], [0.0] * 4])
def test_a_class_that_no_tree_speaks_of_is_not_the_answer(base):
    """It is not chosen even if all other scores are negative, unless there are base values."""
    trees = forest(targets=4, prefix="class", trees=2, positive=True)
    trees["class_weights"] = [-weight for weight in trees["class_weights"]]
    more = {"base_values": base} if base else {}
    check("TreeEnsembleClassifier", [rows()], (), 2, classlabels_int64s=[4, 7, 9, 5], **trees, **more, **ML)


def test_votes_are_not_counted_where_every_class_has_a_tree():
    parts = [forest(targets=3, prefix="class", trees=1, ids=[target], seed=target) for target in range(3)]
    for number, part in enumerate(parts):
        part |= {name: [number] * len(part[name]) for name in ("nodes_treeids", "class_treeids")}
    trees = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    attrs = {"classlabels_int64s": [4, 7, 9], **trees, **ML}
    check("TreeEnsembleClassifier", [rows()], (), 2, **attrs)
    graph = graph_from_onnx(model_of("TreeEnsembleClassifier", [rows()], (), 2, **attrs))
    assert "Where" not in {node.op for node in graph.nodes}


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("ids, base", [([0], []), ([0], [0.1]), ([1], [])])
def test_trees_tell_one_of_two_classes_by_one_score(transform, positive, ids, base):
    more = {"base_values": base} if base else {}
    check("TreeEnsembleClassifier", [rows()], (), 2, classlabels_int64s=[4, 7], post_transform=transform,
          **forest(targets=2, prefix="class", ids=ids, positive=positive), **more, **ML)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_of_two_scores_the_larger_one_is_the_answer(transform):
    """ONNX Runtime instead chooses the second one if it is above 0, and returns 0 or 1 as the class."""
    attrs = {"classlabels_int64s": [4, 7], "post_transform": transform, **ML}
    x, trees = rows(), forest(targets=2, prefix="class", ids=[0, 1])
    model = model_of("TreeEnsembleClassifier", [x], (), 2, **attrs, **trees)
    result = imported("TreeEnsembleClassifier", [x], (), 2, **attrs, **trees)
    np.testing.assert_allclose(result["o1"], onnx_runtime(model, feeds_of(model, [x]))["o1"], 1e-4, 1e-5)
    np.testing.assert_array_equal(result["o0"], np.array([4, 7])[result["o1"].argmax(1)])


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_rows_may_be_of_other_types(dtype):
    check("TreeEnsembleClassifier", [(normal(20, COLUMNS) * 2).astype(dtype)], (), 2, classlabels_int64s=[4, 7, 9],
          **forest(targets=3, prefix="class"), **ML)


@pytest.mark.parametrize("modes", [(LEQ,), (LT,), (EQ,), (NEQ,), (GT, EQ)])
@pytest.mark.parametrize("missing", [[0], [1], [0, 1]], ids=["to the right", "to the left", "either way"])
def test_an_engine_runs_trees(modes, missing):
    """Missing-value flags are equal for all nodes, or differ."""
    x, trees = rows(missing=True), forest(modes, targets=2, trees=10)
    nodes = len(trees["nodes_modes"])
    trees["nodes_missing_value_tracks_true"] = [missing[node % len(missing)] for node in range(nodes)]
    model = model_of("TreeEnsembleRegressor", [x], n_targets=2, **trees, **ML)
    (y,) = EngineBackend.run_model(model, [x])
    np.testing.assert_allclose(y, onnx_runtime(model, feeds_of(model, [x]))["o0"], 1e-4, 1e-5)


def test_trees_that_are_one_leaf_take_no_steps():
    x = rows()
    attrs = {"n_targets": 2, **forest(targets=2, trees=10, ids=[0, 1]), **ML}
    graph = graph_from_onnx(model_of("TreeEnsembleRegressor", [x], **attrs))
    grown = set(attrs["nodes_treeids"][at] for at, mode in enumerate(attrs["nodes_modes"]) if mode != "LEAF")
    (node,) = (node for node in graph.nodes if node.op == "Forest")
    assert len(graph.constants[node.inputs[2]]) == len(grown) < 10
    check("TreeEnsembleRegressor", [x], **attrs)


@pytest.mark.parametrize("height", [7, 2500])
def test_an_engine_runs_trees_on_many_rows(height):
    x = normal(height, COLUMNS)
    model = model_of("TreeEnsembleRegressor", [x], n_targets=2, **forest(targets=2, trees=10), **ML)
    (y,) = EngineBackend.run_model(model, [x])
    np.testing.assert_allclose(y, onnx_runtime(model, feeds_of(model, [x]))["o0"], 1e-4, 1e-5)


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize(("trees", "written"), [(23, 256), (32, 256), (1, 256), (23, 15)])
def test_an_engine_steps_through_trees_some_at_once(aggregate, trees, written, monkeypatch):
    """The last group of trees may be smaller, also for trees of many steps."""
    monkeypatch.setattr("infer_server.engines.lowering.rules.nests.trees.WRITTEN", written)
    x = normal(5, COLUMNS)
    attrs = forest(targets=2, trees=trees, ids=[0, 1], positive=True, seed=8)
    model = model_of("TreeEnsembleRegressor", [x], n_targets=2, aggregate_function=aggregate, **attrs, **ML)
    (y,) = EngineBackend.run_model(model, [x])
    np.testing.assert_allclose(y, onnx_runtime(model, feeds_of(model, [x]))["o0"], 1e-4, 1e-5)


def chains(trees, depth, shortest=1):
    """Return attributes of trees with depths from `shortest` to `depth` that grow leaf by leaf.

    Each inner node but the last has a leaf on one side and an inner node on the other.
    """
    rng = random.Random(5)
    nodes = {name: [] for name in ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids",
                                   "falsenodeids")}
    leaves = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(trees):
        height = depth if not tree else rng.randint(shortest, depth)
        for number in range(2 * height + 1):
            inner = number % 2 == 0 and number < 2 * height
            children = rng.sample([number + 1, number + 2], 2) if inner else [0, 0]
            for name, value in zip(nodes, (tree, number, rng.randrange(COLUMNS), LEQ if inner else "LEAF",
                                           rng.gauss(0, 0.7) if inner else 0.0, *children), strict=True):
                nodes[name].append(value)
            for target in range(0 if inner else 2):
                for name, value in zip(leaves, (tree, number, target, rng.uniform(0, 1)), strict=True):
                    leaves[name].append(value)
    return {f"nodes_{name}": values for name, values in nodes.items()} | {
        f"target_{name}": values for name, values in leaves.items()}


def cycles_of(model):
    programs = [call.problem.program for call in lower(graph_from_onnx(model), AVX2.lanes).compiled
                if isinstance(call.problem, Nest)]
    return [len(program.cycles) for program in programs if program.chased]


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize(("trees", "depth"), [(23, 14), (1, 20), (9, 100)])
def test_walks_of_trees_with_short_paths_end_early(aggregate, trees, depth):
    """Walks with more steps than are unrolled do, too."""
    x = rows(missing=True)
    model = model_of("TreeEnsembleRegressor", [x], n_targets=2, aggregate_function=aggregate, **chains(trees, depth),
                     **ML)
    assert set(cycles_of(model)) == {1}
    (y,) = EngineBackend.run_model(model, [x])
    np.testing.assert_allclose(y, onnx_runtime(model, feeds_of(model, [x]))["o0"], 1e-4, 1e-5)


def test_trees_that_are_full_are_walked_without_a_test():
    assert cycles_of(model_of("TreeEnsembleRegressor", [rows()], n_targets=2, **chains(20, 1), **ML)) == [0]


def test_lanes_are_scores_and_not_trees_which_go_ways_of_their_own():
    model = model_of("TreeEnsembleRegressor", [rows()], n_targets=5, **forest(targets=5, trees=40), **ML)
    problem = next(call.problem for call in lower(graph_from_onnx(model), AVX2.lanes).compiled)
    *_, targets = range(len(problem.loops))
    assert problem.loops[targets] == 5
    assert {tactic.cut.lanes for tactic in NestKernel(problem).tactics(AVX2)} == {targets, NONE}


def changed(**attrs):
    return {"n_targets": 1, **forest(), **attrs}


@pytest.mark.parametrize("attrs, message", [
    (changed(nodes_modes=["BRANCH_LEQ"]), "nodes_modes has 1 values"),
    (changed(nodes_modes=["BRANCH_ODD"] * len(forest()["nodes_modes"])), "nodes_modes has BRANCH_ODD"),
    (changed(nodes_values=[0.0]), "nodes_values has 1 values"),
    (changed(nodes_nodeids=[0]), "nodes_nodeids 1"),
    (changed(nodes_featureids=[9] * len(forest()["nodes_modes"])), f"indices outside the input's {COLUMNS} columns"),
    (changed(nodes_truenodeids=[99] * len(forest()["nodes_modes"])), "tree 0 has no node 99"),
    (changed(target_ids=[3] * len(forest()["target_ids"])), "a leaf has a weight for target 3, but there are 1"),
    (changed(target_ids=[0]), "the lists of leaf weights"),
    (changed(base_values=[1.0, 2.0]), "base_values has 2 values, but there are 1 scores"),
    (changed(aggregate_function="MEDIAN"), "aggregate_function is 'MEDIAN'"),
    (changed(post_transform="PROBIT"), "post_transform = PROBIT is not supported")])
def test_what_is_no_forest_is_refused(attrs, message):
    with pytest.raises(ModelError, match=message):
        imported("TreeEnsembleRegressor", [rows()], **attrs, **ML)


def test_nodes_in_a_circle_are_refused():
    nodes = {"treeids": [0, 0, 0, 0], "nodeids": [0, 1, 2, 3], "featureids": [0] * 4, "values": [0.0] * 4,
             "modes": [LEQ, LEQ, LEQ, "LEAF"], "truenodeids": [1, 2, 1, 0], "falsenodeids": [3, 3, 3, 0]}
    leaves = {"treeids": [0], "nodeids": [3], "ids": [0], "weights": [1.0]}
    attrs = {f"nodes_{k}": v for k, v in nodes.items()} | {f"target_{k}": v for k, v in leaves.items()}
    with pytest.raises(ModelError, match="the nodes form a cycle"):
        imported("TreeEnsembleRegressor", [rows()], n_targets=1, **attrs, **ML)


def test_scores_of_two_classes_that_are_one_have_no_two_bases():
    with pytest.raises(ModelError, match="base_values has 2 values, but there are 1 scores"):
        imported("TreeEnsembleClassifier", [rows()], (), 2, classlabels_int64s=[4, 7], base_values=[1.0, 2.0],
                 **forest(targets=2, prefix="class", ids=[0]), **ML)


def ensemble(**attrs):
    """Return TreeEnsemble's tables of two trees.

    x[0] <= 0.5 ? (x[1] < 1 ? leaf 0 : leaf 1) : leaf 2, and x[2] != 3 ? leaf 3 : leaf 4
    """
    return {"tree_roots": [0, 2], "nodes_modes": numpy_helper.from_array(np.uint8([0, 1, 5])),
            "nodes_featureids": [0, 1, 2], "nodes_splits": numpy_helper.from_array(np.float32([0.5, 1, 3])),
            "nodes_truenodeids": [1, 0, 3], "nodes_trueleafs": [0, 1, 1], "nodes_falsenodeids": [2, 1, 4],
            "nodes_falseleafs": [1, 1, 1], "leaf_targetids": [0, 1, 0, 1, 0],
            "leaf_weights": numpy_helper.from_array(np.float32([1, 2, 4, 8, 16])), "n_targets": 2} | attrs


ROWS = np.float32([[0, 0, 0], [0, 1, 3], [0.5, 2, 3], [1, 0, 3], [1, 0, 2], [math.nan, 0, math.nan]])


@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
def test_inner_nodes_and_leaves_may_be_apart(aggregate):
    check("TreeEnsemble", [ROWS], version=21, aggregate_function=aggregate, **ensemble(), **ML)


def test_doubles_are_compared_as_doubles():
    """A threshold of 1 separates 1 from the next larger double."""
    rows = np.array([[1, 0, 0], [np.nextafter(1.0, 2.0), 0, 0]])
    tables = {name: numpy_helper.from_array(numpy_helper.to_array(value).astype(np.float64))
              for name, value in ensemble().items() if name in ("nodes_splits", "leaf_weights")}
    tables["nodes_splits"] = numpy_helper.from_array(np.ones_like(numpy_helper.to_array(tables["nodes_splits"])))
    result = imported("TreeEnsemble", [rows], version=21, **ensemble() | tables, **ML)["o0"]
    assert result.dtype == np.float64 and not np.array_equal(result[0], result[1])


def test_a_row_ends_at_the_leaves_that_it_goes_to():
    result = imported("TreeEnsemble", [ROWS], version=21, **ensemble(), **ML)["o0"]
    np.testing.assert_array_equal(result, [[1, 8], [16, 2], [16, 2], [20, 0], [4, 8], [4, 8]])


@pytest.mark.parametrize("attrs, message", [
    ({"nodes_falseleafs": [1]}, "the tables of nodes, or those of leaves, differ in length"),
    ({"leaf_targetids": [0]}, "the tables of nodes, or those of leaves, differ in length"),
    ({"post_transform": 4}, "post_transform = PROBIT is not supported")])
def test_an_ensemble_that_is_none_is_refused(attrs, message):
    with pytest.raises(ModelError, match=message):
        imported("TreeEnsemble", [ROWS], version=21, **ensemble(**attrs), **ML)


def test_a_forest_is_not_written_as_onnx():
    graph = graph_from_onnx(model_of("TreeEnsembleRegressor", [rows()], n_targets=1, **forest(), **ML))
    with pytest.raises(ModelError, match=r"node 'n' \(Forest\): opset 20 of ONNX has no such operator"):
        onnx_from_graph(graph)
