"""Lower ensembles of decision trees, in all forms of ONNX, to Forest nodes with one table (engines/ops/trees.py)."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, ml
from infer_server.engines.frontend.operators.ml.features import as_float, floats
from infer_server.engines.frontend.operators.ml.linear import checked, classified, labels_of, transformed
from infer_server.engines.frontend.operators.normalise import Beyond, OperatorCall
from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ir.shapes import fixed
from infer_server.engines.ops.trees import FLAGS, LEFT_IF_EQUAL, LEFT_IF_MISSING

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")     # numbered from 0
_MEMBER, _LEAF = "BRANCH_MEMBER", "LEAF"
_KINDS = {mode: number for number, mode in enumerate((*_MODES, _LEAF), 1)}
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
ANOTHER = 400           # cost of another Forest node (a call and an addition) in steps of a tree
_NUMBERED_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


@dataclass
class _NodeTable:
    """Table of nodes for Forest; a weight is NaN where a leaf has none for a target."""
    columns: Array
    thresholds: Array
    flags: Array
    left: Array
    right: Array
    roots: Array
    weights: Array

    def leaves_last(self) -> _NodeTable:
        """Return the table with the inner nodes before the leaves: a walk compares numbers of nodes to find its end."""
        is_leaf = self.left == np.arange(len(self.left))
        if is_leaf[np.count_nonzero(~is_leaf):].all():
            return self
        order = np.argsort(is_leaf, kind="stable")
        numbers = np.empty(len(order), np.int32)
        numbers[order] = np.arange(len(order), dtype=np.int32)
        left, right = (numbers[child[order]] for child in (self.left, self.right))
        return _NodeTable(self.columns[order], self.thresholds[order], self.flags[order], left, right,
                          numbers[self.roots], self.weights[order])

    def depths(self) -> Array:
        """Return the depth of each tree in steps from its root. Raise GraphError if the nodes have a cycle."""
        count, steps = len(self.left), 0
        depths, positions, trees = np.zeros(len(self.roots), np.int64), self.roots, np.arange(len(self.roots))
        while np.any(inner := self.left[positions] != positions):
            steps += 1
            if steps > count:
                raise GraphError("the nodes form a cycle")
            positions, trees = positions[inner], trees[inner]
            depths[trees] = steps
            children = np.append(self.left[positions], self.right[positions])
            trees, positions = np.divmod(np.unique(np.append(trees, trees) * count + children), count)
        return depths

    def scores(self, w: StandardNodeBuilder, x: str, aggregate: str, base: Sequence[float]) -> str:
        """Write the nodes that compute the scores of the rows of x, and return their name.

        A tree without a weight for a target is left out of its minimum or maximum; without any tree that is 0. In a
        sum, trees of one leaf, as boosting ends with, become a part of the base, and trees of unlike depths become
        several Forest nodes.
        """
        return self.leaves_last()._scores(w, x, aggregate, base)

    def _scores(self, w: StandardNodeBuilder, x: str, aggregate: str, base: Sequence[float]) -> str:
        nothing, dtype = {"MIN": np.inf, "MAX": -np.inf}.get(aggregate, 0), self.weights.dtype
        weights = np.where(np.isnan(self.weights), np.array(nothing, dtype), self.weights)
        added, roots, depths = np.asarray(base, dtype), self.roots, self.depths()
        if aggregate == "SUM" and depths.any():
            added = added + weights[roots[depths == 0]].sum(axis=0)
            roots, depths = roots[depths > 0], depths[depths > 0]
        whole = np.dtype(f"int{8 * self.thresholds.itemsize}")
        flagged = self.columns << FLAGS | self.flags
        records = np.stack([flagged, self.thresholds.view(whole), self.right, self.left], axis=1).astype(whole)
        nodes, weigh = w.constant(records), w.constant(weights)
        parts = _alike(depths) if aggregate in ("SUM", "AVERAGE") else [np.arange(len(roots))]
        y = reduce(partial(w, "Add"), (
            w("Forest", x, nodes, w.constant(roots[part]), weigh, depth=int(depths[part].max(initial=0)),
              aggregate=aggregate if len(parts) == 1 else "SUM") for part in parts))
        if aggregate == "AVERAGE" and len(parts) > 1:
            y = w("Mul", y, w.number(1 / len(roots), dtype))
        if nothing and np.any(np.isnan(self.weights[self.left == np.arange(len(self.left))])):
            y = w("Where", w("IsInf", y), w.number(0, dtype), y)
        return w("Add", y, w.constant(added)) if added.any() else y


def _alike(depths: Array) -> list[Array]:
    """Group trees of similar depth into forests, such that the total cost in steps is least.

    A forest costs its deepest tree's steps for each of its trees, plus ANOTHER. Returns the trees of each forest.
    """
    levels, counts = np.unique(depths, return_counts=True)
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]         # per number of levels: (cost, starts of the forests)
    for end in range(1, len(levels) + 1):
        best.append(min((best[start][0] + int(counts[start:end].sum() * levels[end - 1]) + ANOTHER,
                         (*best[start][1], start)) for start in range(end)))
    forest = np.searchsorted(best[-1][1], np.searchsorted(levels, depths), side="right")
    return [np.flatnonzero(forest == number) for number in np.unique(forest)]


def _table(modes: Sequence[str], columns: Array, thresholds: Array, missing: Array, left: Array, right: Array,
           roots: Array, weights: Array, width: int) -> _NodeTable:
    """Return the table with all comparisons as <= or ==: x < t is x <= the float before t; x >= t swaps children."""
    kind = np.fromiter((_KINDS.get(mode, 0) for mode in modes), np.int8, len(modes))
    left, right, leaves = left.copy(), right.copy(), kind == _KINDS[_LEAF]
    if unknown := set(modes) - {*_MODES, _LEAF}:
        raise GraphError(f"nodes_modes has {', '.join(sorted(unknown))}, but must have {', '.join(_MODES)}")
    if np.any((columns[~leaves] < 0) | (columns[~leaves] >= width)):
        raise GraphError(f"nodes_featureids has indices outside the input's {width} columns")
    left[leaves] = right[leaves] = np.flatnonzero(leaves)
    before = _is_any(kind, "BRANCH_LT", "BRANCH_GTE")
    with np.errstate(over="ignore"):        # the float before the least one is -inf
        thresholds = np.where(before, np.nextafter(thresholds, np.array(-np.inf, thresholds.dtype)), thresholds)
    opposite = _is_any(kind, "BRANCH_GTE", "BRANCH_GT", "BRANCH_NEQ")
    # A missing value compares as false (true for !=), unless its node tracks true.
    true_if_missing = (missing != 0) | _is_any(kind, "BRANCH_NEQ")
    left, right = np.where(opposite, right, left), np.where(opposite, left, right)
    flags = (LEFT_IF_EQUAL * _is_any(kind, "BRANCH_EQ", "BRANCH_NEQ")
             + LEFT_IF_MISSING * (true_if_missing != opposite)).astype(np.uint8)
    flags[leaves] = flags[~leaves][:1].max(initial=0)       # unused; often all nodes then have equal flags
    columns = np.where(leaves, 0, columns)
    whole = [array.astype(np.int32) for array in (columns, left, right, roots)]
    return _NodeTable(whole[0], thresholds, flags, whole[1], whole[2], whole[3], weights)


def _is_any(kind: Array, *modes: str) -> Array:
    """Return which nodes have one of the modes."""
    return reduce(np.logical_or, (kind == _KINDS[mode] for mode in modes))


# ---- ensembles of opset 1 to 4
def _of_nodes(call: OperatorCall, prefix: str, targets: int) -> _NodeTable:
    """Return the table of an ensemble whose nodes are listed by tree and number, with weights in `prefix` lists."""
    trees, numbers = (np.asarray(call.attr(f"nodes_{name}", ()), np.int64) for name in ("treeids", "nodeids"))
    count = len(trees)
    if not count or len(numbers) != count:
        raise GraphError(f"nodes_treeids has {count} values, but nodes_nodeids {len(numbers)}")
    positions, modes = _NodeIndex(trees, numbers), call.attr("nodes_modes") or ()
    if len(modes) != count:
        raise GraphError(f"nodes_modes has {len(modes)} values, but there are {count} nodes")
    inner = np.fromiter((mode != _LEAF for mode in modes), bool, count)

    def of_each(name: str, missing: Any = None) -> Array:
        found = _numbers(call, f"nodes_{name}")
        if found is None and missing is not None:
            return np.full(count, missing)
        if found is None or len(found) != count:
            raise GraphError(f"nodes_{name} has {0 if found is None else len(found)} values, but there are {count} "
                             "nodes")
        return found

    def children(name: str) -> Array:
        found = np.zeros(count, np.int64)
        found[inner] = positions.find(trees[inner], of_each(name).astype(np.int64)[inner])
        return found

    call.ignore("nodes_hitrates", "nodes_hitrates_as_tensor")       # statistics of training
    left, right = children("truenodeids"), children("falsenodeids")
    is_root = np.ones(count, bool)
    is_root[left[inner]] = is_root[right[inner]] = False
    return _table(modes, of_each("featureids").astype(np.int64), of_each("values").astype(np.float32),
                  of_each("missing_value_tracks_true", 0), left, right, np.flatnonzero(is_root),
                  _weights(call, prefix, positions, count, targets), fixed(call.type().shape[-1:])[0])


class _NodeIndex:
    """Index from (tree, number) to rows of the table."""

    def __init__(self, trees: Array, numbers: Array) -> None:
        self._trees, self._numbers = np.unique(trees), np.unique(numbers)
        keys = self._keys(trees, numbers)
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def _keys(self, trees: Array, numbers: Array) -> Array:
        """Return one integer for each pair; pairs of unknown trees or numbers get keys of other nodes."""
        columns = np.searchsorted(self._numbers, numbers)
        return np.searchsorted(self._trees, trees) * (len(self._numbers) + 1) + columns

    def find(self, trees: Array, numbers: Array) -> Array:
        """Return the row of each pair, the last one of duplicates. Raise GraphError for a pair without a node."""
        at = np.searchsorted(self._sorted, self._keys(trees, numbers), side="right") - 1
        positions = self._order[np.maximum(at, 0)]
        column, row = (np.minimum(np.searchsorted(known, wanted), len(known) - 1)
                       for known, wanted in ((self._numbers, numbers), (self._trees, trees)))
        wrong = ((self._sorted[np.maximum(at, 0)] != self._keys(trees, numbers)) | (self._numbers[column] != numbers)
                 | (self._trees[row] != trees))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise GraphError(f"tree {trees[first]} has no node {numbers[first]}")
        return positions


def _weights(call: OperatorCall, prefix: str, positions: _NodeIndex, count: int, targets: int) -> Array:
    trees, numbers, ids = (np.asarray(call.attr(f"{prefix}_{name}", ()), np.int64)
                           for name in ("treeids", "nodeids", "ids"))
    given = _numbers(call, f"{prefix}_weights")
    if given is None or not len(trees) == len(numbers) == len(ids) == len(given):
        raise GraphError("the lists of leaf weights, their trees, nodes and targets differ in length")
    if np.any(beyond := (ids < 0) | (ids >= targets)):
        raise GraphError(f"a leaf has a weight for target {ids[np.argmax(beyond)]}, but there are {targets}")
    found, weights = positions.find(trees, numbers), np.full((count, targets), np.nan, np.float32)
    weights[found, ids] = 0
    np.add.at(weights, (found, ids), given.astype(np.float32))
    return weights


def _numbers(call: OperatorCall, name: str) -> Array | None:
    """Return an attribute that is a list, or a tensor under the name with `_as_tensor`."""
    found, tensor = call.attr(name), call.attr(f"{name}_as_tensor")
    given = tensor if tensor is not None and np.size(tensor) else found
    return None if given is None else np.asarray(given)


def _rows(w: StandardNodeBuilder, call: OperatorCall) -> str:
    x = as_float(w, call)
    return w.reshape(x, 1, -1) if call.rank == 1 else x


def _bases(call: OperatorCall) -> list[float]:
    found = _numbers(call, "base_values")
    return [] if found is None else [float(number) for number in found]


def _base(call: OperatorCall, count: int) -> list[float]:
    numbers = _bases(call) or [0.0] * count
    if len(numbers) != count:
        raise GraphError(f"base_values has {len(numbers)} values, but there are {count} scores")
    return numbers


@ml("TreeEnsembleRegressor")
def _regressor(call: OperatorCall) -> list[Node]:
    w, targets, aggregate = StandardNodeBuilder(call), call.attr("n_targets") or 1, call.attr("aggregate_function",
                                                                                              "SUM")
    if aggregate not in _AGGREGATES:
        raise GraphError(f"aggregate_function is '{aggregate}', but must be one of {', '.join(_AGGREGATES)}")
    scores = _of_nodes(call, "target", targets).scores(w, _rows(w, call), aggregate, _base(call, targets))
    return transformed(w, scores, checked(call.attr("post_transform", "NONE")))


@ml("TreeEnsembleClassifier")
def _classifier(call: OperatorCall) -> list[Node]:
    w, labels, ids = StandardNodeBuilder(call), labels_of(call), np.unique(call.attr("class_ids", ()))
    transform, count = checked(call.attr("post_transform", "NONE")), len(labels)
    table = _of_nodes(call, "class", count)
    if count == 2 and len(ids) == 1:
        return _of_two(w, call, labels, table, transform)
    x = _rows(w, call)
    scores = table.scores(w, x, "SUM", _base(call, count))
    return classified(w, labels, scores, transform, index=_voted_for(w, call, table, x, scores))


def _voted_for(w: StandardNodeBuilder, call: OperatorCall, table: _NodeTable, x: str, scores: str) -> str:
    """Return the index of the largest score among classes with a weight in a leaf of the row, as in ONNX Runtime.

    Returns "" if the overall largest score decides: with two classes, with base values, if all weights are positive,
    or if each class has a tree all of whose leaves have a weight for it.
    """
    given, (leaves,) = ~np.isnan(table.weights), np.nonzero(table.left == np.arange(len(table.left)))
    if given.shape[1] < 3 or _bases(call) or np.nanmin(table.weights, initial=1) > 0:
        return ""
    _, tree = np.unique(np.array(call.attr("nodes_treeids"))[leaves], return_inverse=True)
    missing = np.zeros((tree.max() + 1, given.shape[1]), np.int64)
    np.add.at(missing, tree, ~given[leaves])
    if np.any(missing == 0, axis=0).all():
        return ""
    votes = replace(table, weights=given.astype(np.float32)).scores(w, x, "SUM", (0.0,) * given.shape[1])
    among = w("Where", w("Greater", votes, floats(w, 0)), scores, floats(w, -np.inf))
    return w("ArgMax", among, axis=1, keepdims=0)


def _of_two(w: StandardNodeBuilder, call: OperatorCall, labels: Array, table: _NodeTable, transform: str) -> list[Node]:
    """Lower a classifier of two classes whose trees have weights for one class only.

    The score is that of the second class, which is the result above 0, or above 1/2 if no weight is negative. As in
    ONNX Runtime, weights for class 0 count with the opposite sign for the other class.
    """
    positive = not np.any(table.weights < 0)
    limit = floats(w, 0.5 if positive else 0)
    if call.attr("class_ids")[0] == 1:
        scores = table.scores(w, _rows(w, call), "SUM", _base(call, 2))
        return classified(w, labels, scores, transform, w("Greater", w.cut(scores, 1, 1, 2), limit))
    table.weights = table.weights[:, :1]
    score = table.scores(w, _rows(w, call), "SUM", _base(call, 1))
    is_probability = positive and transform != "LOGISTIC"
    other = w("Sub", floats(w, 1), score) if is_probability else w("Neg", score)
    return classified(w, labels, w("Concat", other, score, axis=1), transform if transform == "LOGISTIC" else "NONE",
                      w("Greater", score, limit))


# ---- the ensemble of opset 5
@ml("TreeEnsemble")
def _ensemble(call: OperatorCall) -> list[Node]:
    """Lower TreeEnsemble, which lists inner nodes and leaves separately; double inputs are compared as doubles."""
    w, targets = StandardNodeBuilder(call), call.attr("n_targets") or 1
    dtype = np.dtype(np.float64 if call.type().dtype == np.float64 else np.float32)
    call.ignore("nodes_hitrates")
    numbers = {name: np.asarray(call.attr(f"nodes_{name}"))
               for name in ("modes", "featureids", "splits", "truenodeids", "trueleafs", "falsenodeids", "falseleafs")}
    leaf_targets, leaf_weights = (np.asarray(call.attr(f"leaf_{name}")) for name in ("targetids", "weights"))
    inner, leaves = len(numbers["modes"]), len(leaf_targets)
    if any(len(array) != inner for array in numbers.values()) or len(leaf_weights) != leaves:
        raise GraphError("the tables of nodes, or those of leaves, differ in length")
    if np.any(numbers["modes"] >= len(_MODES)):
        raise Beyond(f"nodes of mode {_MEMBER}")
    left, right = (np.append(numbers[f"{way}nodeids"] + inner * (numbers[f"{way}leafs"] != 0), np.zeros(leaves))
                   for way in ("true", "false"))
    missing = call.attr("nodes_missing_value_tracks_true") or (0,) * inner
    weights = np.full((inner + leaves, targets), np.nan, dtype)
    weights[inner + np.arange(leaves), leaf_targets] = leaf_weights
    nothing = np.zeros(leaves)
    table = _table([*(_MODES[mode] for mode in numbers["modes"]), *[_LEAF] * leaves],
                   np.append(numbers["featureids"], nothing), np.append(numbers["splits"], nothing).astype(dtype),
                   np.append(missing, nothing), left, right, np.array(call.attr("tree_roots")), weights,
                   fixed(call.type().shape[-1:])[0])
    x = call.node.inputs[0] if call.type().dtype == dtype else as_float(w, call)
    scores = table.scores(w, x, _AGGREGATES[call.attr("aggregate_function", 1)], (0.0,) * targets)
    return transformed(w, scores, checked(_NUMBERED_TRANSFORMS[call.attr("post_transform", 0)]), dtype=dtype)
