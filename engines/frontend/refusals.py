"""Find unsupported and invalid nodes of a file, and report all of them in one error before the import."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx

from infer_server.engines.errors import GraphError, ModelError
from infer_server.engines.frontend.branches import is_if
from infer_server.engines.frontend.operators.extension import EXTENSIONS
from infer_server.engines.frontend.operators.normalise import RULES
from infer_server.engines.frontend.opsets import UNSAID_OPSET
from infer_server.engines.frontend.schema import Schema, check_node, schema_of
from infer_server.engines.ops import OPS

MOST_FAULTS = 20        # most faults that an error lists


def domain_of(node: onnx.NodeProto | onnx.OperatorSetIdProto) -> str:
    """Return the domain of a node or opset import; "" is ONNX's default domain."""
    return "" if node.domain == "ai.onnx" else node.domain


def refuse(model: str, graph: onnx.GraphProto, opsets: Mapping[str, int]) -> None:
    """Raise ModelError for unknown operators, and for nodes that do not meet their schema."""
    faults = [*_unknown_operators(graph), *_misfits(graph, opsets)]
    if len(faults) == 1:
        raise ModelError(f"{model}: {faults[0]}")
    if faults:
        more = f"\n  and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise ModelError("\n  ".join([f"{model}: {len(faults)} faults", *faults[:MOST_FAULTS]]) + more)


def schema_for(node: onnx.NodeProto, opset: int) -> Schema | None:
    """Return the schema of a node's operator; None if the opset has no such operator."""
    domain = domain_of(node)
    schema = schema_of(node.op_type, opset, domain)
    if schema and (domain, node.op_type) in EXTENSIONS:
        return replace(schema, no_tensors=frozenset())      # a rule turns them into tensors
    return schema


def _is_known(node: onnx.NodeProto) -> bool:
    domain, op = domain_of(node), node.op_type
    nested = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
    return not nested and ((domain == "" and (op in OPS or op in RULES)) or (domain, op) in EXTENSIONS
                           or onnx.defs.has(op, domain))


def _unknown_operators(graph: onnx.GraphProto) -> Iterator[str]:
    unknown: dict[str, str] = {}
    for node in graph.node:
        if not is_if(node) and not _is_known(node):     # an If is checked when its branch is known
            domain = domain_of(node)
            unknown.setdefault(f"{domain}.{node.op_type}" if domain else node.op_type,
                               node.name or next(iter(node.output), ""))
    if unknown:
        listed = ", ".join(f"{op} (as in node '{node}')" for op, node in sorted(unknown.items()))
        yield (f"operators that are not supported: {listed}. Export the model without them, or replace them by "
               "operators of the default ONNX domain without subgraphs")


def _misfits(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Iterator[str]:
    for node in graph.node:
        if is_if(node) or not _is_known(node):
            continue
        opset = opsets.get(domain_of(node), UNSAID_OPSET)
        schema = schema_for(node, opset)
        try:
            if schema is None:
                raise GraphError(f"opset {opset} of ONNX has no {node.op_type}")
            check_node(schema, node)
        except GraphError as error:
            yield f"node '{node.name or next(iter(node.output), node.op_type)}' ({node.op_type}): {error}"
