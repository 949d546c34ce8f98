"""Import an ONNX file as a Graph of canonical nodes, with a type for every tensor and a symbolic batch."""
from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np
import onnx
from onnx import helper

from infer_server.engines.errors import EngineError, GraphError, ModelError, UnknownTensorError, UnknownValueError
from infer_server.engines.faults import faults_named
from infer_server.engines.frontend.branches import branch_taken, defined_in, is_if, with_names
from infer_server.engines.frontend.inputs import Value, constant_inputs, input_types
from infer_server.engines.frontend.names import check_names
from infer_server.engines.frontend.onnx_file import Model, OnnxModel, array_of, dense_of, in_order, read_model
from infer_server.engines.frontend.operators import (  # noqa: F401  (they register rules)
    attention,
    axes,
    composed,
    contrib,
    images,
    losses,
    ml,
    older,
    quantised,
    signals,
)
from infer_server.engines.frontend.operators.extension import EXTENSIONS, STANDARD
from infer_server.engines.frontend.operators.normalise import RULES, Beyond, OperatorCall, normalise
from infer_server.engines.frontend.opsets import UNSAID_OPSET
from infer_server.engines.frontend.refusals import domain_of, refuse, schema_for
from infer_server.engines.frontend.schema import Schema, check_types, same_as_default, schema_of
from infer_server.engines.frontend.trace import TypeInference
from infer_server.engines.ir.graph import Array, Dim, Graph, Node, trimmed, verify
from infer_server.engines.ir.shapes import Undecided
from infer_server.engines.ops import OPS, describe
from infer_server.engines.ops.fallback import as_onnx
from infer_server.engines.ops.recurrent import GATES

log = logging.getLogger(__name__)
# Lists of numbers that are read as arrays, because they may have millions of entries.
_ENSEMBLES = ("TreeEnsembleClassifier", "TreeEnsembleRegressor")
_OF_NODES = ("nodes_", "class_", "target_")
_BY_ONNX = "%s: %s '%s' is evaluated by the onnx package: %s"


@faults_named()
def graph_from_onnx(model: Model, *,
                    shapes: Mapping[str, Sequence[Dim | None]] | None = None,
                    constants: Mapping[str, Value] | None = None, keep_batch: bool = False,
                    notices: list[str] | None = None) -> Graph:
    """Import a model as a Graph in canonical form; tensors keep their names.

    Parameters
    ----------
    model : Model
        See `read_model`.
    shapes : mapping, optional
        Whole shapes of inputs, as {"x": (None, 3, 224, 224)}; None, -1 or "batch" stands for the batch. A symbolic
        leading extent is the batch in any case; every other extent must be known.
    constants : mapping, optional
        Inputs with one value in every run; they are no inputs of the graph.
    keep_batch : bool
        Let an open leading extent be the batch whatever number `shapes` has for it.
    notices : list of str, optional
        Receives notices of the import for the user.

    Raises
    ------
    ModelError
        If the model cannot be read, or has unsupported operators, unknown extents or nodes that break their schema.
    UnknownValueError
        If shapes depend on the values of inputs, which `constants` could give.
    """
    source = read_model(model)
    name = source.name
    opsets = {domain_of(entry): entry.version for entry in source.proto.opset_import}
    nodes = _nodes(source, opsets)
    source = source.with_constants(constants or {})

    trace = TypeInference()
    for tensor_name, array in source.weights.items():
        trace.constant(tensor_name, array)
    for tensor_name, kind in input_types(name, source.declared(), shapes or {}, keep_batch).items():
        trace.input(tensor_name, kind)
    file = _File(name, opsets, defined_in(source.proto.graph) | set(source.weights), [] if notices is None else notices)
    for proto, node in zip(source.proto.graph.node, nodes, strict=True):
        _add(file, trace, proto, node)

    outputs = tuple(value.name for value in source.proto.graph.output)
    if missing := [output for output in outputs if output not in trace.types]:
        raise ModelError(f"{name}: output '{missing[0]}' is never produced")
    integers = source.integer_states
    nodes = tuple(replace(node, precision="int8") if node.op in GATES and node.name in integers else node
                  for node in trace.nodes)
    graph = Graph(name, tuple(value.name for value in source.inputs), outputs, nodes, trace.constants, trace.types)
    return verify(graph.rebuild(graph.nodes))


def recurs_in_float16(model: Path) -> bool:
    """Return True if a file has recurrent layers and float16 weights."""
    graph = onnx.load(str(model), load_external_data=False).graph
    return (any(node.op_type in GATES for node in graph.node)
            and any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer))


def values_of_inputs(model: Path, constants: Mapping[str, Value]) -> dict[str, Array]:
    """Return values of inputs converted to the types that the file declares. Raise ModelError as `constant_inputs`."""
    return constant_inputs(model.stem, onnx.load(str(model), load_external_data=False).graph.input, constants)


# ---- nodes
@dataclass(frozen=True)
class _File:
    """Context of an import: model name, opsets by domain, tensor names used so far, and notices for the user."""
    model: str
    opsets: Mapping[str, int]
    names: set[str]
    notices: list[str]


def _nodes(source: OnnxModel, opsets: Mapping[str, int]) -> Sequence[Node]:
    """Return the nodes of the file, checked against their schemas. Raise ModelError for those that do not meet them."""
    if not source.nodes:
        refuse(source.name, source.proto.graph, opsets)
        source.nodes[:] = [node_of(source.name, proto) for proto in source.proto.graph.node]
    return source.nodes


def _add_constants(model: str, trace: TypeInference, graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        trace.constant(tensor.name, array_of(model, tensor))


def _add(file: _File, trace: TypeInference, proto: onnx.NodeProto, node: Node) -> None:
    model = file.model
    try:
        if is_if(proto):
            branch = _branch(file, proto, node, trace)
        else:
            branch = None
            for made in _canonical(file, trace, proto, node):
                trace.add(made)
    except UnknownTensorError as error:
        sources = trace.sources(error.tensors)
        raise UnknownValueError(
            f"{model}: {describe(node)}: {error}; {' and '.join(map(repr, sources))} must be known when the engine is "
            f"built, as by {' '.join(f'--constant {name}=VALUE' for name in sources)}", sources,
            next(iter(proto.output), "")) from error
    except (EngineError, Undecided, ArithmeticError) as error:      # Arithmetic: 0 groups, infinite scales, ...
        where = "" if describe(node) in str(error) else f"{describe(node)}: "
        raise ModelError(f"{model}: {where}{error}") from error
    if branch is not None:
        _add_branch(file, trace, branch, node)


def _branch(file: _File, proto: onnx.NodeProto, node: Node, trace: TypeInference) -> onnx.GraphProto:
    """Return the branch that an If takes, with tensors renamed whose names are in use."""
    trace.inputs(node)
    branch = branch_taken(proto, trace.values.get(proto.input[0]))
    check_names(file.model, branch)
    refuse(file.model, branch, file.opsets)
    taken = defined_in(branch) & file.names
    branch = with_names(branch, {name: f"{node.name}.{name}" for name in taken})
    file.names.update(defined_in(branch))
    return branch


def _add_branch(file: _File, trace: TypeInference, branch: onnx.GraphProto, node: Node) -> None:
    _add_constants(file.model, trace, branch)
    for inner in in_order(branch.node):
        _add(file, trace, inner, node_of(file.model, inner))
    for value, output in zip(branch.output, node.outputs, strict=True):
        if value.name not in trace.types:
            raise ModelError(f"{file.model}: {describe(node)}: the branch's output '{value.name}' is never produced")
        trace.add(Node("Identity", (value.name,), (output,), {}, node.name, node.origin))



def _canonical(file: _File, trace: TypeInference, proto: onnx.NodeProto, node: Node) -> Iterator[Node]:
    """Yield the canonical nodes of a node, each after those before it were added to the trace."""
    model, domain = file.model, domain_of(proto)
    opset = file.opsets.get(domain, UNSAID_OPSET)
    schema = schema_for(proto, opset)
    assert schema is not None, "refused before"
    if (domain, node.op) not in EXTENSIONS or not domain and onnx.defs.has(node.op, opset):
        yield from _of_one(file, trace, schema, node, opset, domain)
        return
    call = _call(trace, schema, node, opset)
    try:
        written = EXTENSIONS[domain, node.op](call)
    except Beyond as beyond:
        if not onnx.defs.has(node.op, domain):
            raise GraphError(f"it is not supported with {beyond}") from beyond
        log.info(_BY_ONNX, model, node.op, node.name, f"our own is not for {beyond}")
        yield as_onnx(node, opset, domain)
        return
    if lost := _lost(call, schema):
        raise GraphError(f"it is not supported with {', '.join(f'{name} = {node.attrs[name]}' for name in lost)}")
    _notify(file, call)
    for part in written:
        standard = schema_of(part.op, STANDARD)
        yield from [part] if standard is None else _of_one(file, trace, standard, part, STANDARD)


def _of_one(file: _File, trace: TypeInference, schema: Schema, node: Node, opset: int,
            domain: str = "") -> Sequence[Node]:
    """Return a node's canonical nodes, or a fallback on the onnx package if these do not cover its attributes."""
    call = _call(trace, schema, node, opset)
    reason = "there is no operator of our own"
    if not domain and (node.op in OPS or node.op in RULES):
        try:
            made = normalise(call)
            if not (lost := _lost(call, schema)):
                _notify(file, call)
                return made
            reason = f"our own has no {' and '.join(lost)}"
        except Beyond as beyond:
            reason = f"our own is not for {beyond}"
    log.info(_BY_ONNX, file.model, node.op, node.name, reason)
    return [as_onnx(node, opset, domain)]


def _notify(file: _File, call: OperatorCall) -> None:
    file.notices.extend(f"{file.model}: {describe(call.node)}: {notice}" for notice in call.notices)


def _call(trace: TypeInference, schema: Schema, node: Node, opset: int) -> OperatorCall:
    """Return the arguments of a rule. Raise GraphError for undefined inputs or dtypes outside the schema."""
    types = trace.inputs(node)
    check_types(schema, types)
    return OperatorCall(node, opset, types, trace.known(node))


def _lost(call: OperatorCall, schema: Schema) -> list[str]:
    """Return the attributes that the rule did not read and that differ from their defaults."""
    return [name for name in call.unread if not same_as_default(schema, name, call.node.attrs[name])]


def node_of(model: str, proto: onnx.NodeProto) -> Node:
    """Convert a NodeProto; attributes become ints, floats, strings, tuples or arrays."""
    attrs = {} if is_if(proto) else {a.name: _attribute(model, proto, a) for a in proto.attribute}
    outputs = trimmed(proto.output)
    name = proto.name or next(filter(None, outputs), proto.op_type)
    outputs = tuple(output or f"{name}.unused{i}" for i, output in enumerate(outputs))
    return Node(proto.op_type, trimmed(proto.input), outputs, attrs, name, origin=(name,))


def _as_array(attribute: onnx.AttributeProto) -> Array | None:
    """Return a list of numbers as an array; None if the attribute is something else."""
    if attribute.type == onnx.AttributeProto.INTS:
        return np.fromiter(attribute.ints, np.int64, len(attribute.ints))
    if attribute.type == onnx.AttributeProto.FLOATS:
        return np.fromiter(attribute.floats, np.float32, len(attribute.floats))
    return None


def _attribute(model: str, node: onnx.NodeProto, attribute: onnx.AttributeProto) -> Any:
    try:
        by_node = node.op_type in _ENSEMBLES and attribute.name.startswith(_OF_NODES)
        if by_node and (numbers := _as_array(attribute)) is not None:
            return numbers
        if attribute.type == onnx.AttributeProto.STRINGS:
            return tuple(intern(v.decode()) for v in attribute.strings)
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode()
    except ValueError as error:     # a type that ONNX does not have; bytes that are no text
        raise ModelError(f"{model}: node '{node.name}' ({node.op_type}): attribute '{attribute.name}' cannot be read: "
                         f"{error}") from error
    if isinstance(value, onnx.TensorProto):
        return array_of(model, value)
    if isinstance(value, onnx.SparseTensorProto):
        return dense_of(model, value)
    if isinstance(value, float | int):
        return value
    if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
        return tuple(value)
    raise ModelError(f"{model}: node '{node.name}' ({node.op_type}): attribute '{attribute.name}' has an unsupported "
                     "type")
