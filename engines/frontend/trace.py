"""Following nodes in order: what is known already is computed, everything gets a type."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engines.errors import GraphError
from engines.ir import Array, Node, TensorType, type_of
from engines.ops import op_of
from engines.ops.fallback import Fallback

SMALL = 4096        # elements: computed at once, a shape may depend on it; more is left to passes.fold_constants


@dataclass
class Trace:
    """Grows node by node. `values` holds constants, and object arrays of ints and Extents (see engines.shapes)."""
    types: dict[str, TensorType] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def constant(self, name: str, array: Array) -> None:
        self.values[name], self.types[name] = array, type_of(array)

    def inputs(self, node: Node) -> list[TensorType | None]:
        """The types of a node's inputs. Raises GraphError if one does not exist."""
        if missing := [name for name in node.inputs if name and name not in self.types]:
            raise GraphError(f"it reads '{missing[0]}', which nothing before it produces")
        return [self.types[name] if name else None for name in node.inputs]

    def sources(self, names: Iterable[str]) -> list[str]:
        """The inputs of the graph that decide about the values of these tensors, as far as those are not known."""
        makers = {output: node for node in self.nodes for output in node.outputs}
        found, waiting, seen = [], list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if not name or name in seen or name in self.values:
                continue
            seen.add(name)
            if name in makers:
                waiting += makers[name].inputs
            else:
                found.append(name)
        return sorted(found)

    def known(self, node: Node) -> list[Array | None]:
        return [self.values.get(name) for name in node.inputs]

    def add(self, node: Node) -> None:
        """Append a canonical node, or, if it is small and all its inputs are constant, its value."""
        if node.op == "Constant":
            self.constant(node.outputs[0], node.attrs["value"])
            return
        op, inputs, values = op_of(node.op), self.inputs(node), self.known(node)
        if op is Fallback and (results := op.known(node, inputs, values)) is not None:
            self._settle(node, results)     # first: its shape may be one that depends on data
            return
        types = op.infer(node, inputs, values)[:len(node.outputs)]
        self.types.update(zip(node.outputs, types, strict=True))
        small = all(math.prod(d if isinstance(d, int) else SMALL + 1 for d in t.shape) <= SMALL for t in types)
        if small and (results := op.known(node, inputs, values)) is not None:
            self._settle(node, results)
        else:
            self.nodes.append(node)

    def _settle(self, node: Node, results: tuple[Array, ...]) -> None:
        results = results[:len(node.outputs)]
        self.values.update(zip(node.outputs, results, strict=True))
        if any(result.dtype == object for result in results):       # still computed at run time, if anybody asks
            self.nodes.append(node)
        else:
            self.types.update(zip(node.outputs, map(type_of, results), strict=True))

    @property
    def constants(self) -> Mapping[str, Array]:
        made = {name for node in self.nodes for name in node.outputs}
        return {name: array for name, array in self.values.items() if name not in made}
