"""Graph representation: immutable, nodes in topological order, edges are tensor names.

A tensor keeps its name in the ONNX file from import to response. A node's `origin` lists the ONNX nodes that it stands
for, so that messages can name what passes merged. A fused node holds the nodes that it replaces in `body`, in order,
which defines its meaning:

    Fused(x, w, b, r) -> y    body: t0 = Conv(x, w, b); t1 = Add(t0, r); y = Relu(t1)
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.errors import GraphError

Dim = int | str                 # str: a symbolic extent
BATCH = "batch"                 # the symbolic extent of the batch
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class QParams:
    """Quantisation parameters: real = scale * (stored - zero_point), per tensor (axis None) or per index of `axis`."""
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    dtype: str                  # stored dtype, "uint8" or "int8"
    axis: int | None = None

    def __str__(self) -> str:
        if self.axis is not None:
            return f"{self.dtype}[{len(self.scale)}@{self.axis}]"
        return f"{self.dtype}({self.scale[0]:.4g}, {self.zero_point[0]})"


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and shape of a tensor's values, and its quantisation parameters if it is stored quantised."""
    dtype: np.dtype[Any]
    shape: tuple[Dim, ...]
    quant: QParams | None = None

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{self.quant or self.dtype}[{shape}]"


def trimmed(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of inputs or outputs without trailing absent ones ("")."""
    return tuple(names[:max((count for count, name in enumerate(names, 1) if name), default=0)])


def type_of(array: Array, quant: QParams | None = None) -> TensorType:
    """Return the type of an array."""
    return TensorType(array.dtype, array.shape, quant)


@dataclass(frozen=True)
class Node:
    """Operation, named as in ONNX. An input of "" is an absent optional input."""
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    origin: tuple[str, ...] = ()        # names of the ONNX nodes that it stands for
    body: tuple[Node, ...] = ()         # nodes that a Fused node replaces
    precision: str = "fp32"             # arithmetic: fp32, bf16, fp16 or int8

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    @property
    def anchor(self) -> Node:
        """Node that does the main work: the first of the body, or the node itself."""
        return self.body[0] if self.body else self

    def with_body(self, parts: Sequence[Node]) -> Node:
        """Return a Fused node with these parts as its body, or the part itself if there is only one.

        The inputs are what parts read and none produces, in order; the outputs and the name stay.
        """
        if len(parts) == 1:
            return replace(parts[0], precision=self.precision)
        made = {output for part in parts for output in part.outputs}
        inputs = dict.fromkeys(name for part in parts for name in part.inputs if name and name not in made)
        return replace(self, op="Fused", inputs=tuple(inputs), attrs={}, body=tuple(parts))

    def __str__(self) -> str:
        attrs = "".join(f" {key}={value}" for key, value in self.attrs.items())
        text = f"{', '.join(self.outputs)} = {self.op}({', '.join(self.inputs)}){attrs}"
        if self.precision != "fp32":
            text += f" [{self.precision}]"
        return "\n".join([text, *(f"    {inner}" for inner in self.body)])


@dataclass(frozen=True)
class Graph:
    """Computation graph. `types` has every tensor: inputs, constants and results of nodes, also within bodies."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    types: Mapping[str, TensorType] = field(default_factory=dict)
    dependence: str = ""        # why items of a batch depend on each other; "" if they do not
    watched: tuple[str, ...] = ()       # outputs that are read as soon as they are final, and not kept
    in_place: Mapping[str, str] = field(default_factory=dict)   # results of Concat and ScatterElements that overwrite
                                                                # an input, which nothing else reads later

    @cached_property
    def producer(self) -> Mapping[str, Node]:
        """Map from tensors to the nodes that produce them; inputs and constants have none."""
        return MappingProxyType({output: node for node in self.nodes for output in node.outputs})

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """Map from tensors to the nodes that read them, in order; () for an unused graph output."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        known = [*self.inputs, *self.constants, *(o for n in self.nodes for o in n.outputs)]
        return MappingProxyType({name: tuple(readers.get(name, ())) for name in known})

    @cached_property
    def answers(self) -> dict[Any, dict[str, Any]]:
        """Cache of dataflow analyses of this graph, by analysis and tensor (passes/rewriting/dataflow.py)."""
        return {}

    def is_constant(self, name: str) -> bool:
        return name in self.constants

    def shape(self, name: str) -> tuple[Dim, ...]:
        return self.types[name].shape

    def rebuild(self, nodes: Iterable[Node], constants: Mapping[str, Array] | None = None,
                types: Mapping[str, TensorType] | None = None) -> Graph:
        """Return this graph with other nodes, without unused nodes, constants and types.

        Parameters
        ----------
        nodes : iterable of Node
            New nodes in topological order.
        constants, types : mapping, optional
            Additional or replaced constants and types.
        """
        table = {**self.constants, **(constants or {})}
        every = {**self.types, **{n: type_of(c) for n, c in (constants or {}).items()}, **(types or {})}
        kept: list[Node] = []
        needed = set(self.outputs)
        for node in reversed(tuple(nodes)):
            if needed.intersection(node.outputs):
                kept.append(node)
                needed.update(node.inputs)
        inner = {o for node in kept for part in (node, *node.body) for o in part.outputs}
        alive = needed | inner | set(self.inputs)
        return replace(self, nodes=tuple(reversed(kept)),
                       constants={n: c for n, c in table.items() if n in needed},
                       types={n: t for n, t in every.items() if n in alive})

    def __str__(self) -> str:
        def typed(name: str) -> str:
            return f"{name}: {self.types[name]}" if name in self.types else name

        head = f"graph {self.name}({', '.join(map(typed, self.inputs))}) -> {', '.join(map(typed, self.outputs))}"
        lines = [f"  {line}" for node in self.nodes for line in
                 f"{node}  : {', '.join(str(self.types.get(o, '?')) for o in node.outputs)}".split("\n")]
        return "\n".join([head, *lines])


def verify(graph: Graph) -> Graph:
    """Check a graph's invariants and return it. Every pass is followed by this check.

    Raises
    ------
    GraphError
        A tensor is read before it is produced, produced twice or never, or has no type; or the body of a Fused node
        reads or produces other tensors than the node.
    """
    known = {*graph.inputs, *graph.constants, ""}
    for node in graph.nodes:
        for name in node.inputs:
            if name not in known:
                raise GraphError(f"{graph.name}: node '{node}' reads '{name}', which no node before it produces")
        for name in node.outputs:
            if name in known:
                raise GraphError(f"{graph.name}: '{name}' is produced twice; the second time by '{node}'")
            if graph.types and name not in graph.types:
                raise GraphError(f"{graph.name}: '{name}', produced by '{node}', has no type")
        _verify_body(graph, node)
        known.update(node.outputs)
    for name in graph.outputs:
        if name not in known:
            raise GraphError(f"{graph.name}: graph output '{name}' is never produced")
    return graph


def _verify_body(graph: Graph, node: Node) -> None:
    if not node.body:
        return
    inside = {*node.inputs, ""}
    for part in node.body:
        if missing := set(part.inputs) - inside:
            raise GraphError(f"{graph.name}: in the body of '{node.name}', '{part}' reads {sorted(missing)}, "
                             "which is neither an input of the fused node nor produced before")
        inside.update(part.outputs)
    if missing := set(node.outputs) - inside:
        raise GraphError(f"{graph.name}: the body of '{node.name}' never produces {sorted(missing)}")
