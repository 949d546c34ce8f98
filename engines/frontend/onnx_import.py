"""ONNX file -> Graph: canonical nodes, every tensor typed, the batch symbolic."""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from engines.errors import EngineError, GraphError, ModelError, UnknownTensorError, UnknownValueError
from engines.faults import faults_named
from engines.frontend import attention, composed  # noqa: F401  (fill RULES)
from engines.frontend.normalise import RULES, Beyond, Call, normalise
from engines.frontend.opsets import OLDEST_OPSET, current
from engines.frontend.schema import check_node, check_types, same_as_default, schema_of
from engines.frontend.symbols import known_extents, refuse_several_batches, with_known
from engines.frontend.trace import Trace
from engines.ir import BATCH, Array, Dim, Graph, Node, TensorType, verify
from engines.ops import OPS, describe
from engines.ops.fallback import as_onnx
from engines.shapes import Undecided, text

log = logging.getLogger(__name__)



@faults_named()
def graph_from_onnx(model: str | Path | onnx.ModelProto, *,
                    shapes: Mapping[str, Sequence[Dim | None]] | None = None,
                    constants: Mapping[str, Array] | None = None, keep_batch: bool = False, one_item: bool = False,
                    notices: list[str] | None = None) -> Graph:
    """The model as a Graph in canonical form; tensors keep their names.

    A symbolic leading extent of an input becomes "batch". Every other extent must be known: `shapes` gives whole input
    shapes, {"x": (None, 3, 224, 224)}, where None (or -1, or "batch") stands for the batch. keep_batch: a leading
    extent that the model leaves open is the batch whatever number `shapes` has there; one_item: it is 1 instead.
    constants: inputs that have this value in every run; the graph has no such input. notices: takes what the user
    should know of the import.

    Raises ModelError: no readable ONNX model, an opset that the onnx package does not know or cannot convert,
    operators that nobody can evaluate (all are listed), a symbolic extent without a value, or a node whose attributes
    or inputs do not fit. UnknownValueError: shapes follow from the values of inputs, which `constants` could tell.
    """
    proto, name = (model, model.graph.name or "model") if isinstance(model, onnx.ModelProto) else _load(Path(model))
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    proto, notice = current(name, proto)
    if notice and notices is not None:
        notices.append(notice)
    opsets = {_domain(entry.domain): entry.version for entry in proto.opset_import}
    _refuse_unknown(name, proto.graph)

    trace = Trace()
    for tensor in proto.graph.initializer:
        trace.constant(tensor.name, _array(name, tensor))
    for value_name, array in _constants(name, proto.graph, constants or {}).items():
        trace.constant(value_name, array)
    inputs = [value for value in proto.graph.input if value.name not in trace.values]
    for tensor_name, kind in _input_types(name, inputs, shapes or {}, keep_batch).items():
        trace.input(tensor_name, _of_one_item(kind) if one_item else kind)
    for node in proto.graph.node:
        _add(name, trace, node, opsets)

    outputs = tuple(value.name for value in proto.graph.output)
    if missing := [output for output in outputs if output not in trace.types]:
        raise ModelError(f"{name}: output '{missing[0]}' is never produced")
    graph = Graph(name, tuple(value.name for value in inputs), outputs, tuple(trace.nodes), trace.constants,
                  trace.types)
    return verify(graph.rebuild(graph.nodes))


# ---- the file
def _load(path: Path) -> tuple[onnx.ModelProto, str]:
    try:
        proto = onnx.load(str(path))
    except OSError as error:        # the file, or one beside it that holds weights
        raise ModelError(f"{path}: {error.strerror or error}: '{error.filename or path}'") from error
    except Exception as error:      # whatever the protobuf runtime at hand raises for bytes that are no model
        raise ModelError(f"{path} is not a readable ONNX model (truncated, or another format): {error}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{path} is not an ONNX model: it has no graph or no opset")
    return proto, path.stem


def _array(model: str, tensor: onnx.TensorProto) -> Array:
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:      # bad sizes, unknown types: numpy and onnx raise many kinds
        raise ModelError(f"{model}: tensor '{tensor.name}' cannot be read: {error}") from error


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _refuse_unknown(model: str, graph: onnx.GraphProto) -> None:
    """Name all operators that neither we nor the onnx package know, at once."""
    unknown: dict[str, str] = {}
    for node in graph.node:
        domain, op = _domain(node.domain), node.op_type
        nested = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if nested or not ((domain == "" and (op in OPS or op in RULES)) or onnx.defs.has(op, domain)):
            unknown.setdefault(f"{domain}.{op}" if domain else op, node.name or next(iter(node.output), ""))
    if unknown:
        listed = ", ".join(f"{op} (as in node '{node}')" for op, node in sorted(unknown.items()))
        raise ModelError(f"{model}: operators that are not supported: {listed}. Export the model without them, or "
                         "replace them by operators of the default ONNX domain without subgraphs")


# ---- inputs
def _input_types(model: str, inputs: Sequence[onnx.ValueInfoProto],
                 shapes: Mapping[str, Sequence[Dim | None]], keep_batch: bool) -> dict[str, TensorType]:
    if unknown := set(shapes) - {value.name for value in inputs}:
        raise ModelError(f"{model} has no input '{sorted(unknown)[0]}'; its inputs are "
                         f"{', '.join(value.name for value in inputs)}")
    declared = {value.name: [_extent(d) for d in value.type.tensor_type.shape.dim] for value in inputs}
    numbers = {name: (None, *shape[1:]) if keep_batch else shape for name, shape in shapes.items()}
    known = known_extents(model, declared, numbers)
    types = {value.name: _input_type(model, value, with_known(declared[value.name], known), shapes.get(value.name),
                                     keep_batch) for value in inputs}
    batched = [name for name, kind in types.items() if kind.shape[:1] == (BATCH,)]
    refuse_several_batches(model, declared, shapes, batched)
    return types


def _constants(model: str, graph: onnx.GraphProto, given: Mapping[str, Array]) -> dict[str, Array]:
    """The values of inputs, which must be of the types that the model declares."""
    inputs = {value.name: value.type.tensor_type for value in graph.input}
    if unknown := set(given) - set(inputs):
        raise ModelError(f"{model} has no input '{min(unknown)}'; its inputs are {', '.join(inputs)}")
    for name, array in given.items():
        kind = inputs[name]
        declared = [_extent(d) for d in kind.shape.dim]
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if array.dtype != dtype or (kind.HasField("shape") and not _fits(array.shape, declared)):
            raise ModelError(f"{model}: the constant {array.dtype}{list(array.shape)} given for input '{name}' does not "
                             f"fit the declared {dtype}{text(d or '?' for d in declared)}")
    return {name: np.asarray(array) for name, array in given.items()}


def _input_type(model: str, value: onnx.ValueInfoProto, declared: Sequence[Dim | None],
                given: Sequence[Dim | None] | None, keep_batch: bool) -> TensorType:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type in (0, onnx.TensorProto.STRING):
        raise ModelError(f"{model}: input '{value.name}' is no tensor of numbers, which is all that is supported")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if given is None:
        if not tensor.HasField("shape"):
            raise ModelError(f"{model}: input '{value.name}' declares no shape: give it, "
                             f"{_option(value.name, [1, 3, 224, 224])}")
        given = declared
    elif tensor.HasField("shape") and not _fits(given, declared):
        raise ModelError(f"{model}: the shape {text(d or BATCH for d in given)} given for input '{value.name}' does "
                         f"not fit the declared {text(d or '?' for d in declared)}")
    if keep_batch and declared and not _is_size(declared[0]):
        given = (None, *given[1:])
    shape = [BATCH if axis == 0 and not _is_size(d) else d for axis, d in enumerate(given)]
    for axis, d in enumerate(shape):
        if d != BATCH and not _is_size(d):
            label = f" ('{d}')" if isinstance(d, str) else ""
            raise ModelError(f"{model}: extent {axis}{label} of input '{value.name}' "
                             f"{text(d or '?' for d in declared)} is symbolic; "
                             f"only the leading one may be: give it, {_option(value.name, declared)}")
    return TensorType(dtype, tuple(d if isinstance(d, str) else int(d or 0) for d in shape))


def _of_one_item(kind: TensorType) -> TensorType:
    return replace(kind, shape=tuple(1 if extent == BATCH else extent for extent in kind.shape))


def _extent(d: onnx.TensorShapeProto.Dimension) -> Dim | None:
    if d.HasField("dim_value"):
        return d.dim_value if d.dim_value >= 0 else None
    return d.dim_param or None


def _is_size(d: Dim | None) -> bool:
    return isinstance(d, int) and d >= 0


def _fits(given: Sequence[Dim | None], declared: Sequence[Dim | None]) -> bool:
    """Declared sizes must be met; a model of fixed batch is not made symbolic by asking."""
    return len(given) == len(declared) and all(g == d for g, d in zip(given, declared, strict=True) if _is_size(d))


def _option(name: str, declared: Sequence[Dim | None]) -> str:
    """An example of the option that gives a shape."""
    sizes = [d if _is_size(d) else 224 if axis else BATCH for axis, d in enumerate(declared)]
    return f"--shape {name}:{'x'.join(map(str, sizes))}"


# ---- nodes
def _add(model: str, trace: Trace, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> None:
    node = _node(model, proto)
    try:
        for made in _canonical(model, trace, proto, node, opsets):
            trace.add(made)
    except UnknownTensorError as error:
        sources = trace.sources(error.tensors)
        raise UnknownValueError(f"{model}: {describe(node)}: {error}; it would if {', '.join(map(repr, sources))} were "
                                "known when the engine is built", sources) from error
    except (EngineError, Undecided) as error:
        where = "" if describe(node) in str(error) else f"{describe(node)}: "
        raise ModelError(f"{model}: {where}{error}") from error


def _canonical(model: str, trace: Trace, proto: onnx.NodeProto, node: Node, opsets: Mapping[str, int]) -> list[Node]:
    """The canonical nodes of one that meets its schema; or the node as it is, for the onnx package, where it says more
    than these could."""
    domain = _domain(proto.domain)
    opset = opsets.get(domain, OLDEST_OPSET)
    schema = schema_of(proto.op_type, opset, domain)
    if schema is None:
        raise GraphError(f"opset {opset} of ONNX has no {proto.op_type}")
    check_node(schema, proto)
    types = trace.inputs(node)
    check_types(schema, types)
    reason = "there is no operator of our own"
    if not domain and (node.op in OPS or node.op in RULES):
        call = Call(node, opset, types, trace.known(node))
        try:
            made = normalise(call)
            lost = [name for name in call.unread if not same_as_default(schema, name, node.attrs[name])]
            if not lost:
                return made
            reason = f"our own has no {' and '.join(lost)}"
        except Beyond as beyond:
            reason = f"our own is not for {beyond}"
    log.info("%s: %s '%s' is evaluated by the onnx package: %s", model, proto.op_type, proto.name, reason)
    return [as_onnx(node, opset, domain)]


def _node(model: str, proto: onnx.NodeProto) -> Node:
    """The node as the file has it: attributes as ints, floats, strings, tuples or arrays."""
    attrs = {a.name: _attribute(model, proto, a) for a in proto.attribute}
    outputs = list(proto.output)
    while outputs and not outputs[-1]:
        outputs.pop()
    name = proto.name or next(iter(outputs), proto.op_type)
    outputs = [output or f"{name}.unused{i}" for i, output in enumerate(outputs)]
    inputs = list(proto.input)
    while inputs and not inputs[-1]:
        inputs.pop()
    return Node(proto.op_type, tuple(inputs), tuple(outputs), attrs, name, origin=(name,))


def _attribute(model: str, node: onnx.NodeProto, attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return _array(model, value)
    if isinstance(value, float | int):
        return value
    if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
        return tuple(value)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return tuple(v.decode() for v in value)
    raise ModelError(f"{model}: node '{node.name}' ({node.op_type}): attribute '{attribute.name}' is of a kind that is "
                     "not supported")
