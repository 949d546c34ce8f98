"""Hoist products of rows of a sequence out of Loops and Scans, so that all steps share one product.

    step t: h = tanh(x[t] W + h R)      ->      p = x W; step t: h = tanh(p[t] + h R)
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import helper

from infer_server.engines.frontend.branches import defined_in
from infer_server.engines.frontend.cutting.facts import is_standard, kinds_of, reads
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.ir.graph import Array

_OF_ONE = frozenset({"Abs", "Cast", "Ceil", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity",
                     "LeakyRelu", "Log", "Neg", "Not", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"})
_OF_TWO = frozenset({"Add", "Div", "Mul", "Sub"})
_PRODUCTS = frozenset({"MatMul"})
_Ranks = Mapping[str, int]


def make_ahead(model: onnx.ModelProto, weights: Mapping[str, Array]) -> None:
    """Rewrite the Loops and Scans of a model, whose tensor names must be unique."""
    if not any(_is_repeated(node) for node in _every(model.graph)):
        return
    ranks = {name: len(kind.tensor_type.shape.dim) for name, kind in kinds_of(model, weights).items()
             if kind.HasField("tensor_type") and kind.tensor_type.HasField("shape")}
    _rewrite(model.graph, {**ranks, **{name: array.ndim for name, array in weights.items()}}, weights)


def _is_repeated(node: onnx.NodeProto) -> bool:
    return node.op_type in ("Loop", "Scan") and is_standard(node)


def _every(graph: onnx.GraphProto) -> Sequence[onnx.NodeProto]:
    return [inner for node in graph.node for inner in (node, *(n for g in graphs_in(node) for n in _every(g)))]


def _rewrite(graph: onnx.GraphProto, ranks: _Ranks, weights: Collection[str]) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in graphs_in(node):
            _rewrite(inner, ranks, weights)
        if _is_repeated(node):
            (body,) = graphs_in(node)
            of_body = {tensor.name: len(tensor.dims) for tensor in body.initializer}
            nodes += _RowHoister(node, body, {**ranks, **of_body}, weights).taken_out(graph)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


@dataclass(frozen=True)
class _SequenceRow:
    """Value of a step that is a row of the tensor `of`.

    `counter` is the tensor of the row's index; "" in a Scan, which reads rows in reverse if `backward`.
    """
    of: str
    rank: int
    counter: str = ""
    backward: int = 0


@dataclass
class _RowHoister:
    """Values of a body that are rows of tensors that can be computed before the first step."""
    node: onnx.NodeProto
    body: onnx.GraphProto
    ranks: _Ranks
    weights: Collection[str]
    rows: dict[str, _SequenceRow] = field(default_factory=dict)
    hoisted: dict[str, onnx.NodeProto] = field(default_factory=dict)    # by the output's name in the body

    def __post_init__(self) -> None:
        self.own = defined_in(self.body)
        self.fixed = {tensor.name for tensor in self.body.initializer} | {
            name for node in self.body.node if node.op_type == "Constant" for name in node.output}

    def taken_out(self, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
        """Move nodes out of the body; return those to insert before the Loop or Scan, [] if there is no product."""
        self._find_sources()
        for node in self.body.node:
            self._look(node)
        wanted = self._around_products()
        if not wanted:
            return []
        constants = [node for node in self.body.node if node.op_type == "Constant"]
        graph.initializer.extend(self.body.initializer)
        del self.body.initializer[:]
        left = [node for node in self.body.node if node.op_type != "Constant" and not wanted & {*node.output}]
        needed = {name for node in left for name in reads(node)} | {value.name for value in self.body.output}
        heads = [self._row(name) for name in self.hoisted if name in wanted and name in needed]
        unread = {name for name, row in self.rows.items() if name not in self.hoisted} - needed
        del self.body.node[:]
        self.body.node.extend([head for head in heads if head is not None])
        self.body.node.extend(node for node in left if node.op_type != "Gather" or node.output[0] not in unread)
        return constants + [node for name, node in self.hoisted.items() if name in wanted]

    def _find_sources(self) -> None:
        if self.node.op_type == "Scan":
            if len(self.node.input) != len(self.body.input):
                return          # a Scan of opset 8 runs each item of a batch separately
            attributes = {a.name: helper.get_attribute_value(a) for a in self.node.attribute}
            count = attributes["num_scan_inputs"]
            axes, backward = (attributes.get(name) or [0] * count for name in ("scan_input_axes",
                                                                               "scan_input_directions"))
            for value, outer, axis, turned in zip(self.body.input[-count:], self.node.input[-count:], axes, backward,
                                                  strict=True):
                if axis == 0 and outer in self.ranks:
                    self.rows[value.name] = _SequenceRow(outer, self.ranks[outer] - 1, backward=turned)
            return
        counters = self._counters()
        for node in self.body.node:
            if node.op_type == "Gather" and is_standard(node) and not any(
                    a.name == "axis" and a.i for a in node.attribute):
                source, index = node.input
                if index in counters and self._stays(source) and source not in self.weights and source in self.ranks:
                    self.rows[node.output[0]] = _SequenceRow(source, self.ranks[source] - 1, index)

    def _counters(self) -> set[str]:
        """Return the scalars that grow by a constant in each step."""
        added = {(node.output[0], name) for node in self.body.node if node.op_type == "Add"
                 for name, other in (node.input, node.input[::-1]) if self._stays(other)}
        inputs = self.body.input
        return {inputs[0].name, *(inputs[i].name for i in range(2, len(inputs))
                                  if (self.body.output[i - 1].name, inputs[i].name) in added
                                  and 0 in (self.ranks.get(inputs[i].name), self.ranks.get(self.node.input[i])))}

    def _stays(self, name: str) -> bool:
        return name not in self.own or name in self.fixed

    def _look(self, node: onnx.NodeProto) -> None:
        """Record a node that maps rows to rows, and its version for all rows."""
        rows = [self.rows[name] for name in node.input if name in self.rows]
        others = [name for name in node.input if name not in self.rows]
        if not rows or not is_standard(node) or len({(row.counter, row.backward) for row in rows}) > 1 or any(
                not self._stays(name) or name not in self.ranks for name in others):
            return
        rank = max(row.rank for row in rows)
        if node.op_type in _OF_TWO:
            fits = all(row.rank == rank for row in rows) and all(self.ranks[name] <= rank for name in others)
        elif node.op_type in _PRODUCTS:
            fits = rank >= 1 and len(rows) == 1 and node.input[0] in self.rows and self.ranks[others[0]] == 2
        else:
            fits = node.op_type in _OF_ONE
        if fits:
            name = node.output[0]
            self.rows[name] = replace(rows[0], of=f"{name} of all steps", rank=rank)
            ahead = self.hoisted[name] = onnx.NodeProto()
            ahead.CopyFrom(node)
            ahead.name = f"{node.name} of all steps" if node.name else ""
            ahead.input[:] = [self.rows[given].of if given in self.rows else given for given in node.input]
            ahead.output[:] = [self.rows[name].of]

    def _around_products(self) -> set[str]:
        """Return the values to compute before the loop: products, and the recorded values connected with them."""
        readers = {name: [other for other, node in self.hoisted.items() if self.rows[name].of in node.input]
                   for name in self.hoisted}
        sources = {name: [other for other in self.hoisted if self.rows[other].of in self.hoisted[name].input]
                   for name in self.hoisted}
        found = {name for name, node in self.hoisted.items() if node.op_type in _PRODUCTS}
        for edges in (readers, sources):
            waiting = [*found]
            while waiting:
                new = {*edges[waiting.pop()]} - found
                waiting += new
                found |= new
        return found

    def _row(self, name: str) -> onnx.NodeProto | None:
        """Let a step read its row: return a Gather for a Loop, or add a scan input and return None."""
        row = self.rows[name]
        if row.counter:
            return helper.make_node("Gather", [row.of, row.counter], [name], name=f"{name} of a step", axis=0)
        self.node.input.append(row.of)
        self.body.input.append(helper.make_empty_tensor_value_info(name))
        for attribute in self.node.attribute:
            if attribute.name == "num_scan_inputs":
                attribute.i += 1
            elif attribute.name in ("scan_input_axes", "scan_input_directions"):
                attribute.ints.append(row.backward if attribute.name.endswith("directions") else 0)
        return None
