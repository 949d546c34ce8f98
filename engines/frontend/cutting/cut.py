"""An ONNX model as a program: segments, which are compiled, between what the host evaluates.

Nodes have a *phase*. A node stands in the phase of the latest of what it reads, so that the nodes of one phase make one
segment; behind what the host makes, and where it must know by value what its own phase computes, the next one begins:

    phase 0   segment   x -> Conv -> ReduceSum -> n, scores
              host      scores -> NonZero -> where
    phase 1   segment   where, n -> Gather, Range(n) -> ...

Not every value that shapes follow from needs a cut. What follows from extents is known when a segment is specialised;
and small values may be deciding inputs of it. In the body of a Loop the latter would mean a specialisation for every
step, so that the host runs a node there that needs one.
"""
from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from engines.frontend.cutting.ahead import make_ahead
from engines.frontend.cutting.bounded import bound_selections
from engines.frontend.cutting.classes import tell_places
from engines.frontend.cutting.facts import (
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
from engines.frontend.cutting.liveness import with_drops
from engines.frontend.cutting.loops import read_from_around
from engines.frontend.cutting.names import in_one_scope
from engines.frontend.names import graphs_in
from engines.frontend.onnx_file import OnnxModel, array_of
from engines.frontend.onnx_import import node_of
from engines.frontend.operators.contrib.bounded import DOMAIN
from engines.ir.graph import Array
from engines.ir.serialize import node_to_json
from engines.ops.fallback import RANDOM, as_onnx
from engines.plan.plan import IoTensor, SegmentPart
from engines.plan.program import Instruction, Kind, Region, Text

_HOST = -2          # as a phase: no segment can have the node


@dataclass(frozen=True)
class Cut:
    """A program without its options. Weights and texts: constants, by name."""
    main: Region
    segments: tuple[SegmentPart, ...]
    weights: dict[str, Array]
    texts: dict[str, Text]

    @property
    def is_whole(self) -> bool:
        """Whether it is but one segment: the model is a graph like any other."""
        return not self.main.instructions or len(self.main.instructions) == 1 and not self.main.instructions[0].op


def cut(source: OnnxModel, by_host: Collection[str] = (), bounded: bool = True) -> Cut:
    """The program of a model. by_host: nodes, by their first output, that no segment can have. bounded: segments
    compute what data select, as far as it may be."""
    model = in_one_scope(source.proto, source.weights)
    read_from_around(model.graph)
    tell_places(model.graph)
    make_ahead(model, source.weights)
    cutter = _Cutter(source, model, frozenset([*by_host, *(bound_selections(model) if bounded else ())]))
    inputs = tuple(value.name for value in model.graph.input if value.name not in source.weights)
    main = cutter.region(model.graph, inputs, {name: _Value(-1, False, False, True) for name in inputs}, loop=False)
    texts = {name: _text(array) for name, array in cutter.texts.items()}
    return Cut(main, tuple(cutter.segments), cutter.weights, texts)


@dataclass(frozen=True)
class _Value:
    """phase: in which it is made, by the segment or by the host; -1: it is there before. known: it follows from
    extents. easy: from these and from small values that are there before its phase, or it may be such a value."""
    phase: int
    by_segment: bool
    known: bool
    easy: bool

    @property
    def ready(self) -> int:
        """The first phase whose segment may read it."""
        return self.phase if self.by_segment else self.phase + 1


_Values = MutableMapping[str, _Value]


@dataclass
class _Cutter:
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

    def region(self, graph: onnx.GraphProto, inputs: Sequence[str], values: _Values, loop: bool) -> Region:
        """values: of what it may read. loop: it is run many times, with other values each."""
        walk = _Walk(self, values, loop)
        for tensor in graph.initializer:
            self._constant(tensor.name, array_of(self.source.name, tensor))
        plain: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        hosts: dict[int, list[Instruction]] = defaultdict(list)
        for node in graph.node:
            if (array := constant_of(self.source.name, node)) is not None:
                self._constant(node.output[0], array)
                continue
            phase = walk.place(node)
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

    def _segment(self, nodes: Sequence[onnx.NodeProto], wanted: Collection[str]) -> list[Instruction]:
        """What runs these nodes; nothing if nobody wants what they make."""
        made = dict.fromkeys(name for node in nodes for name in node.output if name)
        outputs = tuple(name for name in made if name in wanted)
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

    def _instruction(self, node: onnx.NodeProto, values: dict[str, _Value], loop: bool) -> Instruction:
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

    def _inner(self, node: onnx.NodeProto, graph: onnx.GraphProto, values: dict[str, _Value], loop: bool) -> Region:
        repeated = node.op_type != "If"
        keyable = _Walk(self, values, loop).keyable
        inner: dict[str, _Value] = {name: _Value(-1, False, False, keyable(name)) for name in captured(graph)
                                    if name not in self.weights and name in values}
        inputs = [value.name for value in graph.input]
        inner.update({name: _Value(-1, False, False, not repeated) for name in inputs})
        return self.region(graph, inputs, inner, loop or repeated)


@dataclass
class _Walk:
    """Finds the phases of the nodes of one graph, in order."""
    cutter: _Cutter
    values: _Values
    loop: bool

    def keyable(self, name: str) -> bool:
        """Whether the value may be a deciding input of a later segment than that which makes it."""
        value = self.values[name]
        return is_small(self.cutter.kinds.get(name)) and (value.known or value.easy or value.by_segment
                                                          and not self.loop)

    def place(self, node: onnx.NodeProto, floor: int = 0) -> int:
        """The phase of the segment that has the node, or _HOST."""
        read = [name for name in reads(node) if name in self.values]
        phase = max((self.values[name].ready for name in read), default=floor)
        phase = max(phase, floor)
        if self._only_by_host(node, read, phase):
            return _HOST
        if is_standard(node):
            for index in BY_VALUE.get(node.op_type, ()):
                name = node.input[index] if index < len(node.input) else ""
                if name in self.values and not self._told(name, phase):
                    if not self.keyable(name):
                        return _HOST
                    phase = max(phase, self.values[name].phase + 1)
        if node.op_type == "If" and is_standard(node) and not all(
                self._is_flat(branch, phase) for branch in graphs_in(node)):
            return _HOST
        self._make(node, read, phase)
        return phase

    def by_host(self, node: onnx.NodeProto) -> int:
        """The phase behind whose segment the host runs the node."""
        phase = max((self.values[name].phase for name in reads(node) if name in self.values), default=-1)
        for name in filter(None, node.output):
            self.values[name] = _Value(phase, False, False, not self.loop)
        return phase

    def _only_by_host(self, node: onnx.NodeProto, read: Sequence[str], phase: int) -> bool:
        if node.output and node.output[0] in self.cutter.by_host:
            return True
        if not all(holds_numbers(self.cutter.kinds.get(name)) for name in (*node.input, *node.output)):
            return True
        if any(name in self.cutter.texts for name in node.input) or not is_standard(node):
            return any(name in self.cutter.texts for name in node.input)
        if node.op_type in SELECTS:
            return not all(self.values[name].known and self._told(name, phase) for name in read)
        if self.loop and node.op_type == "Gather" and phase == 0 and not any(
                self.values[name].by_segment or self.values[name].easy for name in node.input[1:] if name in read):
            return True         # one row a step: a segment would take all rows in, to read one
        return node.op_type in NO_TENSORS or node.op_type in CONTROL and node.op_type != "If"

    def _told(self, name: str, phase: int) -> bool:
        """Whether a segment of that phase knows the value, or may have it as a deciding input, without a cut."""
        value = self.values[name]
        if value.by_segment and value.phase == phase:
            return value.known or value.easy
        return self.keyable(name)

    def _is_flat(self, graph: onnx.GraphProto, phase: int) -> bool:
        """Whether the branch of an If may stand in a segment of that phase whole."""
        inner = _Walk(self.cutter, ChainMap({}, self.values), self.loop)
        for tensor in graph.initializer:
            if tensor.data_type == onnx.TensorProto.STRING:
                return False
        return all(inner.place(node, phase) == phase for node in graph.node)

    def _make(self, node: onnx.NodeProto, read: Iterable[str], phase: int) -> None:
        read = list(read)
        by_shape = is_standard(node) and node.op_type in ("Shape", "Size")
        random = node.op_type in RANDOM
        known = by_shape or not random and all(
            self.values[name].known and self._told(name, phase) for name in read)
        easy = not random and all(self._told(name, phase) for name in read)
        for name in filter(None, node.output):
            self.values[name] = _Value(phase, True, known, known or easy)


def _used(instruction: Instruction) -> set[str]:
    return {*instruction.inputs, *(name for region in instruction.regions for name in region.captures)}


def _in_order(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs of a node: of an If, then and else."""
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
    """The inputs of a program; shapes: that a user gives."""
    found = []
    for value in source.inputs:
        kind = _kind(value.name, value.type)
        given = shapes.get(value.name, kind.shape)
        found.append(IoTensor(value.name, kind.dtype, tuple(
            wanted if isinstance(wanted, int) and wanted >= 0 else known
            for wanted, known in zip(given, kind.shape, strict=True))))
    return tuple(found)
