"""ONNX file -> Graph: canonical nodes, every tensor typed, the batch symbolic."""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from engines.capacity import bytes_of, too_large
from engines.errors import EngineError, ModelError
from engines.faults import faults_named
from engines.frontend import attention, composed  # noqa: F401  (fill RULES)
from engines.frontend.normalise import RULES, Call, normalise
from engines.frontend.trace import Trace
from engines.ir import BATCH, Array, Dim, Graph, Node, TensorType, verify
from engines.ops import OPS, describe
from engines.shapes import Undecided, text

log = logging.getLogger(__name__)

OLDEST_OPSET = 9
IMAGE_SIDE, LENGTH = 224, 128        # in examples of --shape
_DTYPE_ATTRIBUTES = {("Cast", "to"), ("QuantizeLinear", "output_dtype")}


@faults_named()
def graph_from_onnx(model: str | Path | onnx.ModelProto, *,
                    shapes: Mapping[str, Sequence[Dim | None]] | None = None, keep_batch: bool = False) -> Graph:
    """The model as a Graph in canonical form; tensors keep their names.

    A symbolic leading extent of an input becomes "batch". Every other extent must be known: `shapes` gives whole input
    shapes, {"x": (None, 3, 224, 224)}, where None (or -1, or "batch") stands for the batch. keep_batch: a leading
    extent that the model leaves open is the batch whatever number `shapes` has there.

    Raises ModelError: no readable ONNX model, an opset before 9, operators that nobody can evaluate (all are listed),
    a symbolic extent without a value, or a node whose inputs do not fit.
    """
    proto, name = (model, model.graph.name or "model") if isinstance(model, onnx.ModelProto) else _load(Path(model))
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    opsets = {_domain(entry.domain): entry.version for entry in proto.opset_import}
    if opsets.get("", OLDEST_OPSET) < OLDEST_OPSET:
        raise ModelError(f"{name}: opset {opsets['']} is not supported; convert the model to opset {OLDEST_OPSET} "
                         "or later with onnx.version_converter")
    _refuse_unknown(name, proto.graph)

    trace = Trace()
    for tensor in proto.graph.initializer:
        trace.constant(tensor.name, _array(name, tensor))
    inputs = [value for value in proto.graph.input if value.name not in trace.values]
    for tensor_name, kind in _input_types(name, inputs, shapes or {}, keep_batch).items():
        trace.input(tensor_name, kind)
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
    declared = {value.name: _Declared.of(model, value) for value in inputs}
    wanted = {name: given.shape(model, shapes.get(name), keep_batch) for name, given in declared.items()}
    if missing := [name for name, shape in wanted.items() if shape is None]:
        raise ModelError(_ask_for_shapes(model, [declared[name] for name in missing]))
    types = {name: TensorType(declared[name].dtype, shape) for name, shape in wanted.items() if shape is not None}
    for name, kind in types.items():
        if wrong := too_large(bytes_of(kind)):
            raise ModelError(f"{model}: input '{name}' {kind} takes {wrong}")
    return types


@dataclass(frozen=True)
class _Declared:
    """An input as the file declares it. `extents` None: of unknown rank; an extent None: unknown, without a name."""
    name: str
    dtype: np.dtype[Any]
    extents: tuple[Dim | None, ...] | None

    @staticmethod
    def of(model: str, value: onnx.ValueInfoProto) -> _Declared:
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or tensor.elem_type in (0, onnx.TensorProto.STRING):
            raise ModelError(f"{model}: input '{value.name}' is no tensor of numbers, which is all that is supported")
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        return _Declared(value.name, dtype, tuple(map(_extent, tensor.shape.dim)) if tensor.HasField("shape") else None)

    def shape(self, model: str, given: Sequence[Dim | None] | None, keep_batch: bool) -> tuple[Dim, ...] | None:
        """The shape to compile for: of sizes behind what may be the batch. None: some are not known."""
        if given is None:
            given = self.extents
        elif self.extents is not None and not _fits(given, self.extents):
            raise ModelError(f"{model}: the shape {text(d or BATCH for d in given)} given for input '{self.name}' does "
                             f"not fit the declared {self}")
        if given is None:
            return None
        if keep_batch and self.extents and not _is_size(self.extents[0]):
            given = (None, *given[1:])
        shape = [BATCH if axis == 0 and not _is_size(d) else d for axis, d in enumerate(given)]
        known = [d for d in shape if d == BATCH or _is_size(d)]
        return tuple(d for d in known if d is not None) if len(known) == len(shape) else None

    def __str__(self) -> str:
        return "of unknown rank" if self.extents is None else text("?" if d is None else d for d in self.extents)

    def option(self, sizes: dict[str, int]) -> str:
        """An example of the option that gives the shape. `sizes`: of symbols, chosen so far."""
        extents = self.extents if self.extents is not None else (None, 3, 224, 224)
        side = IMAGE_SIDE if len(extents) == 4 and {1, 3, 4}.intersection(extents[1:]) else LENGTH
        chosen = [d if _is_size(d) else sizes.setdefault(str(d), side) if d and axis else side if axis else BATCH
                  for axis, d in enumerate(extents)]
        return f"--shape {self.name}:{'x'.join(map(str, chosen))}"


def _ask_for_shapes(model: str, inputs: Sequence[_Declared]) -> str:
    """About all of them at once."""
    sizes: dict[str, int] = {}
    options = " ".join(given.option(sizes) for given in inputs)
    listed = ", ".join(f"'{given.name}' {given}" for given in inputs)
    return (f"{model}: only the leading extent of an input may be left open (it is the batch); give the sizes of "
            f"{listed} for which to compile, as in {options}")


def _extent(d: onnx.TensorShapeProto.Dimension) -> Dim | None:
    if d.HasField("dim_value"):
        return d.dim_value if d.dim_value >= 0 else None
    return d.dim_param or None


def _is_size(d: Dim | None) -> bool:
    return isinstance(d, int) and d >= 0


def _fits(given: Sequence[Dim | None], declared: Sequence[Dim | None]) -> bool:
    """Declared sizes must be met; a model of fixed batch is not made symbolic by asking."""
    return len(given) == len(declared) and all(g == d for g, d in zip(given, declared, strict=True) if _is_size(d))


# ---- nodes
def _add(model: str, trace: Trace, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> None:
    node = _node(model, proto, opsets)
    try:
        call = Call(node, opsets.get("", OLDEST_OPSET), trace.inputs(node), trace.known(node))
        for made in normalise(call):
            trace.add(made)
    except (EngineError, Undecided) as error:
        where = "" if describe(node) in str(error) else f"{describe(node)}: "
        raise ModelError(f"{model}: {where}{error}") from error


def _node(model: str, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> Node:
    """The node as the file has it: attributes as ints, floats, strings, tuples or arrays."""
    domain = _domain(proto.domain)
    attrs = {a.name: _attribute(model, proto, a) for a in proto.attribute}
    if domain or (proto.op_type not in OPS and proto.op_type not in RULES):
        attrs |= {"onnx_opset": opsets.get(domain, 1), **({"onnx_domain": domain} if domain else {})}
        log.info("%s: %s '%s' is evaluated by the onnx package", model, proto.op_type, proto.name)
    outputs = list(proto.output)
    while outputs and not outputs[-1]:
        outputs.pop()
    name = proto.name or outputs[0]
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
    if (node.op_type, attribute.name) in _DTYPE_ATTRIBUTES:
        return np.dtype(helper.tensor_dtype_to_np_dtype(value)).name
    if isinstance(value, float | int):
        return value
    if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
        return tuple(value)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return tuple(v.decode() for v in value)
    raise ModelError(f"{model}: node '{node.name}' ({node.op_type}): attribute '{attribute.name}' is of a kind that is "
                     "not supported")
