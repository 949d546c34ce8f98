"""Compute data-dependent selections in a segment with an upper bound, of which the host takes the valid rows.

    NonMaxSuppression -> chosen     ->      BoundedNonMaxSuppression -> every, count; FirstRows(every, count) -> chosen
"""
from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from infer_server.engines.frontend.cutting.facts import is_standard
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.frontend.operators.contrib.bounded import DOMAIN


def bound_selections(model: onnx.ModelProto) -> list[str]:
    """Rewrite a model with unique tensor names; return the results of the FirstRows nodes, which the host runs."""
    results = _rewrite(model.graph)
    if results:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return results


def _rewrite(graph: onnx.GraphProto) -> list[str]:
    nodes: list[onnx.NodeProto] = []
    results: list[str] = []
    for node in graph.node:
        for inner in graphs_in(node):
            results += _rewrite(inner)
        if node.op_type != "NonMaxSuppression" or not is_standard(node):
            nodes.append(node)
            continue
        (result,) = node.output
        every, count = f"{result}.every", f"{result}.count"
        bounded = onnx.NodeProto()
        bounded.CopyFrom(node)
        bounded.op_type, bounded.domain = f"Bounded{node.op_type}", DOMAIN
        bounded.output[:] = [every, count]
        nodes += [bounded, helper.make_node("FirstRows", [every, count], [result], node.name, domain=DOMAIN)]
        if all(value.name != result for value in (*graph.output, *graph.value_info)):
            graph.value_info.append(helper.make_tensor_value_info(result, TensorProto.INT64, (None, 3)))
        results.append(result)
    del graph.node[:]
    graph.node.extend(nodes)
    return results
