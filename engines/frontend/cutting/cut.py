"""Partition an ONNX model into a program: segments, which are compiled, and nodes that the host evaluates.

Nodes have a *phase*, the latest one of their inputs, and the nodes of one phase are one segment. The next phase begins
after a node of the host, and at a node that needs the value of a tensor of its own phase:

    phase 0   segment   x -> Conv -> ReduceSum -> n, scores
              host      scores -> NonZero -> where
    phase 1   segment   where, n -> Gather, Range(n) -> ...

Not every value that shapes depend on needs a cut. Values that follow from extents are known when a segment is
specialised, and small values may be its deciding inputs. In the body of a Loop these would need a specialisation for
every step, so there the host runs the node instead.
"""
from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from infer_server.engines.frontend.cutting.ahead import make_ahead
from infer_server.engines.frontend.cutting.bounded import bound_selections
from infer_server.engines.frontend.cutting.classes import output_class_indices
from infer_server.engines.frontend.cutting.facts import (
    BY_VALUE,
    CONTROL,
    NO_TENSORS,
    SELECTS,
    captured,
    constant_of,
    holds_numbers,
    is_small,
    is_standard,
    kinds_of,
    reads,
)
from infer_server.engines.frontend.cutting.liveness import with_drops
from infer_server.engines.frontend.cutting.loops import read_from_around
from infer_server.engines.frontend.cutting.names import in_one_scope
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.frontend.onnx_file import OnnxModel, array_of
from infer_server.engines.frontend.onnx_import import node_of
from infer_server.engines.frontend.operators.contrib.bounded import DOMAIN
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.serialize import node_to_json
from infer_server.engines.ops.fallback import RANDOM, as_onnx
from infer_server.engines.plan.plan import IoTensor, SegmentPart
from infer_server.engines.plan.program import Instruction, Kind, Region, Text

_HOST = -2          # the phase of nodes that only the host can run


@dataclass(frozen=True)
class Partition:
    """Program without its options. `weights` and `texts` are the numeric and string constants by name."""
    main: Region
    segments: tuple[SegmentPart, ...]
    weights: dict[str, Array]
    texts: dict[str, Text]

    @property
    def is_whole(self) -> bool:
        """True if the program is a single segment, so that the model can be one graph."""
        return not self.main.instructions or len(self.main.instructions) == 1 and not self.main.instructions[0].op


def cut(source: OnnxModel, by_host: Collection[str] = (), bounded: bool = True) -> Partition:
    """Partition a model.

    Parameters
    ----------
    source : OnnxModel
        The model, which is not changed.
    by_host : collection of str
        The first outputs of nodes that only the host can run.
    bounded : bool
        Let segments compute data-dependent selections with an upper bound (bounded.py).
    """
    model = in_one_scope(source.proto, source.weights)
    read_from_around(model.graph)
    output_class_indices(model.graph)
    make_ahead(model, source.weights)
    cutter = _Partitioner(source, model, frozenset([*by_host, *(bound_selections(model) if bounded else ())]))
    inputs = tuple(value.name for value in model.graph.input if value.name not in source.weights)
    main = cutter.region(model.graph, inputs, {name: _Fact(-1, False, False, True) for name in inputs}, loop=False)
    texts = {name: _text(array) for name, array in cutter.texts.items()}
    return Partition(main, tuple(cutter.segments), cutter.weights, texts)


@dataclass(frozen=True)
class _Fact:
    """Facts about a tensor.

    Attributes
    ----------
    phase : int
        The phase that computes it; -1 for inputs.
    by_segment : bool
        Whether the segment computes it, or the host.
    known : bool
        Whether its value follows from extents.
    easy : bool
        Whether its value follows from extents and deciding inputs, or it can be a deciding input.
    """
    phase: int
    by_segment: bool
    known: bool
    easy: bool

    @property
    def ready(self) -> int:
        """The first phase whose segment can read it."""
        return self.phase if self.by_segment else self.phase + 1


_Facts = MutableMapping[str, _Fact]


@dataclass
class _Partitioner:
    source: OnnxModel
    model: onnx.ModelProto
    by_host: frozenset[str]
    segments: list[SegmentPart] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = kinds_of(self.model, self.source.weights)
        self.opsets = {entry.domain.replace("ai.onnx", "") if entry.domain == "ai.onnx" else entry.domain: entry.version
                       for entry in self.model.opset_import}
        self.weights = {name: array for name, array in self.source.weights.items() if array.dtype.kind not in "OUS"}
        self.texts = {name: array for name, array in self.source.weights.items() if name not in self.weights}

    def region(self, graph: onnx.GraphProto, inputs: Sequence[str], values: _Facts, loop: bool) -> Region:
        """Partition a graph. `values`: facts about the tensors it may read; `loop`: it runs many times."""
        walk = _Walk(self, values, loop)
        for tensor in graph.initializer:
            self._constant(tensor.name, array_of(self.source.name, tensor))
        plain: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        hosts: dict[int, list[Instruction]] = defaultdict(list)
        for node in graph.node:
            if (array := constant_of(self.source.name, node)) is not None:
                self._constant(node.output[0], array)
                continue
            phase = walk.phase_of(node)
            if phase != _HOST:
                plain[phase].append(node)
                continue
            before = dict(walk.values)
            hosts[walk.by_host(node)].append(self._instruction(node, before, loop))
        outputs = tuple(value.name for value in graph.output)
        instructions: list[Instruction] = []
        later = {name for made in hosts.values() for instruction in made for name in _used(instruction)} | {*outputs}
        for phase in sorted({*plain, *hosts}):
            if phase in plain:
                instructions += self._segment(plain[phase], later | {
                    name for q, nodes in plain.items() if q > phase for node in nodes for name in reads(node)})
            instructions += hosts.get(phase, [])
        taken = [name for name in captured(graph) if name not in self.weights]
        kinds = tuple(_kind(name, self.kinds.get(name)) for name in outputs)
        return with_drops(Region(tuple(inputs), outputs, tuple(instructions), tuple(taken), kinds))

    def _constant(self, name: str, array: Array) -> None:
        if array.dtype.kind in "OUS":
            self.texts[name] = array
        else:
            self.weights[name] = array

    def _segment(self, nodes: Sequence[onnx.NodeProto], needed: Collection[str]) -> list[Instruction]:
        """Add a segment of these nodes and return its instruction; [] if none of their outputs is `needed`."""
        made = dict.fromkeys(name for node in nodes for name in node.output if name)
        outputs = tuple(name for name in made if name in needed)
        if not outputs:
            return []
        read = dict.fromkeys(name for node in nodes for name in reads(node) if name not in made)
        inputs = tuple(name for name in read if name not in self.weights)
        name = f"{self.source.name}[{len(self.segments)}]"
        graph = helper.make_graph(list(nodes), name, [helper.make_empty_tensor_value_info(n) for n in inputs],
                                  [helper.make_empty_tensor_value_info(n) for n in outputs])
        model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        model.metadata_props.extend(self.model.metadata_props)
        self.segments.append(SegmentPart(name, inputs, outputs, tuple(n for n in read if n in self.weights),
                                         model.SerializeToString(deterministic=True)))
        return [Instruction("", name, inputs, outputs, len(self.segments) - 1)]

    def _instruction(self, node: onnx.NodeProto, values: dict[str, _Fact], loop: bool) -> Instruction:
        name = node.name or next(iter(node.output), node.op_type)
        control = is_standard(node) and node.op_type in CONTROL
        bare = onnx.NodeProto()
        bare.CopyFrom(node)
        kept = [a for a in node.attribute if a.type != onnx.AttributeProto.TYPE_PROTO and not (
            control and (a.HasField("g") or a.graphs))]
        del bare.attribute[:]
        bare.attribute.extend(kept)
        domain = "" if is_standard(node) or node.domain == DOMAIN else node.domain
        written = node_to_json(as_onnx(node_of(self.source.name, bare), self.opsets.get(domain, 1), domain))
        regions = tuple(self._inner(node, graph, values, loop) for graph in _in_order(node)) if control else ()
        return Instruction(node.op_type, name, tuple(node.input), tuple(node.output), node=written, regions=regions)

    def _inner(self, node: onnx.NodeProto, graph: onnx.GraphProto, values: dict[str, _Fact], loop: bool) -> Region:
        repeated = node.op_type != "If"
        keyable = _Walk(self, values, loop).keyable
        inner: dict[str, _Fact] = {name: _Fact(-1, False, False, keyable(name)) for name in captured(graph)
                                    if name not in self.weights and name in values}
        inputs = [value.name for value in graph.input]
        inner.update({name: _Fact(-1, False, False, not repeated) for name in inputs})
        return self.region(graph, inputs, inner, loop or repeated)


@dataclass
class _Walk:
    """Assignment of phases to the nodes of one graph, in order."""
    cutter: _Partitioner
    values: _Facts
    loop: bool

    def keyable(self, name: str) -> bool:
        """Return True if the value can be a deciding input of a later segment than the one that computes it."""
        value = self.values[name]
        return is_small(self.cutter.kinds.get(name)) and (value.known or value.easy or value.by_segment
                                                          and not self.loop)

    def phase_of(self, node: onnx.NodeProto, floor: int = 0) -> int:
        """Return the phase of the segment that runs the node, or _HOST."""
        read = [name for name in reads(node) if name in self.values]
        phase = max((self.values[name].ready for name in read), default=floor)
        phase = max(phase, floor)
        if self._only_by_host(node, read, phase):
            return _HOST
        if is_standard(node):
            for index in BY_VALUE.get(node.op_type, ()):
                name = node.input[index] if index < len(node.input) else ""
                if name in self.values and not self._is_available(name, phase):
                    if not self.keyable(name):
                        return _HOST
                    phase = max(phase, self.values[name].phase + 1)
        if node.op_type == "If" and is_standard(node) and not all(
                self._is_flat(branch, phase) for branch in graphs_in(node)):
            return _HOST
        self._make(node, read, phase)
        return phase

    def by_host(self, node: onnx.NodeProto) -> int:
        """Return the phase after whose segment the host runs the node."""
        phase = max((self.values[name].phase for name in reads(node) if name in self.values), default=-1)
        for name in filter(None, node.output):
            self.values[name] = _Fact(phase, False, False, not self.loop)
        return phase

    def _only_by_host(self, node: onnx.NodeProto, read: Sequence[str], phase: int) -> bool:
        if node.output and node.output[0] in self.cutter.by_host:
            return True
        if not all(holds_numbers(self.cutter.kinds.get(name)) for name in (*node.input, *node.output)):
            return True
        if any(name in self.cutter.texts for name in node.input) or not is_standard(node):
            return any(name in self.cutter.texts for name in node.input)
        if node.op_type in SELECTS:
            return not all(self.values[name].known and self._is_available(name, phase) for name in read)
        if self.loop and node.op_type == "Gather" and phase == 0 and not any(
                self.values[name].by_segment or self.values[name].easy for name in node.input[1:] if name in read):
            return True         # reads one row a step: a segment would load all rows
        return node.op_type in NO_TENSORS or node.op_type in CONTROL and node.op_type != "If"

    def _is_available(self, name: str, phase: int) -> bool:
        """Return True if a segment of this phase knows the value, or can take it as a deciding input, without a cut."""
        value = self.values[name]
        if value.by_segment and value.phase == phase:
            return value.known or value.easy
        return self.keyable(name)

    def _is_flat(self, graph: onnx.GraphProto, phase: int) -> bool:
        """Return True if all of an If's branch fits a segment of this phase."""
        inner = _Walk(self.cutter, ChainMap({}, self.values), self.loop)
        for tensor in graph.initializer:
            if tensor.data_type == onnx.TensorProto.STRING:
                return False
        return all(inner.phase_of(node, phase) == phase for node in graph.node)

    def _make(self, node: onnx.NodeProto, read: Iterable[str], phase: int) -> None:
        read = list(read)
        by_shape = is_standard(node) and node.op_type in ("Shape", "Size")
        random = node.op_type in RANDOM
        known = by_shape or not random and all(
            self.values[name].known and self._is_available(name, phase) for name in read)
        easy = not random and all(self._is_available(name, phase) for name in read)
        for name in filter(None, node.output):
            self.values[name] = _Fact(phase, True, known, known or easy)


def _used(instruction: Instruction) -> set[str]:
    return {*instruction.inputs, *(name for region in instruction.regions for name in region.captures)}


def _in_order(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the subgraphs of a node, sorted by attribute, the then branch of an If first."""
    graphs = sorted(((a.name != "then_branch", a.name), a.g) for a in node.attribute if a.HasField("g"))
    return [graph for _, graph in graphs]


def _text(array: Array) -> Text:
    words = (word.decode() if isinstance(word, bytes) else str(word) for word in array.reshape(-1).tolist())
    return Text(array.shape, tuple(words))


def _kind(name: str, kind: onnx.TypeProto | None) -> Kind:
    if kind is None or not kind.HasField("tensor_type"):
        return Kind((kind.WhichOneof("value") or "").removesuffix("_type") if kind else "")
    tensor = kind.tensor_type
    dtype = "object" if tensor.elem_type == onnx.TensorProto.STRING else helper.tensor_dtype_to_np_dtype(
        tensor.elem_type).name if tensor.elem_type else ""
    return Kind(dtype, tuple(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else
                             d.dim_param or f"{name}.{axis}" for axis, d in enumerate(tensor.shape.dim)))


def inputs_of(source: OnnxModel, shapes: Mapping[str, Sequence[int | str | None]]) -> tuple[IoTensor, ...]:
    """Return the inputs of a program, with the extents that the user gives in `shapes`."""
    found = []
    for value in source.inputs:
        kind = _kind(value.name, value.type)
        given = shapes.get(value.name, kind.shape)
        found.append(IoTensor(value.name, kind.dtype, tuple(
            wanted if isinstance(wanted, int) and wanted >= 0 else known
            for wanted, known in zip(given, kind.shape, strict=True))))
    return tuple(found)
