"""Lower linear models, and the transforms from scores to probabilities."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, ml
from infer_server.engines.frontend.operators.ml.features import as_float, floats
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed

FLOAT32 = np.dtype(np.float32)

_TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")


@ml("LinearRegressor")
def _linear_regressor(call: OperatorCall) -> list[Node]:
    """Lower LinearRegressor: x coefficients' + intercepts. A single target is not transformed, as in ONNX Runtime."""
    w, targets = StandardNodeBuilder(call), call.attr("targets", 1)
    y = _scores(w, call, targets)
    transform = checked(call.attr("post_transform", "NONE"))
    return transformed(w, y, transform if targets > 1 else "NONE")


@ml("LinearClassifier")
def _linear_classifier(call: OperatorCall) -> list[Node]:
    """Lower LinearClassifier, with one score per class, or one score for two classes: above 0 means the second."""
    call.ignore("multi_class")      # used in training only
    w, labels = StandardNodeBuilder(call), labels_of(call)
    count = len(call.attr("coefficients") or ()) // fixed(call.type().shape[-1:])[0]
    scores, transform = _scores(w, call, count), checked(call.attr("post_transform", "NONE"))
    if count == 1 and len(labels) == 2:
        answer = w("Greater", scores, floats(w, 0))
        other = w("Neg", scores) if transform == "LOGISTIC" else w("Sub", floats(w, 1), scores)
        scores, transform = w("Concat", other, scores, axis=1), transform if transform == "LOGISTIC" else "NONE"
    elif count != len(labels):
        raise GraphError(f"the coefficients are for {count} scores, but there are {len(labels)} classes")
    else:
        answer = ""
    return classified(w, labels, scores, transform, answer)


def _scores(w: StandardNodeBuilder, call: OperatorCall, count: int) -> str:
    width = fixed(call.type().shape[-1:])[0]
    weights, intercepts = call.attr("coefficients") or (), call.attr("intercepts") or (0.0,) * count
    if len(weights) != count * width or len(intercepts) != count:
        raise GraphError(f"{len(weights)} coefficients and {len(intercepts)} intercepts do not fit {count} scores of "
                         f"{width} columns")
    x = as_float(w, call)
    if call.rank == 1:
        x = w.reshape(x, 1, -1)
    matrix = np.array(weights, np.float32).reshape(count, width)
    return w("Gemm", x, w.constant(matrix), floats(w, intercepts), transB=1)


# ---- from scores to answers
@ml("ZipMap")
def _zip_map(call: OperatorCall) -> list[Node]:
    """Replace a ZipMap, a map from class to probability for each row, by the tensor of probabilities."""
    call.notices.append(f"'{call.node.outputs[0]}' is the tensor of the probabilities instead of maps, in the order of "
                        f"the classes {_names(call, 'classlabels_int64s')}")
    return StandardNodeBuilder(call).finish("Identity", call.node.inputs[0])


def labels_of(call: OperatorCall) -> np.ndarray:
    """Return the integer classes; indices, with a notice, for classes with names."""
    numbers = call.attr("classlabels_ints") or call.attr("classlabels_int64s")
    if numbers:
        return np.array(numbers, np.int64)
    names = call.attr("classlabels_strings") or ()
    if not names:
        raise GraphError("class labels are missing")
    call.notices.append(f"'{call.node.outputs[0]}' is the index of a class instead of its name, in the order "
                        f"{_names(call, '')}")
    return np.arange(len(names))


def _names(call: OperatorCall, numbers: str) -> str:
    return ", ".join(map(str, call.attr(numbers) or call.attr("classlabels_strings") or ()))


def checked(transform: str) -> str:
    if transform not in _TRANSFORMS:
        raise GraphError(f"post_transform = {transform} is not supported")
    return transform


def classified(w: StandardNodeBuilder, labels: np.ndarray, scores: str, transform: str, answer: str = "",
               index: str = "") -> list[Node]:
    """Finish with the class of each row and the transformed scores.

    The class is that of index `index`, or the second of two where `answer` is true, or that of the largest score.
    """
    index = index or (w("Squeeze", w("Cast", answer, to=_INT64), w.ints(1)) if answer else
                      w("ArgMax", scores, axis=1, keepdims=0))
    w.output(0, "Gather", w.constant(labels), index, axis=0)
    return transformed(w, scores, transform, output=1)


def transformed(w: StandardNodeBuilder, scores: str, transform: str, output: int = 0,
                dtype: np.dtype[np.generic] = FLOAT32) -> list[Node]:
    """Finish output `output` with the transform (post_transform) of scores of this dtype."""
    if transform == "SOFTMAX_ZERO":
        zero, less = (w.number(number, dtype) for number in (0, 1e-7))
        counts = w("Greater", w("Abs", scores), less)
        peak = w("ReduceMax", scores, w.ints(1), keepdims=1)
        raised = w("Exp", w("Sub", scores, peak))
        total = w("ReduceSum", w("Where", counts, raised, zero), w.ints(1), keepdims=1)
        rest = w("Mul", scores, w("Exp", w("Neg", peak)))
        w.output(output, "Div", w("Where", counts, raised, rest), total)
        return w.nodes
    op, attrs = {"NONE": ("Identity", {}), "LOGISTIC": ("Sigmoid", {}), "SOFTMAX": ("Softmax", {"axis": 1})}[transform]
    w.output(output, op, scores, **attrs)
    return w.nodes


_INT64 = 7          # TensorProto.INT64
