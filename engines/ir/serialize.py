"""JSON form of nodes and graphs: no pickle, nothing executable. Arrays of a graph are stored separately, by name.

    graph_to_json(graph) -> (document, {name: array})         graph_from_json(document, arrays) -> Graph
"""
from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.ir.dtypes import dtype_in_file, name_in_file
from infer_server.engines.ir.graph import Array, Graph, Node, QParams, TensorType, verify

Json = dict[str, Any]


def node_to_json(node: Node) -> Json:
    """Convert a node and its body; small arrays in attributes are written as base64."""
    document: Json = {"op": node.op, "inputs": list(node.inputs), "outputs": list(node.outputs), "name": node.name,
                      "origin": list(node.origin), "precision": node.precision}
    if node.attrs:
        document["attrs"] = {key: _write(value) for key, value in node.attrs.items()}
    if node.body:
        document["body"] = [node_to_json(part) for part in node.body]
    return document


def node_from_json(document: Mapping[str, Any]) -> Node:
    """Convert a document of node_to_json to a node. Raise PlanCorruptError if it is malformed."""
    try:
        return Node(document["op"], tuple(document["inputs"]), tuple(document["outputs"]),
                    {key: _read(value) for key, value in document.get("attrs", {}).items()}, document["name"],
                    tuple(document["origin"]), tuple(node_from_json(part) for part in document.get("body", ())),
                    document["precision"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanCorruptError(f"the plan holds a node that cannot be read ({error!r}); build it again") from error


def graph_to_json(graph: Graph) -> tuple[Json, dict[str, Array]]:
    """Convert a graph to a document and its constants."""
    document = {"name": graph.name, "dependence": graph.dependence,
                "inputs": list(graph.inputs), "outputs": list(graph.outputs),
                "nodes": [node_to_json(node) for node in graph.nodes],
                "types": {name: _write_type(kind) for name, kind in graph.types.items()},
                **({"watched": list(graph.watched)} if graph.watched else {})}
    return document, dict(graph.constants)


def graph_from_json(document: Mapping[str, Any], arrays: Mapping[str, Array]) -> Graph:
    """Convert a document of graph_to_json to a graph. Raise PlanCorruptError if it is malformed."""
    try:
        types = {name: _read_type(kind) for name, kind in document["types"].items()}
        graph = Graph(document["name"], tuple(document["inputs"]), tuple(document["outputs"]),
                      tuple(node_from_json(node) for node in document["nodes"]), dict(arrays), types,
                      document["dependence"], tuple(document.get("watched", ())))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanCorruptError(f"the plan holds a graph that cannot be read ({error!r}); build it again") from error
    return verify(graph)


def _write(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return {"words": [str(word) for word in value.reshape(-1).tolist()], "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(value.tobytes()).decode()
        return {"dtype": name_in_file(value.dtype), "shape": list(value.shape), "data": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_write(v) for v in value]
    if isinstance(value, int | float | str):
        return value
    raise TypeError(f"an attribute of type {type(value).__name__} cannot be written: {value!r}")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(v) for v in value)
    if isinstance(value, dict) and "words" in value:
        return np.array(value["words"], object).reshape(value["shape"])
    if isinstance(value, dict):
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype_in_file(value["dtype"]))
        return flat.reshape(value["shape"]).copy()
    return value


def _write_type(kind: TensorType) -> Json:
    document: Json = {"dtype": kind.dtype.name, "shape": list(kind.shape)}
    if kind.quant:
        quant = kind.quant
        document["quant"] = {"scale": _write_scale(quant.scale), "zero_point": list(quant.zero_point),
                             "dtype": quant.dtype, "axis": quant.axis}
    return document


def _write_scale(scale: tuple[float, ...]) -> Any:
    """Write several scales as an array, with a fifth of the digits: float32 if that is exact."""
    if len(scale) == 1:
        return list(scale)
    exact = np.array(scale, np.float64)
    short = exact.astype(np.float32)
    return _write(short if np.array_equal(short, exact) else exact)


def _read_scale(scale: Any) -> tuple[float, ...]:
    return tuple(np.asarray(_read(scale), np.float64).tolist())


def _read_type(document: Mapping[str, Any]) -> TensorType:
    quant = document.get("quant")
    return TensorType(dtype_in_file(document["dtype"]), tuple(document["shape"]), None if quant is None else QParams(
        _read_scale(quant["scale"]), tuple(quant["zero_point"]), quant["dtype"], quant["axis"]))
