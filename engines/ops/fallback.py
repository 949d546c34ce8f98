"""Operators without a class of ours, evaluated by the onnx package, slowly and one node at a time.

Such a node has the attribute `onnx_opset`, and `onnx_domain` if it is not the default. The package is imported when the
first of them is inferred or run.
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from infer_server.engines.errors import UnknownTensorError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import is_extent
from infer_server.engines.ops.op import OPS, Inputs, Op, Types, Values

if TYPE_CHECKING:
    import onnx


_PREFIX = "onnx."


def as_onnx(node: Node, opset: int, domain: str = "") -> Node:
    """Return an ONNX node that the onnx package evaluates; it is renamed if we have an operator of that name."""
    attrs = {**node.attrs, "onnx_opset": opset, **({"onnx_domain": domain} if domain else {})}
    return replace(node, op=f"{_PREFIX}{node.op}" if node.op in OPS and not domain else node.op, attrs=attrs)


def name_in_onnx(op: str) -> str:
    return op.removeprefix(_PREFIX)


RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                     "RandomUniformLike"})


class OnnxReferenceOp(Op, abstract=True):
    """Operator of the onnx package without subgraphs."""

    @classmethod
    def random(cls, node: Node) -> bool:
        return node.op in RANDOM

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        import onnx

        model = _model(node, inputs, values)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        found = {info.name: info.type.tensor_type for info in inferred.graph.output}
        return tuple(_tensor_type(node, found[name]) for name in node.outputs if name)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> tuple[Array, ...]:
        session = evaluator_of(node)
        names = [name for name in node.inputs if name]
        given = [a for a in arrays if a is not None]
        return tuple(np.asarray(y) for y in session.run(None, dict(zip(names, given, strict=False))))


def evaluator_of(node: Node) -> Any:
    """Return the onnx package's evaluator of one node."""
    return _evaluator(_Key(node))


class _Key:
    """Key of a node by identity: it is immutable, but its attributes may be unhashable."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __hash__(self) -> int:
        return id(self.node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.node is self.node


@lru_cache(maxsize=256)
def _evaluator(key: _Key) -> Any:
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(_model(key.node, [None] * len(key.node.inputs), ()))


def _model(node: Node, inputs: Inputs, values: Values) -> onnx.ModelProto:
    """Return a model of one node; inputs with known values are initialisers."""
    from onnx import helper, numpy_helper

    attrs: dict[str, Any] = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v
                             for k, v in node.attrs.items() if not k.startswith("onnx_")}
    domain = node.attrs.get("onnx_domain", "")
    proto = helper.make_node(name_in_onnx(node.op), list(node.inputs), list(node.outputs), domain=domain, **attrs)
    infos, initialisers = [], []
    for name, kind, value in zip(node.inputs, inputs, list(values) or [None] * len(inputs), strict=True):
        if not name:
            continue
        if value is not None and value.dtype != object:
            initialisers.append(numpy_helper.from_array(value, name))
        elif kind is None:
            infos.append(helper.make_empty_tensor_value_info(name))
        else:
            infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind.dtype), kind.shape))
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.outputs if name]
    graph = helper.make_graph([proto], node.op, infos, outputs, initialisers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, node.attrs["onnx_opset"])])


def _tensor_type(node: Node, proto: Any) -> TensorType:
    from onnx import helper

    if not proto.HasField("shape") or not proto.elem_type:
        raise UnknownTensorError("the shape of the result depends on data, which is not supported", node.inputs)
    shape = []
    for d in proto.shape.dim:
        if not d.HasField("dim_value") and not d.dim_param:
            raise UnknownTensorError("an extent of the result depends on data, which is not supported", node.inputs)
        shape.append(d.dim_value if d.HasField("dim_value") else d.dim_param)
    if any(isinstance(d, str) and not is_extent(d) for d in shape):     # onnx invents names for unknown extents
        raise UnknownTensorError("an extent of the result depends on data, which is not supported", node.inputs)
    return TensorType(np.dtype(helper.tensor_dtype_to_np_dtype(proto.elem_type)), tuple(shape))
