"""Facts about ONNX nodes for the partitioning: inputs needed by value, host operators, tensors read, constants."""
from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import onnx
from onnx import helper, numpy_helper

from infer_server.engines.frontend.branches import defined_in
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.frontend.onnx_file import array_of
from infer_server.engines.ir.graph import Array

# Inputs on whose values output shapes depend, by operator of the default domain: the importer must know them.
BY_VALUE: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConstantOfShape": (0,),
    "CumProd": (1,), "CumSum": (1,), "DFT": (1, 2), "Dropout": (2,), "Expand": (1,), "HammingWindow": (0,),
    "HannWindow": (0,), "If": (0,), "MaxUnpool": (2,), "MelWeightMatrix": (0, 1, 2, 3, 4), "OneHot": (1,),
    "Pad": (1, 3), "Range": (0, 1, 2), "ReduceL1": (1,), "ReduceL2": (1,), "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,), "ReduceMax": (1,), "ReduceMean": (1,), "ReduceMin": (1,), "ReduceProd": (1,),
    "ReduceSum": (1,), "ReduceSumSquare": (1,), "Reshape": (1,), "Resize": (1, 2, 3), "STFT": (1, 3),
    "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,),
    "Unsqueeze": (1,), "Upsample": (1,)}
SELECTS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})   # extents of results depend on data
NO_TENSORS = frozenset({        # sequences, optionals, strings
    "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence",
    "StringConcat", "StringNormalizer", "StringSplit"})
CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_SHAPES = 64            # most elements of a tensor of extents or axes
Kinds = Mapping[str, onnx.TypeProto]        # types of tensors, as far as ONNX infers them


def is_standard(node: onnx.NodeProto) -> bool:
    return node.domain in ("", "ai.onnx")


def reads(node: onnx.NodeProto) -> list[str]:
    """Return the tensors that a node reads, including those that its subgraphs capture, without duplicates."""
    return list(dict.fromkeys([*filter(None, node.input), *(name for g in graphs_in(node) for name in captured(g))]))


def captured(graph: onnx.GraphProto) -> list[str]:
    """Return the tensors that a subgraph captures from the graphs around it."""
    made = defined_in(graph)
    found = [name for node in graph.node for name in reads(node)] + [value.name for value in graph.output]
    return [name for name in dict.fromkeys(found) if name not in made]


def may_need_cuts(graph: onnx.GraphProto) -> bool:
    """Return True if a node, input or output may require a program in place of one graph."""
    return any(is_standard(node) and node.op_type in SELECTS | NO_TENSORS | CONTROL for node in graph.node) or any(
        not value.type.HasField("tensor_type") or value.type.tensor_type.elem_type == onnx.TensorProto.STRING
        for value in (*graph.input, *graph.output) if value.name not in _maps_of(graph))


def _maps_of(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the outputs of ZipMaps, which become tensors of probabilities (frontend/operators/ml/linear.py)."""
    return frozenset(name for node in graph.node if (node.domain, node.op_type) == ("ai.onnx.ml", "ZipMap")
                     for name in node.output)


def kinds_of(model: onnx.ModelProto, weights: Mapping[str, Array]) -> dict[str, onnx.TypeProto]:
    """Return the types that ONNX infers for the tensors of a model and its subgraphs, whose names must be unique.

    `weights` are the initializers, which the model itself lacks.
    """
    with suppress(Exception):  # inference raises many kinds; tensors without an inferred type are treated as any tensor
        model = onnx.shape_inference.infer_shapes(_with_weights(model, weights))
    found: dict[str, onnx.TypeProto] = {}

    def look(graph: onnx.GraphProto) -> None:
        found.update({value.name: value.type for value in (*graph.input, *graph.output, *graph.value_info)
                      if value.type.WhichOneof("value")})
        found.update(dict.fromkeys(_maps_of(graph), helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)))
        for node in graph.node:
            for inner in graphs_in(node):
                look(inner)

    look(model.graph)
    return found


def _with_weights(model: onnx.ModelProto, weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Return a copy for shape inference, with small weights as initializers and the types of larger ones as inputs.

    It also declares the strings that Tokenizers output, which ONNX does not know.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.value_info.extend(helper.make_tensor_value_info(name, onnx.TensorProto.STRING, None)
                                 for node in copy.graph.node if node.op_type == "Tokenizer" for name in node.output)
    known = {value.name for value in copy.graph.input}
    for name, array in weights.items():
        if array.size <= _SHAPES:
            copy.graph.initializer.append(numpy_helper.from_array(array, name))
        elif name not in known:
            copy.graph.input.append(helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape))
    return copy


def constant_of(model: str, node: onnx.NodeProto) -> Array | None:
    """Return the value of a Constant; None for other nodes and for sparse values."""
    if node.op_type != "Constant" or not is_standard(node) or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    if attribute.name == "value":
        return array_of(model, attribute.t)
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name in kinds:
        return np.asarray(helper.get_attribute_value(attribute), kinds[attribute.name])
    if attribute.name in ("value_string", "value_strings"):
        value = helper.get_attribute_value(attribute)
        return np.asarray([v.decode() for v in value] if isinstance(value, list) else value.decode(), object)
    return None


def holds_numbers(kind: onnx.TypeProto | None) -> bool:
    """Return True if a type is a tensor of numbers, or unknown."""
    return kind is None or kind.HasField("tensor_type") and kind.tensor_type.elem_type != onnx.TensorProto.STRING


def is_small(kind: onnx.TypeProto | None) -> bool:
    """Return True if a tensor may be a deciding input: integers of at most one axis, or few elements."""
    if kind is None or not kind.HasField("tensor_type"):
        return kind is None
    tensor = kind.tensor_type
    integers = tensor.elem_type not in _FLOATS
    if not tensor.HasField("shape"):
        return integers
    known = [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else 1 << 30 for d in tensor.shape.dim]
    size = 1
    for extent in known:
        size *= extent
    return integers and len(known) <= 1 or size <= (64 if integers else 16)


_FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16,
                     onnx.TensorProto.DOUBLE})
