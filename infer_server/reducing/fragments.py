"""Fragments of an ONNX model: some of its nodes, whose missing inputs become graph inputs or constants."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.ir.graph import Array

OnnxModel = onnx.ModelProto
MAX_FROZEN = 1024               # elements up to which a tensor of integers, such as a shape, becomes a constant
MAX_IN_A_FILE = 1 << 30         # bytes of weights above which a model is saved with external data


@dataclass(frozen=True)
class Fragment:
    """Choice of nodes and outputs of a model.

    Attributes
    ----------
    nodes : tuple of int
        Positions of the kept nodes in the model's graph. Constant nodes are not counted; their readers add them.
    outputs : tuple of str
        Tensors that the fragment returns.
    frozen : bool
        True if small tensors of integers that removed nodes made become constants, False if they become inputs.
    """
    nodes: tuple[int, ...]
    outputs: tuple[str, ...]
    frozen: bool = True


class FragmentExtractor:
    """Extractor of fragments of a model, as onnx.utils.Extractor.

    Attributes
    ----------
    values : mapping of str to array
        Recorded values of the inputs and of inner tensors, of one run.
    """

    def __init__(self, model: onnx.ModelProto, values: Mapping[str, Array] = {}) -> None:      # noqa: B006
        """Take a model in memory, with its weights.

        values: a tensor without a recorded value becomes an input or output only if shape inference knows its type.
        """
        self._model, self.values = model, values
        self._all = list(model.graph.node)
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in model.graph.sparse_initializer}
        self._inputs = {value.name: value for value in model.graph.input if value.name not in self._weights}
        self._makers = {name: number for number, node in enumerate(self._all) for name in node.output if name}
        self._reads = [tuple(dict.fromkeys(_reads(node))) for node in self._all]
        self.declared = True        # False: inputs and outputs have the shapes of the recorded values

    @property
    def whole(self) -> Fragment:
        nodes = (number for number, node in enumerate(self._all) if node.op_type != "Constant")
        return Fragment(tuple(nodes), tuple(value.name for value in self._model.graph.output))

    def describe(self, number: int) -> str:
        """Return the operator and the name of a node."""
        node = self._all[number]
        return f"{node.op_type} '{node.name or next(iter(node.output), '')}'"

    def outputs_of(self, number: int) -> tuple[str, ...]:
        """Return the outputs of a node whose type is known."""
        return tuple(name for name in self._all[number].output if name and self._type(name) is not None)

    def frontier(self, nodes: Collection[int]) -> tuple[str, ...]:
        """Return the tensors that these nodes make and none of them reads."""
        read = {name for number in nodes for name in self._reads[number]}
        return tuple(name for number in nodes for name in self.outputs_of(number) if name not in read)

    def needed(self, fragment: Fragment) -> Fragment:
        """Return the fragment without the nodes that its outputs do not depend on."""
        nodes, needed_nodes = set(fragment.nodes), set[int]()
        waiting = list(fragment.outputs)
        while waiting:
            maker = self._makers.get(waiting.pop())
            if maker in nodes and maker not in needed_nodes:
                needed_nodes.add(maker)
                waiting += self._reads[maker]
        return Fragment(tuple(number for number in fragment.nodes if number in needed_nodes), fragment.outputs,
                        fragment.frozen)

    def freezes(self, fragment: Fragment) -> bool:
        """Return True if the fragment would have other inputs without `frozen`."""
        return any(self._is_frozen(name) for name in self._missing(fragment))

    def inputs_of(self, fragment: Fragment) -> dict[str, Array]:
        """Return the recorded values of a fragment's inputs."""
        return {name: self.values[name] for name in self._missing(fragment)
                if name in self.values and not (fragment.frozen and self._is_frozen(name))}

    def extract(self, fragment: Fragment) -> onnx.ModelProto | None:
        """Return the fragment as a model; None if the type of one of its inputs or outputs is unknown."""
        missing = self._missing(fragment)
        frozen = [name for name in missing if fragment.frozen and self._is_frozen(name)]
        inputs = [self._type(name) for name in missing if name not in frozen]
        outputs = [self._type(name) for name in fragment.outputs]
        types = [one for one in (*inputs, *outputs) if one is not None]
        if not outputs or len(types) < len(inputs) + len(outputs):
            return None
        nodes = sorted({*fragment.nodes, *self._constants(fragment)})
        read = {name for number in nodes for name in self._reads[number]} | set(fragment.outputs)
        graph = helper.make_graph(
            [self._all[number] for number in nodes], self._model.graph.name or "reduced", types[:len(inputs)],
            types[len(inputs):],
            [*(tensor for name, tensor in self._weights.items() if name in read),
             *(numpy_helper.from_array(self.values[name], name) for name in frozen)],
            sparse_initializer=[tensor for name, tensor in self._sparse.items() if name in read])
        model = onnx.ModelProto()
        model.ir_version = self._model.ir_version
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        model.metadata_props.extend(self._model.metadata_props)
        model.graph.CopyFrom(graph)
        return model

    def _constants(self, fragment: Fragment) -> Iterator[int]:
        """Yield the Constant nodes that the fragment reads or returns."""
        names = {*fragment.outputs, *(name for number in fragment.nodes for name in self._reads[number])}
        for name in names:
            maker = self._makers.get(name)
            if maker is not None and self._all[maker].op_type == "Constant":
                yield maker

    def _missing(self, fragment: Fragment) -> list[str]:
        """Return the tensors that the fragment reads and does not make, in the order of their reading."""
        nodes = (*fragment.nodes, *self._constants(fragment))
        produced = {name for number in nodes for name in self._all[number].output}
        read = (name for number in fragment.nodes for name in self._reads[number])
        return [name for name in dict.fromkeys((*read, *fragment.outputs))
                if name not in produced and name not in self._weights and name not in self._sparse]

    def _is_frozen(self, name: str) -> bool:
        value = self.values.get(name)
        return (value is not None and name not in self._inputs and value.dtype.kind in "iub"
                and value.size <= MAX_FROZEN)

    @cached_property
    def _inferred(self) -> dict[str, onnx.ValueInfoProto]:
        """Types of all tensors by shape inference, as far as it knows them."""
        light = onnx.ModelProto()
        light.CopyFrom(self._model)
        try:
            graph = shape_inference.infer_shapes(light, data_prop=True).graph
        except Exception:       # a broken model, whose declared types remain
            graph = self._model.graph
        return {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}

    def _type(self, name: str) -> onnx.ValueInfoProto | None:
        """Return the declaration of a tensor as an input or output; None if its type is unknown."""
        known, value = self._inferred.get(name), self.values.get(name)
        if known is not None and (value is None or (self.declared and _is_complete(known))):
            return known if known.type.tensor_type.elem_type else None
        if value is None:
            return None
        dtype = onnx.TensorProto.STRING if value.dtype.kind in "OU" else helper.np_dtype_to_tensor_dtype(value.dtype)
        return helper.make_tensor_value_info(name, dtype, value.shape)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, those that its subgraphs take from the graphs around them included."""
    yield from (name for name in node.input if name)
    for graph in graphs_in(node):
        defined = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for node_inside in graph.node:
            yield from (name for name in _reads(node_inside) if name not in defined)
            defined.update(node_inside.output)
        yield from (output.name for output in graph.output if output.name not in defined)


def _is_complete(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    return kind.elem_type != 0 and kind.HasField("shape") and all(
        dim.HasField("dim_value") or dim.dim_param for dim in kind.shape.dim)


# ---- files
def load(path: Path) -> OnnxModel:
    """Read an ONNX file with its weights. Raises ModelError, OSError."""
    try:
        return onnx.load(path)
    except OSError:
        raise
    except Exception as error:      # the class depends on the protobuf runtime
        raise ModelError(f"{path} is no ONNX file: {error}") from error


def inner_tensors(model: onnx.ModelProto) -> list[str]:
    """Return the tensors that the nodes of a model make, in order."""
    return [name for node in model.graph.node for name in node.output if name]


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; weights of more than a GiB go to a file beside it."""
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_IN_A_FILE
    onnx.save(model, path, save_as_external_data=large, location=f"{path.name}.data")


def save_values(values: Mapping[str, Array], path: Path) -> None:
    """Write arrays to an .npz file; strings become NumPy's fixed-width ones."""
    arrays = {name: value.astype(np.str_) if value.dtype.kind == "O" else value for name, value in values.items()}
    with path.open("wb") as stream:
        np.savez(stream, **arrays)      # type: ignore[arg-type]


def read_values(path: Path) -> dict[str, Array]:
    """Read the arrays of `save_values`."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name].astype(object) if archive[name].dtype.kind == "U" else archive[name]
                for name in archive.files}


def weights_count(model: onnx.ModelProto) -> int:
    """Return the number of elements of a model's weights."""
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)


def operators(model: onnx.ModelProto) -> Sequence[str]:
    """Return the operators of a model's nodes, without Constant."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]
