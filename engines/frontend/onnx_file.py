"""Read ONNX models, before their inputs have types, so that graphs for any shapes can be imported from one.

    model = read_model("m.onnx")                # or the bytes of such a file
    graph_from_onnx(model, shapes=...)          # any number of times

The weights are kept apart from the rest, so that graphs and plans share them.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from infer_server.engines.errors import ModelError, PlanCorruptError
from infer_server.engines.frontend.inputs import Declared, Value, constant_inputs, extents_of, is_of_numbers, is_size
from infer_server.engines.frontend.names import check_branches, check_names, graphs_in, nodes_in
from infer_server.engines.frontend.opsets import check_opset, with_functions_of_its_opset
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType

MOST_IN_MEMORY = 1 << 30    # largest model serialised in memory, in bytes: a protobuf message may have 2 GiB
INTEGER_STATES = "infer_server.integer_states"      # property of a model: recurrent layers with int8 states


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """Model without functions, in an opset that the onnx package knows.

    Attributes
    ----------
    name : str
        The name of the model in errors and plans.
    proto : onnx.ModelProto
        The model without its initializers; never changed.
    weights : mapping of str to array
        The initializers by name.
    nodes : list of Node
        The nodes before normalisation. The importer fills the list once, since shapes and constants do not change it.
    """
    name: str
    proto: onnx.ModelProto
    weights: Mapping[str, Array]
    nodes: list[Node] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[onnx.ValueInfoProto, ...]:
        """The inputs without an initializer."""
        return tuple(value for value in self.proto.graph.input if value.name not in self.weights)

    def declared(self) -> dict[str, Declared]:
        """Return the inputs as the file declares them. Raise ModelError for one that is no tensor of numbers."""
        return {value.name: Declared.of(self.name, value) for value in self.inputs}

    def output_shapes(self) -> dict[str, tuple[Dim | None, ...]]:
        """Return the declared shapes of the outputs, which may be missing or wrong in a file."""
        return {value.name: shape for value in self.proto.graph.output
                if (shape := extents_of(value.type.tensor_type)) is not None}

    def with_constants(self, constants: Mapping[str, Value]) -> OnnxModel:
        """Return the model with constants in place of inputs. Raise ModelError for an unknown input or another type."""
        return replace(self, weights={**self.weights, **constant_inputs(self.name, self.proto.graph.input, constants)})

    def with_optional(self, names: Sequence[str]) -> OnnxModel:
        """Return the model without the initializers of these inputs. Raise ModelError for a name without one."""
        for name in names:
            if name not in {value.name for value in self.proto.graph.input} & self.weights.keys():
                raise ModelError(f"{self.name}: the optional input '{name}' has no default: the file has no "
                                 f"initialiser of that name. Leave out --optional {name} (in a config.pbtxt, the "
                                 "input's `optional`), and send it always")
        return replace(self, weights={name: array for name, array in self.weights.items() if name not in names})

    def with_ragged(self, names: Sequence[str]) -> OnnxModel:
        """Return the model for ragged inputs, which hold the elements of several items one after the other.

        Open leading extents lose their names, because exporters give all of them one name whatever they count. Raise
        ModelError for an input that does not have exactly one, open extent.
        """
        if not names:
            return self
        declared = self.declared()
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for name in names:
            if name not in declared:
                raise ModelError(f"{self.name} has no input '{name}'; its inputs are {', '.join(declared)}")
            if len(declared[name].extents or ()) != 1 or is_size((declared[name].extents or (0,))[0]):
                raise ModelError(f"{self.name}: the ragged input '{name}' is {declared[name]}, but must have one "
                                 "dynamic extent, as [n], along which the elements of all items are concatenated")
        for value in proto.graph.input:
            extents = declared[value.name].extents if value.name in declared else None
            if extents and not is_size(extents[0]):
                value.type.tensor_type.shape.dim[0].Clear()
        return self.with_proto(proto)

    def with_inputs(self, types: Mapping[str, TensorType]) -> OnnxModel:
        """Return the model with inputs of these dtypes and ranks, and of unknown extents."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for value in proto.graph.input:
            kind = types[value.name]
            value.CopyFrom(helper.make_tensor_value_info(
                value.name, helper.np_dtype_to_tensor_dtype(kind.dtype), [None] * len(kind.shape)))
        return self.with_proto(proto)

    def with_proto(self, proto: onnx.ModelProto) -> OnnxModel:
        """Return a model of `proto` with the same weights."""
        return replace(self, proto=proto, nodes=[])

    @property
    def integer_states(self) -> frozenset[str]:
        """Names of the recurrent nodes whose states the exported engine multiplied as integers."""
        said = next((entry.value for entry in self.proto.metadata_props if entry.key == INTEGER_STATES), "[]")
        try:
            names = json.loads(said)
        except ValueError:
            names = None
        if not isinstance(names, list):
            raise ModelError(f"{self.name}: the metadata property {INTEGER_STATES} is not a JSON list of names: "
                             f"'{said}'")
        return frozenset(map(str, names))

    def document(self) -> bytes:
        """Serialise the model without its weights, for `from_document`."""
        return bytes(self.proto.SerializeToString(deterministic=True))

    @staticmethod
    def from_document(name: str, document: bytes, weights: Mapping[str, Array]) -> OnnxModel:
        """Return the model of a document and its weights. Raise PlanCorruptError if the document cannot be read."""
        try:
            return OnnxModel(name, onnx.load_model_from_string(document), weights)
        except Exception as error:      # whatever the protobuf runtime at hand raises
            raise PlanCorruptError(f"{name}: the model in the plan cannot be read ({error}); build it again") from error


Model = str | Path | bytes | onnx.ModelProto | OnnxModel        # a file, its content, or what was read of one


def read_model(model: Model) -> OnnxModel:
    """Read a model.

    Parameters
    ----------
    model : str, Path, bytes, onnx.ModelProto or OnnxModel
        The path of a file, its content, or the result of an earlier call, which is returned unchanged.

    Raises
    ------
    ModelError
        If the model cannot be read, has invalid names, or its opset is newer than the onnx package.
    """
    if isinstance(model, OnnxModel):
        return model
    proto, name = _load(model)
    check_names(name, proto.graph)
    check_branches(name, proto.graph)
    if proto.functions:
        proto = _without_functions(name, proto)
    check_opset(name, proto)
    return OnnxModel(name, _without_initializers(proto), weights_of(name, proto.graph))


def declared_inputs(path: Path) -> dict[str, Declared]:
    """Return `read_model(path).declared()` for numeric inputs, without reading weights. Raise ModelError."""
    graph = _parsed(path).graph
    weights = _names_of_weights(graph)
    return {value.name: Declared.of(path.stem, value) for value in graph.input
            if value.name not in weights and is_of_numbers(value)}


class DeclaredTensor(NamedTuple):
    """Input or output of any type as the ONNX file declares it."""
    name: str
    dtype: str                                  # NumPy's name, "object" of strings; "": no tensor, or unknown
    extents: tuple[Dim | None, ...] | None      # as in Declared


class Outline(NamedTuple):
    """Inputs and outputs that an ONNX file declares."""
    inputs: tuple[DeclaredTensor, ...]          # without an initializer
    defaulted: tuple[DeclaredTensor, ...]       # inputs with an initializer as their default
    outputs: tuple[DeclaredTensor, ...]


def outline_of(path: Path) -> Outline:
    """Return the inputs and outputs that an ONNX file declares, without reading external weights. Raise ModelError."""
    graph = _parsed(path).graph
    weights = _names_of_weights(graph)
    inputs = [_declared(value) for value in graph.input]
    return Outline(tuple(each for each in inputs if each.name not in weights),
                   tuple(each for each in inputs if each.name in weights), tuple(map(_declared, graph.output)))


def _declared(value: onnx.ValueInfoProto) -> DeclaredTensor:
    if not value.type.HasField("tensor_type"):
        return DeclaredTensor(value.name, "", None)
    tensor = value.type.tensor_type
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    except KeyError:
        dtype = ""
    return DeclaredTensor(value.name, dtype, extents_of(tensor))


def _names_of_weights(graph: onnx.GraphProto) -> set[str]:
    return {tensor.name for tensor in graph.initializer} | {
        sparse.values.name for sparse in graph.sparse_initializer}


def weights_of(model: str, graph: onnx.GraphProto) -> dict[str, Array]:
    """Return the initializers by name, sparse ones as dense arrays. Raise ModelError for one that cannot be read."""
    dense = {tensor.name: array_of(model, tensor) for tensor in graph.initializer}
    return dense | {sparse.values.name: dense_of(model, sparse) for sparse in graph.sparse_initializer}


def dense_of(model: str, sparse: onnx.SparseTensorProto) -> Array:
    """Return a sparse tensor, with linear indices or one column per axis, as an array. Raise ModelError if invalid."""
    values, indices = array_of(model, sparse.values), array_of(model, sparse.indices)
    array = np.zeros(sparse.dims, values.dtype)
    try:
        if indices.ndim == 2:
            array[tuple(indices.T)] = values
        else:
            array.reshape(-1)[indices] = values
    except (IndexError, ValueError) as error:
        raise ModelError(f"{model}: sparse tensor '{sparse.values.name}' cannot be read: {error}") from error
    return array


def array_of(model: str, tensor: onnx.TensorProto) -> Array:
    """Return the values of a tensor. Raise ModelError if they cannot be read."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:     # onnx.load reads external data
        raise ModelError(f"{model}: tensor '{tensor.name}' is stored as external data, which can only be found from "
                         "the model's path: give the path, or load the model with onnx.load")
    if any(extent < 0 for extent in tensor.dims):       # NumPy's reshape would infer an extent of -1
        raise ModelError(f"{model}: tensor '{tensor.name}' cannot be read: its shape {list(tensor.dims)} has a "
                         "negative extent")
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:      # bad sizes, unknown types: numpy and onnx raise many kinds
        raise ModelError(f"{model}: tensor '{tensor.name}' cannot be read: {error}") from error


def _load(model: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return the model and its name in errors and plans."""
    proto = _parsed(model)
    if isinstance(model, str | Path):
        _load_external_weights(str(model), proto)
        return proto, Path(model).stem
    return proto, proto.graph.name or "model"


def _parsed(model: str | Path | bytes | onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without its external data. Raise ModelError if it cannot be read."""
    where = str(model) if isinstance(model, str | Path) else "the model"
    try:
        proto = (model if isinstance(model, onnx.ModelProto) else
                 onnx.load_model_from_string(model) if isinstance(model, bytes) else
                 onnx.load(where, load_external_data=False))
    except OSError as error:
        raise ModelError(f"{where}: {error.strerror or error}: '{error.filename or where}'") from error
    except Exception as error:      # whatever the protobuf runtime at hand raises for bytes that are no model
        if _start(model)[4:] == b"ORTM":
            raise ModelError(f"{where} is in ONNX Runtime's own format (.ort); give the ONNX model that it was "
                             "converted from") from error
        raise ModelError(f"{where} is not a readable ONNX model (truncated, or another format): {error}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{where} is not an ONNX model: it has no graph or no opset")
    return proto


def _start(model: str | Path | bytes | onnx.ModelProto) -> bytes:
    """Return the first 8 bytes of a file or of its content."""
    if isinstance(model, str | Path):
        with open(model, "rb") as file:
            return file.read(8)
    return model[:8] if isinstance(model, bytes) else b""


def _load_external_weights(path: str, proto: onnx.ModelProto) -> None:
    """Load the external weights of a model. Raise ModelError if a file is missing, too short or outside the folder."""
    try:
        onnx.load_external_data_for_model(proto, str(Path(path).parent))
    except Exception as error:      # the onnx package raises several kinds: no such file, too short, outside the folder
        raise ModelError(f"{path}: the external data of the weights cannot be read: {error}; put the files that came "
                         "with the model into its folder, under their original names") from error


def _without_functions(name: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    _check_calls(name, proto)
    if any(function.attribute_proto for function in proto.functions):
        proto = _with_defaults(proto)
    proto = with_functions_of_its_opset(name, proto)
    try:
        return inliner.inline_local_functions(proto)
    except Exception as error:      # an unknown function, or one with wrong arguments
        raise ModelError(f"{name}: the model's functions cannot be inlined: {error}") from error


def _check_calls(name: str, proto: onnx.ModelProto) -> None:
    """Raise ModelError if a function calls itself, perhaps through others, which crashes the inliner of onnx 1.19."""
    calls = {(function.domain, function.name, function.overload):
             {(node.domain, node.op_type, node.overload) for node in nodes_in(function.node)}
             for function in proto.functions}
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        around = " calls ".join(".".join(filter(None, of)) for of in error.args[1][::-1])
        raise ModelError(f"{name}: the model's functions cannot be inlined, because one calls itself: "
                         f"{around}") from error


def _with_defaults(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which every function call has all attributes, since the inliner ignores defaults.

    Calls in a subgraph that is a default stay as they are, because it may call the same function.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    defaults = {(of.domain, of.name, of.overload): of.attribute_proto for of in copy.functions}
    waiting = [*copy.graph.node, *(node for function in copy.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        waiting += [inner for graph in graphs_in(node) for inner in graph.node]
        said = {attribute.name for attribute in node.attribute}
        node.attribute.extend(default for default in defaults.get((node.domain, node.op_type, node.overload), ())
                              if default.name not in said)
    return copy


def _without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the parts that the importer reads, without weights, and with duplicate outputs listed once."""
    outputs = {value.name: value for value in proto.graph.output}
    model = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    model.graph.name = proto.graph.name
    model.graph.input.extend(proto.graph.input)
    model.graph.output.extend(outputs.values())
    for node in in_order(proto.graph.node):
        model.graph.node.add().CopyFrom(node)       # extend() serialises each node and parses it again
    model.metadata_props.extend(entry for entry in proto.metadata_props if entry.key == INTEGER_STATES)
    return model


def in_order(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Sort nodes topologically, stable with respect to the file's order.

    ONNX requires the order, but ONNX Runtime also takes other files. Nodes of a cyclic graph are returned unchanged;
    the importer then reports a read of an undefined tensor.
    """
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads = [{maker[name] for name in read_by(node) if name in maker} for node in nodes]
    order: dict[int, None] = {}
    for last in range(len(nodes)):
        waiting, begun = [last], set[int]()
        while waiting:
            if (index := waiting[-1]) in order or not (
                    missing := {other for other in reads[index] if other not in order}):
                order[waiting.pop()] = None
            elif index in begun:
                return list(nodes)
            else:
                begun.add(index)
                waiting += sorted(missing, reverse=True)
    return [nodes[index] for index in order]


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node and its subgraphs read."""
    yield from node.input
    for graph in graphs_in(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from read_by(inner)


def operators_within(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the operator of a node, and those of its subgraphs."""
    yield node.op_type
    for graph in graphs_in(node):
        for inner in graph.node:
            yield from operators_within(inner)


def with_outputs(path: Path, tensors: Sequence[str]) -> bytes | None:
    """Serialise an ONNX file with inner tensors as further outputs; None if it is too large for a message.

    Weights in other files stay there, under paths relative to the file's folder.
    """
    proto = onnx.load(path, load_external_data=False)
    if proto.ByteSize() > MOST_IN_MEMORY:
        return None
    known = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in known)
    return bytes(proto.SerializeToString())
