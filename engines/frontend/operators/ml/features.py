"""Lower operators of feature engineering: scalers, encoders and imputers."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, ml
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed

FLOAT = 1           # as TensorProto.DataType has it


def as_float(w: StandardNodeBuilder, call: OperatorCall, index: int = 0) -> str:
    """Return an input as float32, in which these operators compute."""
    name = call.node.inputs[index]
    return name if call.type(index).dtype == np.float32 else w("Cast", name, to=FLOAT)


def floats(w: StandardNodeBuilder, numbers: Any) -> str:
    return w.constant(np.array(numbers, np.float32))


@ml("Scaler")
def _scaler(call: OperatorCall) -> list[Node]:
    """Lower Scaler: (x - offset) * scale."""
    w, width = StandardNodeBuilder(call), fixed(call.type().shape[-1:])[0]
    offset, scale = (call.attr(name) or () for name in ("offset", "scale"))
    for name, numbers in (("offset", offset), ("scale", scale)):
        if len(numbers) not in (1, width):
            raise GraphError(f"{name} has {len(numbers)} values, but must have one, or one for each of {width} columns")
    return w.finish("Mul", w("Sub", as_float(w, call), floats(w, offset)), floats(w, scale))


@ml("Normalizer")
def _normalizer(call: OperatorCall) -> list[Node]:
    """Lower Normalizer: divide rows by their norm, except rows of norm 0."""
    w, norm = StandardNodeBuilder(call), call.attr("norm", "MAX")
    op = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}.get(norm)
    if op is None:
        raise GraphError(f"norm is '{norm}', but must be MAX, L1 or L2")
    x = as_float(w, call)
    size = w(op, x, w.ints(-1), keepdims=1)
    one, zero = (floats(w, number) for number in (1, 0))
    return w.finish("Div", x, w("Where", w("Equal", size, zero), one, size))


@ml("Binarizer")
def _binarizer(call: OperatorCall) -> list[Node]:
    """Lower Binarizer: 1 where x is above the threshold, else 0."""
    w, x = StandardNodeBuilder(call), call.node.inputs[0]
    above = w("Greater", x, w.number(call.attr("threshold", 0.0), call.type().dtype))
    return w.finish("CastLike", above, x)


@ml("Imputer")
def _imputer(call: OperatorCall) -> list[Node]:
    """Lower Imputer: replace missing values, marked by a number or NaN, by one value or one per column."""
    w, x, dtype = StandardNodeBuilder(call), call.node.inputs[0], call.type().dtype
    kind = "float" if dtype.kind == "f" else "int64"
    values, missing = call.attr(f"imputed_value_{kind}s"), call.attr(f"replaced_value_{kind}", 0)
    call.ignore(*(f"{name}_value_{other}" for other in ("float", "floats", "int64", "int64s")
                  for name in ("imputed", "replaced")))
    if not values or len(values) not in (1, *fixed(call.type().shape[-1:])):
        raise GraphError(f"the imputed values are {values}, but must be one value, or one for each column")
    where = w("IsNaN", x) if math.isnan(missing) else w("Equal", x, w.number(missing, dtype))
    return w.finish("Where", where, w.constant(np.array(values, dtype)), x)


@ml("ArrayFeatureExtractor")
def _columns(call: OperatorCall) -> list[Node]:
    """Lower ArrayFeatureExtractor: select columns; a vector counts as one row."""
    w, (x, places) = StandardNodeBuilder(call), call.node.inputs
    if call.rank == 1:
        x = w.reshape(x, 1, -1)
    return w.finish("Gather", x, w.reshape(places, -1), axis=-1)


@ml("FeatureVectorizer")
def _side_by_side(call: OperatorCall) -> list[Node]:
    """Lower FeatureVectorizer: join inputs, each cut or zero-padded to its number of columns in `inputdimensions`."""
    w, widths = StandardNodeBuilder(call), call.attr("inputdimensions") or ()
    if len(widths) != len(call.node.inputs):
        raise GraphError(f"inputdimensions has {len(widths)} values, but the node has {len(call.node.inputs)} inputs")
    return w.finish("Concat", *(_wide(w, call, index, width) for index, width in enumerate(widths)), axis=1)


def _wide(w: StandardNodeBuilder, call: OperatorCall, index: int, width: int) -> str:
    """Return an input as rows of `width` columns. An input of one axis is a row, as in ONNX Runtime."""
    shape = call.type(index).shape
    x, found = as_float(w, call, index), math.prod(fixed(shape[1:] or shape))
    rows = x if len(shape) == 2 else w("Flatten", x, axis=min(len(shape) - 1, 1))
    if found < width:
        return w("Pad", rows, w.ints(0, 0, 0, width - found))
    return w.cut(rows, 1, 0, width)


@ml("OneHotEncoder")
def _one_hot(call: OperatorCall) -> list[Node]:
    """Lower OneHotEncoder: 1 at the index of the category; all zeros for an unknown one."""
    w, categories = StandardNodeBuilder(call), call.attr("cats_int64s")
    call.ignore("zeros")            # whether to fail for an unknown category
    if not categories:
        raise GraphError("string categories are not supported")
    x = w("Unsqueeze", call.node.inputs[0], w.ints(-1))
    same = w("Equal", x, w.constant(np.array(categories, call.type().dtype)))
    return w.finish("Cast", same, to=FLOAT)


@ml("LabelEncoder")
def _encoder(call: OperatorCall) -> list[Node]:
    """Lower LabelEncoder: the value of the equal key, or the default. From opset 4 on NaN equals a NaN key."""
    w = StandardNodeBuilder(call)
    keys, values = (_table(call, which) for which in ("keys", "values"))
    if len(keys) != len(values):
        raise GraphError(f"there are {len(keys)} keys, but {len(values)} values")
    kind = "float" if values.dtype.kind == "f" else "int64"
    usual = call.attr("default_tensor", call.attr(f"default_{kind}", -0.0 if kind == "float" else -1))
    call.ignore("default_float", "default_int64", "default_string")
    if keys.dtype != call.type().dtype:
        raise GraphError(f"the keys are {keys.dtype}, but the input is {call.type().dtype}")
    x = w("Unsqueeze", call.node.inputs[0], w.ints(-1))
    same = w("Equal", x, w.constant(keys))
    if call.opset >= 4 and np.isnan(keys).any():
        same = w("Or", same, w("And", w("IsNaN", x), w.constant(np.isnan(keys))))
    place = w("ArgMax", w("Cast", w("Concat", same, w("Not", _any(w, same)), axis=-1), to=FLOAT), axis=-1, keepdims=0)
    return w.finish("Gather", w.constant(np.append(values, np.asarray(usual, values.dtype).reshape(-1))), place, axis=0)


def _any(w: StandardNodeBuilder, truths: str) -> str:
    one = w("ReduceMax", w("Cast", truths, to=FLOAT), w.ints(-1), keepdims=1)
    return w("Greater", one, floats(w, 0))


def _table(call: OperatorCall, which: str) -> np.ndarray[Any, Any]:
    """Return the keys or the values, from whichever attribute holds them."""
    kinds = {"int64s": np.int64, "floats": np.float32, "tensor": None}
    for kind, dtype in kinds.items():
        if (found := call.attr(f"{which}_{kind}")) is not None:
            table = np.asarray(found, dtype)
            if table.dtype.kind in "if":
                return table.reshape(-1)
    raise GraphError(f"string {which} are not supported")
