"""Caches of decoders, in memory with room for more tokens: a step writes its tokens there, and copies nothing.

    past [N, heads, P, depth], new tokens -> present [N, heads, T, depth]       what the model computes
    past [N, heads, capacity, depth] -> present, its first T tokens             what the graph is made into

A model computes `present` by a Concat, by ONNX's Attention or by GroupQueryAttention. The latter takes a past with room
for more tokens, so that its input only gets another extent; other readers of the past keep its first P tokens.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from infer_server.engines.errors import CapacityError, GraphError
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.ir.graph import Graph, Node, TensorType

_OUTPUTS = (1, 2)                       # present keys and values
_PASTS = {("", "Attention"): (4, 5), ("com.microsoft", "GroupQueryAttention"): (3, 4)}


@dataclass(frozen=True)
class Cache:
    """Input and output of a model for tokens along an axis.

    takes_capacity: the model itself takes a past with room for more tokens.
    """
    past: str
    present: str
    axis: int
    takes_capacity: bool = False

    def document(self) -> dict[str, Any]:
        """Return the fields, for a plan's metadata."""
        return asdict(self)


def caches_of(model: OnnxModel) -> tuple[Cache, ...]:
    """Return the caches of a model."""
    inputs, outputs = {value.name for value in model.inputs}, {value.name for value in model.proto.graph.output}
    nodes = model.proto.graph.node
    found: list[Cache] = []
    for node in nodes:
        if node.op_type == "Concat" and not node.domain and len(node.input) == 2:
            axis = next(attribute.i for attribute in node.attribute if attribute.name == "axis")
            pairs = [(node.input[0], node.output[0], axis)]
        else:
            places = _PASTS.get((node.domain, node.op_type), ())
            pairs = [(node.input[place], node.output[output], 2)
                     for place, output in zip(places, _OUTPUTS, strict=False)
                     if place < len(node.input) and output < len(node.output)]
        for past, present, axis in pairs:
            takes_capacity = bool(node.domain)
            if past in inputs and present in outputs and axis > 0 and not (
                    takes_capacity and sum(past in other.input for other in nodes) > 1):
                found.append(Cache(past, present, axis, takes_capacity))
    return tuple(found)


def shapes_with_capacity(shapes: Mapping[str, Sequence[Any]], caches: Sequence[Cache],
                         capacity: int) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of a model's inputs; a past that may have room for more tokens gets the capacity."""
    found = {name: tuple(shape) for name, shape in shapes.items()}
    for cache in caches:
        if cache.takes_capacity:
            shape = found[cache.past]
            found[cache.past] = (*shape[:cache.axis], capacity, *shape[cache.axis + 1:])
    return found


def with_caches_in_place(graph: Graph, caches: Sequence[Cache], capacity: int) -> Graph:
    """Return the optimised graph with its caches in place.

    Parameters
    ----------
    graph : Graph
        Graph imported for `shapes_with_capacity`.
    caches : sequence of Cache
        The model's caches.
    capacity : int
        Tokens that each cache has room for.

    Raises
    ------
    CapacityError
        The tokens do not fit.
    GraphError
        The graph computes a cache in another way.
    """
    for cache in caches:
        if (tokens := graph.shape(cache.present)[cache.axis]) > capacity:       # type: ignore[operator]
            raise CapacityError(f"a cache of capacity {capacity} has no room for {tokens} tokens")
        graph = (_of_capacity if cache.takes_capacity else _of_tokens)(graph, cache, capacity)
    return graph


def _of_tokens(graph: Graph, cache: Cache, capacity: int) -> Graph:
    """Give the input the capacity: its readers get a Slice, and the Concat overwrites what is behind that."""
    axis, past, present = cache.axis, graph.types[cache.past], graph.types[cache.present]
    rows = f"{cache.past}.tokens"
    node = graph.producer[cache.present]
    nodes = [_reading(one, cache.past, rows) for one in graph.nodes]
    whole = TensorType(past.dtype, (*past.shape[:axis], capacity, *past.shape[axis + 1:]), past.quant)
    types = {cache.past: whole, rows: past}
    cut = Node("Slice", (cache.past,), (rows,), {"axes": (axis,), "starts": (0,), "ends": (past.shape[axis],),
                                                 "steps": (1,)}, f"tokens of {cache.past}")
    if node.op == "Concat" and node.inputs[0] == cache.past and node.attrs["axis"] % len(past.shape) == axis:
        nodes = [replace(one, attrs={**one.attrs, "axis": axis}) if cache.present in one.outputs else one
                 for one in nodes]
    elif isinstance(past.shape[axis], int) and not past.shape[axis]:    # without a past it is what is new
        nodes, types[f"{cache.present}.new"] = _stored(nodes, cache), present
    else:
        raise GraphError(f"'{cache.present}' is computed by {node.op}, so that '{cache.past}' cannot grow in place")
    return replace(graph.rebuild([cut, *nodes], types=types), in_place={**graph.in_place, cache.present: cache.past})


def _of_capacity(graph: Graph, cache: Cache, capacity: int) -> Graph:
    """Make the present overwrite the past; the output are its tokens, which the attention reads."""
    axis, whole = cache.axis, f"{cache.present}.whole"
    if graph.producer[cache.present].op not in ("Concat", "ScatterElements"):       # a prompt that fills the cache
        graph = graph.rebuild(_stored(graph.nodes, cache), types={f"{cache.present}.new": graph.types[cache.present]})
    node = graph.producer[cache.present]
    cuts = [one for one in graph.consumers[cache.present] if one.op == "Slice" and tuple(one.attrs["axes"]) == (axis,)]
    nodes = list(graph.nodes)
    types = {whole: graph.types[cache.present]}
    where = nodes.index(node)
    nodes[where] = replace(node, outputs=(whole,))
    if cuts:                                # the only Slice of it is that of its tokens
        rows = cuts[0].outputs[0]
        nodes = [_reading(one, cache.present, whole) for one in nodes]
        nodes = [replace(one, outputs=(cache.present,)) if one.outputs == (rows,) else
                 _reading(one, rows, cache.present) for one in nodes]
        types[cache.present] = graph.types[rows]
    else:
        nodes.insert(where + 1, Node("Slice", (whole,), (cache.present,), {
            "axes": (axis,), "starts": (0,), "ends": (capacity,), "steps": (1,)}, node.name, node.origin))
    return replace(graph.rebuild(nodes, types=types), in_place={**graph.in_place, whole: cache.past})


def _reading(node: Node, name: str, other: str) -> Node:
    """Return a node that reads another tensor."""
    if name not in node.inputs:
        return node
    inputs = tuple(other if one == name else one for one in node.inputs)
    body = tuple(_reading(part, name, other) for part in node.body)
    return replace(node, inputs=inputs, body=body)


def _stored(nodes: Sequence[Node], cache: Cache) -> list[Node]:
    """Return the nodes with a Concat of a present that consists of new tokens only."""
    made, found = f"{cache.present}.new", list[Node]()
    for node in nodes:
        if cache.present in node.outputs:
            outputs = tuple(made if name == cache.present else name for name in node.outputs)
            store = Node("Concat", (made,), (cache.present,), {"axis": cache.axis}, node.name, node.origin)
            found += [replace(node, outputs=outputs), store]
        else:
            found.append(node)
    return found
