"""Lower support vector machines for regression and classification (models of libsvm and liblinear)."""
from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, ml
from infer_server.engines.frontend.operators.ml.features import FLOAT, as_float, floats
from infer_server.engines.frontend.operators.ml.linear import checked, classified, labels_of
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed

LEAST = 1e-7                # probability of a class against another, as libsvm bounds it

Matrix = np.ndarray[Any, np.dtype[np.float32]]


@ml("SVMRegressor")
def _regressor(call: OperatorCall) -> list[Node]:
    """Lower SVMRegressor: sum of coefficients * kernel(x, support vectors) + rho; for one class its sign, 1 or -1."""
    w, count, width = StandardNodeBuilder(call), call.attr("n_supports", 0), fixed(call.type().shape[-1:])[0]
    transform, rho = checked(call.attr("post_transform", "NONE")), call.attr("rho") or (0.0,)
    coefficients = np.array(call.attr("coefficients"), np.float32).reshape(1, -1)
    vectors = np.array(call.attr("support_vectors") or (), np.float32)
    if transform != "NONE":
        raise GraphError(f"post_transform = {transform} is not supported")
    if count:
        y = _weighed(w, call, _rows(w, call), vectors.reshape(count, width), coefficients, rho)
    else:       # a linear model without vectors
        call.ignore("kernel_params", "kernel_type")
        y = _line(w, _rows(w, call), coefficients, rho)
    if not call.attr("one_class", 0):
        return w.finish("Identity", y)
    return w.finish("Where", w("Greater", y, floats(w, 0)), *(floats(w, number) for number in (1, -1)))


@ml("SVMClassifier")
def _classifier(call: OperatorCall) -> list[Node]:
    """Lower SVMClassifier: each pair of classes has a score, above 0 for its first class; most pairs won decide.

    The scores output has those of the pairs, or -score and score for two classes; with prob_a and prob_b it has a
    probability per class. Without support vectors each class has its own score. Follows ONNX Runtime.
    """
    w, labels = StandardNodeBuilder(call), labels_of(call)
    count, width = len(labels), fixed(call.type().shape[-1:])[0]
    each, transform = call.attr("vectors_per_class") or (), checked(call.attr("post_transform", "NONE"))
    coefficients, rho = (np.array(call.attr(name) or (), np.float32) for name in ("coefficients", "rho"))
    if not sum(each):
        call.ignore("kernel_type", "kernel_params", "support_vectors", "prob_a", "prob_b")
        return _of_own_scores(w, call, labels, coefficients, rho, transform)
    vectors, pairs = np.array(call.attr("support_vectors") or (), np.float32), [*combinations(range(count), 2)]
    if len(each) != count or len(vectors) != sum(each) * width or len(coefficients) < (count - 1) * sum(each) or (
            len(rho) < len(pairs)):
        raise GraphError(f"support_vectors has {len(vectors)} values, coefficients {len(coefficients)} and rho "
                         f"{len(rho)}, which do not fit {count} classes and {sum(each)} vectors of {width} columns")
    weights = _of_pairs(coefficients.reshape(-1, sum(each)), np.cumsum((0, *each)), pairs)
    scores = _weighed(w, call, _rows(w, call), vectors.reshape(-1, width), weights, rho[:len(pairs)])
    place = w("ArgMax", _votes(w, scores, pairs, count), axis=1, keepdims=0)
    if call.attr("prob_a"):
        scores = _coupled(w, call, scores, pairs, count)
    elif count == 2:
        is_probability = transform in ("SOFTMAX", "SOFTMAX_ZERO")       # ... to ONNX Runtime, and stays as it is
        opposite = w("Sub", floats(w, 1), scores) if is_probability else w("Neg", scores)
        scores, transform = w("Concat", opposite, scores, axis=1), "NONE" if is_probability else transform
    return classified(w, labels, scores, transform, index=place)


def _of_own_scores(w: StandardNodeBuilder, call: OperatorCall, labels: np.ndarray, coefficients: Matrix, rho: Matrix,
                   transform: str) -> list[Node]:
    """Lower a classifier without vectors: scores x coefficients' + rho[0], with one rho for all classes."""
    width = fixed(call.type().shape[-1:])[0]
    if len(coefficients) != len(labels) * width or not len(rho):
        raise GraphError(f"coefficients has {len(coefficients)} values and rho {len(rho)}, which do not fit "
                         f"{len(labels)} classes of {width} columns")
    scores = _line(w, _rows(w, call), coefficients.reshape(len(labels), width), [rho[0]])
    place = w("ArgMax", scores, axis=1, keepdims=0)
    if len(labels) == 2:        # the larger score alone decides
        limit, compared = (0.5, "GreaterOrEqual") if np.all(coefficients >= 0) else (0.0, "Greater")
        most = w("ReduceMax", scores, w.ints(1), keepdims=0)
        place = w("Where", w(compared, most, floats(w, limit)), w.ints(1), place)
    return classified(w, labels, scores, transform, index=place)


def _of_pairs(coefficients: Matrix, starts: Any, pairs: list[tuple[int, int]]) -> Matrix:
    """Return the weights [pairs, vectors] of the scores of pairs.

    The vectors of both classes of a pair have coefficients against the other class. `coefficients` [classes - 1,
    vectors] has no row for a class against itself.
    """
    weights = np.zeros((len(pairs), coefficients.shape[1]), np.float32)
    for pair, (i, j) in enumerate(pairs):
        for own, other in ((i, j - 1), (j, i)):
            members = slice(starts[own], starts[own + 1])
            weights[pair, members] = coefficients[other, members]
    return weights


def _votes(w: StandardNodeBuilder, scores: str, pairs: list[tuple[int, int]], count: int) -> str:
    """Return the number of pairs that each class wins, float32 [rows, classes]."""
    first, second = (np.eye(count, dtype=np.float32)[[pair[which] for pair in pairs]] for which in (0, 1))
    won = w("Cast", w("Greater", scores, floats(w, 0)), to=FLOAT)
    return w("Gemm", won, w.constant(first - second), w.constant(second.sum(axis=0)))


def _coupled(w: StandardNodeBuilder, call: OperatorCall, scores: str, pairs: list[tuple[int, int]], count: int) -> str:
    """Return class probabilities by pairwise coupling of logistic functions of the pairs' scores (Platt scaling)."""
    a, b = (np.array(call.attr(name) or (), np.float32) for name in ("prob_a", "prob_b"))
    if min(len(a), len(b)) < len(pairs):
        raise GraphError(f"prob_a has {len(a)} values and prob_b {len(b)}, but there are {len(pairs)} pairs of classes")
    line = w("Add", w("Mul", scores, w.constant(a[:len(pairs)])), w.constant(b[:len(pairs)]))
    of_first = w("Clip", w("Sigmoid", w("Neg", line)), floats(w, LEAST), floats(w, 1 - np.float32(LEAST)))
    both = w("Concat", of_first, w("Sub", floats(w, 1), of_first), axis=1)
    places = np.zeros((count, count), np.int64)
    for pair, (i, j) in enumerate(pairs):
        places[i, j], places[j, i] = pair, len(pairs) + pair
    return w("PairwiseCoupling", w("Gather", both, w.constant(places), axis=1))


def _rows(w: StandardNodeBuilder, call: OperatorCall) -> str:
    x = as_float(w, call)
    return w.reshape(x, 1, -1) if call.rank == 1 else x


def _weighed(w: StandardNodeBuilder, call: OperatorCall, x: str, vectors: Matrix, weights: Matrix, rho: Any) -> str:
    """Return kernel(x, vectors) weights' + rho; for a linear kernel weights and vectors are multiplied now."""
    if call.attr("kernel_type", "LINEAR") == "LINEAR":
        call.ignore("kernel_params")
        return _line(w, x, (weights.astype(np.float64) @ vectors).astype(np.float32), rho)
    return _line(w, _kernel(w, call, x, vectors), weights, rho)


def _line(w: StandardNodeBuilder, x: str, weights: Matrix, rho: Any) -> str:
    return w("Gemm", x, w.constant(weights), floats(w, rho), transB=1)


def _kernel(w: StandardNodeBuilder, call: OperatorCall, x: str, vectors: Matrix) -> str:
    """Return the kernel matrix [rows, vectors] for the parameters (gamma, coef0, degree).

    POLY: (gamma x v + coef0)**degree; SIGMOID: tanh(gamma x v + coef0); RBF: exp(-gamma |x - v|**2).
    """
    kind = call.attr("kernel_type")
    gamma, constant, degree = (*(call.attr("kernel_params") or ()), 0.0, 0.0, 0.0)[:3]
    if kind == "RBF":
        apart = w("Sub", w("Unsqueeze", x, w.ints(1)), w.constant(vectors[None]))
        return w("Exp", w("Mul", w("ReduceSumSquare", apart, w.ints(2), keepdims=0), floats(w, -gamma)))
    product = w("MatMul", x, w.constant(np.ascontiguousarray(vectors.T)))
    line = w("Add", w("Mul", product, floats(w, gamma)), floats(w, constant))
    if kind not in ("POLY", "SIGMOID"):
        raise GraphError(f"kernel_type is '{kind}', but must be LINEAR, POLY, RBF or SIGMOID")
    return w("Pow", line, floats(w, degree)) if kind == "POLY" else w("Tanh", line)
