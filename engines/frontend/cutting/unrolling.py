"""Unroll Loops and Scans with a small, constant number of steps.

    h = Loop(5, h0; h -> tanh(h W + x))     ->      h = tanh(h0 W + x), five times over

The model is then one graph in place of a program: steps fuse, and none runs through the host's interpreter.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from infer_server.engines.frontend.branches import defined_in, rename
from infer_server.engines.frontend.cutting.ahead import make_ahead
from infer_server.engines.frontend.cutting.facts import (
    CONTROL,
    NO_TENSORS,
    SELECTS,
    Kinds,
    constant_of,
    is_standard,
    kinds_of,
)
from infer_server.engines.frontend.cutting.loops import read_from_around
from infer_server.engines.frontend.cutting.names import free_name, in_one_scope, names_in
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.frontend.onnx_file import OnnxModel, array_of
from infer_server.engines.frontend.opsets import opset_of
from infer_server.engines.ir.graph import Array

MOST_STEPS = 128
MOST_NODES = 512        # most nodes that a Loop or Scan is unrolled to
LEAST_OPSET = 13        # the first one in which the axes of Unsqueeze are an input


def with_steps_unrolled(source: OnnxModel) -> OnnxModel:
    """Return the model with short Loops and Scans unrolled; the model itself if there are none."""
    if not any(is_standard(node) and node.op_type in ("Loop", "Scan") for node in source.proto.graph.node):
        return source
    if opset_of(source.proto) < LEAST_OPSET:
        return source
    model = in_one_scope(source.proto, source.weights)
    read_from_around(model.graph)
    make_ahead(model, source.weights)
    known = dict(source.weights) | {node.output[0]: array for node in model.graph.node
                                    if (array := constant_of(source.name, node)) is not None}
    kinds, nodes, before = kinds_of(model, source.weights), list(model.graph.node), len(model.graph.node)
    taken = names_in(model.graph).union(source.weights)
    del model.graph.node[:]
    for node in nodes:
        repeated = _repeated(source.name, node, known, kinds)
        model.graph.node.extend(repeated.nodes(taken) if repeated else [node])
    return source if len(model.graph.node) == before else source.with_proto(model)


@dataclass
class _Repeated:
    """Loop or Scan of a known number of steps.

    `rows` are the scan inputs as (tensor, axis, reversed), `stacks` the scan outputs as (axis, reversed).
    """
    node: onnx.NodeProto
    body: onnx.GraphProto
    steps: int
    carried: list[str]
    rows: Sequence[tuple[str, int, int]] = ()
    stacks: Sequence[tuple[int, int]] = ()
    unrolled: list[onnx.NodeProto] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    @property
    def is_loop(self) -> bool:
        return self.node.op_type == "Loop"

    def nodes(self, taken: set[str]) -> list[onnx.NodeProto]:
        """Return the unrolled nodes. `taken`: the names of all tensors, to which new ones are added."""
        self.taken = taken
        self.unrolled = [helper.make_node("Constant", [], [tensor.name], value=tensor)
                         for tensor in self.body.initializer]
        own = defined_in(self.body) - {tensor.name for tensor in self.body.initializer}
        stacked: list[list[str]] = [[] for _ in self.stacks]
        for step in range(self.steps):
            names = {name: self._free(f"{step}.{name}") for name in sorted(own)}
            results = list(self._step(step, names))[self.is_loop:]
            self.carried = results[:len(self.carried)]
            for stack, result in zip(stacked, results[len(self.carried):], strict=True):
                stack.append(result)
        outputs = [*self.carried, *(self._stack(names, *how) for names, how in zip(stacked, self.stacks, strict=True))]
        for made, wanted in zip(outputs, self.node.output, strict=False):
            if wanted:
                self._add("Identity", [made], wanted)
        return self.unrolled

    def _step(self, step: int, names: dict[str, str]) -> Iterator[str]:
        """Add a step and return the names of its outputs. `names` maps the body's tensors to those of this step."""
        head = [self._number(f"{step}.number", np.array(step, np.int64)), self._number(f"{step}.going", np.array(True))]
        rows = [self._row(step, index, *row) for index, row in enumerate(self.rows)]
        names.update(zip((value.name for value in self.body.input),
                         [*(head if self.is_loop else ()), *self.carried, *rows], strict=True))
        copy = onnx.GraphProto()
        copy.CopyFrom(self.body)
        del copy.initializer[:], copy.input[:]
        rename(copy, names)
        for node in copy.node:
            node.name = self._name(f"{step}.{node.name}") if node.name else ""
        self.unrolled.extend(copy.node)
        return (value.name for value in copy.output)

    def _row(self, step: int, index: int, tensor: str, axis: int, backward: int) -> str:
        at = self.steps - 1 - step if backward else step
        number = self._number(f"{step}.at{index}", np.array(at, np.int64))
        return self._add("Gather", [tensor, number], self._free(f"{step}.row{index}"), axis=axis)

    def _stack(self, names: list[str], axis: int, backward: int) -> str:
        axes = self._number(f"{names[0]}.axes", np.array([axis], np.int64))
        parts = [self._add("Unsqueeze", [name, axes], self._free(f"{i}.{name}.part")) for i, name in enumerate(names)]
        return self._add("Concat", parts[::-1] if backward else parts, self._free(f"{names[0]}.stack"), axis=axis)

    def _number(self, name: str, value: Array) -> str:
        output = self._free(name)
        self.unrolled.append(helper.make_node("Constant", [], [output], value=numpy_helper.from_array(value)))
        return output

    def _add(self, op: str, inputs: Sequence[str], output: str, **attrs: Any) -> str:
        self.unrolled.append(helper.make_node(op, inputs, [output], output, **attrs))
        return output

    def _free(self, name: str) -> str:
        """Reserve and return a unique name."""
        found = free_name(self._name(name), self.taken)
        self.taken.add(found)
        return found

    def _name(self, name: str) -> str:
        return f"{next(filter(None, self.node.output), self.node.name)}.{name}"


def _repeated(model: str, node: onnx.NodeProto, known: Mapping[str, Array], kinds: Kinds) -> _Repeated | None:
    """Return a Loop or Scan to unroll; None for other nodes, or if its steps are unknown or too many."""
    if not is_standard(node) or node.op_type not in ("Loop", "Scan"):
        return None
    (body,) = graphs_in(node)
    if any([*graphs_in(inner)] or is_standard(inner) and inner.op_type in SELECTS | NO_TENSORS | CONTROL
           for inner in body.node):
        return None
    if any(kinds[name].WhichOneof("value") != "tensor_type" for name in node.input if name in kinds):
        return None
    found = _of_loop(model, node, body, known) if node.op_type == "Loop" else _of_scan(node, body, kinds)
    if found is None or not 0 < found.steps <= MOST_STEPS or found.steps * len(body.node) > MOST_NODES:
        return None
    return found


def _of_loop(model: str, node: onnx.NodeProto, body: onnx.GraphProto, known: Mapping[str, Array]) -> _Repeated | None:
    most, first = (known.get(name) for name in node.input[:2])
    inside = dict(known) | {tensor.name: array_of(model, tensor) for tensor in body.initializer}
    inside |= {made.output[0]: array for made in body.node if (array := constant_of(model, made)) is not None}
    copies = {made.output[0]: made.input[0] for made in body.node if made.op_type == "Identity"}
    condition = body.output[0].name
    while condition in copies:
        condition = copies[condition]
    goes_on = condition == body.input[1].name or bool(np.all(inside.get(condition, np.array(False))))
    if most is None or not goes_on or node.input[1] and (first is None or not np.all(first)):
        return None
    carried = list(node.input[2:])
    return _Repeated(node, body, int(most.reshape(-1)[0]), carried,
                     stacks=[(0, 0)] * (len(body.output) - 1 - len(carried)))


def _of_scan(node: onnx.NodeProto, body: onnx.GraphProto, kinds: Kinds) -> _Repeated | None:
    attrs = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    count = attrs["num_scan_inputs"]
    carried, scanned = list(node.input[:-count]), node.input[-count:]
    made = len(body.output) - len(carried)

    def each(name: str, length: int) -> Sequence[int]:
        found: Sequence[int] = attrs.get(name) or [0] * length
        return found

    rows = list(zip(scanned, each("scan_input_axes", count), each("scan_input_directions", count), strict=True))
    stacks = list(zip(each("scan_output_axes", made), each("scan_output_directions", made), strict=True))
    extents = kinds[scanned[0]].tensor_type.shape.dim if scanned[0] in kinds else []
    steps = extents[rows[0][1]].dim_value if extents else 0
    return _Repeated(node, body, steps, carried, rows, stacks)
