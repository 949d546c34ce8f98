"""Small graphs for the tests of passes, a line a node, with types inferred and constants drawn from a seed.

    net = Build()
    x = net.input("x", 3, 8, 8)
    y = net("Relu", net.conv(x, 16, 3))
    graph = net.graph(y)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import BATCH, Array, Graph, Node, TensorType, type_of, verify
from infer_server.engines.ops import op_of, reference

FLOAT = np.dtype(np.float32)
SAME = {"rtol": 2e-5, "atol": 2e-5}         # float32, sums in another order


class Build:
    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.inputs: list[str] = []
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.types: dict[str, TensorType] = {}

    def input(self, name: str, *shape: int) -> str:
        self.inputs.append(name)
        self.types[name] = TensorType(FLOAT, (BATCH, *shape))
        return name

    def constant(self, array: Any) -> str:
        array = np.asarray(array)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        name = f"c{len(self.constants)}"
        self.constants[name], self.types[name] = array, type_of(array)
        return name

    def draw(self, *shape: int) -> str:
        return self.constant(self.random.standard_normal(shape))

    def __call__(self, op: str, *inputs: str, name: str = "", count: int = 1, **attrs: Any) -> Any:
        """Add a node; return its output, or its `count` outputs, named after the operator and the node's index."""
        label = name or f"{op.lower()}{len(self.nodes)}"
        outputs = (label,) if count == 1 else tuple(f"{label}_{i}" for i in range(count))
        node = Node(op, inputs, outputs, attrs, label, (label,))
        made = op_of(op).infer(node, [self.types[i] if i else None for i in inputs],
                               [self.constants.get(i) for i in inputs])
        self.types.update(zip(outputs, made, strict=False))
        self.nodes.append(node)
        return outputs[0] if count == 1 else outputs

    def channels(self, x: str) -> int:
        return int(self.types[x].shape[1])

    def conv(self, x: str, out: int, kernel: int = 1, *, group: int = 1, bias: bool = True, name: str = "",
             stride: int = 1, pads: int | None = None, dilation: int = 1) -> str:
        cin = self.channels(x) // group
        weight = self.constant(self.random.standard_normal((out, cin, kernel, kernel)) / np.sqrt(cin * kernel * kernel))
        pad = kernel // 2 if pads is None else pads
        result: str = self("Conv", x, weight, *([self.draw(out)] if bias else []), name=name,
                           kernel_shape=(kernel, kernel), strides=(stride, stride),
                           pads=(pad,) * 4, dilations=(dilation,) * 2, group=group)
        return result

    def batch_norm(self, x: str, name: str = "") -> str:
        c = self.channels(x)
        var = self.constant(self.random.uniform(0.5, 2, c))
        result: str = self("BatchNormalization", x, *(self.draw(c) for _ in range(3)), var, name=name, epsilon=1e-5)
        return result

    def linear(self, x: str, out: int, name: str = "") -> str:
        result: str = self("Gemm", x, self.draw(out, self.channels(x)), self.draw(out), name=name, transB=1)
        return result

    def graph(self, *outputs: str) -> Graph:
        return verify(Graph("test", tuple(self.inputs), outputs, tuple(self.nodes), self.constants, self.types))


def feeds(graph: Graph, batch: int = 2, seed: int = 1) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shapes = {name: [batch if d == BATCH else int(d) for d in graph.shape(name)] for name in graph.inputs}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def ops(graph: Graph) -> list[str]:
    """Return the operators in order; a Fused node as its body, joined by +."""
    return ["+".join(part.op for part in node.body) if node.body else node.op for node in graph.nodes]


def same(before: Graph, after: Graph, **tolerance: float) -> Graph:
    """Assert that `after` computes what `before` does with correct types, and return it."""
    verify(after)
    fed = feeds(before)
    wanted, got = reference.run(before, fed), reference.run(after, fed)
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, err_msg=name, **(tolerance or SAME))
    check_types(after)
    return after


def check_types(graph: Graph) -> None:
    """Assert that every node's outputs have the types that its operator infers."""
    for node in graph.nodes:
        for part in node.body or (node,):
            inputs = [graph.types[i] if i else None for i in part.inputs]
            made = op_of(part.op).infer(part, inputs, [graph.constants.get(i) for i in part.inputs])
            for name, kind in zip(part.outputs, made, strict=False):
                assert graph.types[name] == kind, f"{part}: {graph.types[name]} is not {kind}"


def keeps(run: Callable[[Graph], Graph], graph: Graph) -> Graph:
    """Return run(graph), after checks that it computes the same and leaves its argument unchanged."""
    before = str(graph)
    after = same(graph, run(graph))
    assert str(graph) == before
    return after
