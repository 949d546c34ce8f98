"""Find out if the items of a batch are independent: only then may a batch be sliced, and requests be merged.

Items are independent if item i of each output depends on item i of the inputs alone. The analysis follows the axis of
the items from node to node (Op.item_axes). If a node may mix items, three items are run as one batch and one by one
on the reference: they depend on each other if a row differs or a single item cannot be run.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from infer_server.engines.errors import EngineError
from infer_server.engines.ir.graph import BATCH, Array, Graph, Node, TensorType
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops import describe, op_of
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.rewriting.notes import Note

ITEMS = 3
SEEDS, SEEDS_OF_INTEGERS = 2, 4     # trials: small integers and booleans are equal by chance more often than floats
TOLERANCE = 1e-4        # relative to the largest element of an output: a larger batch may sum in another order


def with_dependence(graph: Graph, log: list[Note] | None = None, known: str | None = None) -> Graph:
    """Return the graph with its `dependence` set: why its items must stay together, or "" if they are independent.

    Parameters
    ----------
    graph : Graph
        A graph of ONNX nodes, before fusion.
    log : list of Note, optional
        Receives a note if the graph had to be run on trial items.
    known : str, optional
        The dependence of the same model at other shapes, which replaces the trial.
    """
    try:
        _follow(graph)
    except Mixed as reason:
        if known is not None:
            return replace(graph, dependence=known)
        differing = _run_trial(graph)
        if log is not None:
            found = differing or f"{ITEMS} items gave the same one by one, so they are taken to be independent"
            log.append(Note(graph.name, "dependence", f"{reason}; {found}"))
        return replace(graph, dependence=f"{reason}; {differing}" if differing else "")
    return replace(graph, dependence="")


# ---- by analysis
def _follow(graph: Graph) -> None:
    """Raise Mixed, with the node's name, unless each item of every output depends on one item of the inputs."""
    axes: dict[str, int | None] = dict.fromkeys(graph.constants)
    axes |= {name: _axis_of(graph.types[name]) for name in graph.inputs}
    for node in graph.nodes:
        try:
            made = _through(graph, node, [axes[name] if name else None for name in node.inputs])
        except Mixed as reason:
            raise Mixed(f"{describe(node)}: {reason}") from None
        axes.update(zip(node.outputs, made, strict=False))


def _axis_of(kind: TensorType) -> int | None:
    return kind.shape.index(BATCH) if BATCH in kind.shape else None


def _through(graph: Graph, node: Node, axes: ItemAxes) -> ItemAxes:
    """Return the axis of the items of each output of a node. Raise Mixed if the node may mix items."""
    outputs = tuple(graph.types[name] for name in node.outputs)
    counted = [[extent for extent in kind.shape if isinstance(extent, str)] for kind in outputs]
    if all(axis is None for axis in axes) and not any(counted) and not op_of(node.op).random(node):
        return (None,) * len(outputs)
    inputs = [graph.types[name] if name else None for name in node.inputs]
    made = op_of(node.op).item_axes(node, inputs, outputs, axes)
    for axis, kind, symbols in zip(made, outputs, counted, strict=False):
        if symbols != ([] if axis is None else [BATCH]) or axis is not None and kind.shape[axis] != BATCH:
            raise Mixed("its result has no axis that counts the items alone")
    return made


# ---- by trying
def _run_trial(graph: Graph) -> str:
    """Run items as one batch and one by one; return a description of the first difference, or "" if there is none."""
    if one := next((name for name in graph.outputs if name in _read_from_items(graph)
                    and _axis_of(graph.types[name]) is None), ""):
        return f"'{one}' is one for all items"
    floats = any(graph.types[name].dtype.kind == "f" for name in graph.inputs)
    for seed in range(SEEDS if floats else SEEDS_OF_INTEGERS):
        feeds = _feeds(graph, np.random.default_rng(seed))
        try:
            together = run(graph, feeds)
            alone = [run(graph, {name: array[i:i + 1] if _axis_of(graph.types[name]) == 0 else array
                                 for name, array in feeds.items()}) for i in range(ITEMS)]
        except EngineError as error:
            return f"items cannot be run apart ({error})"
        for name in graph.outputs:
            if not _same(graph.types[name], together[name], [made[name] for made in alone]):
                return f"'{name}' differs when its items are run one by one"
    return ""


def _read_from_items(graph: Graph) -> set[str]:
    """Return the tensors that depend on inputs with a batch axis."""
    found = {name for name in graph.inputs if _axis_of(graph.types[name]) is not None}
    for node in graph.nodes:
        if found.intersection(node.inputs):
            found.update(node.outputs)
    return found


def _feeds(graph: Graph, random: np.random.Generator) -> dict[str, Array]:
    """Return random inputs of ITEMS items: normal floats, and integers 0 to 2, which most tables have as indices."""
    def values(kind: TensorType) -> Array:
        shape = [ITEMS if extent == BATCH else as_int(extent) for extent in kind.shape]
        if kind.dtype.kind in "iub":
            return np.asarray(random.integers(0, 3, shape), kind.dtype)
        return np.asarray(random.standard_normal(shape), kind.dtype)

    return {name: values(graph.types[name]) for name in graph.inputs}


def _same(kind: TensorType, together: Array, alone: list[Array]) -> bool:
    """Return True if a batch's tensor holds the items' results, or equals each of them if it has no batch axis."""
    axis = _axis_of(kind)
    if axis is None:
        return all(_close(together, one) for one in alone)
    return together.shape[axis] == ITEMS and _close(together, np.concatenate(alone, axis))


def _close(a: Array, b: Array) -> bool:
    if a.shape != b.shape or a.dtype.kind in "iub":
        return np.array_equal(a, b)
    wide = a.astype(np.float64), b.astype(np.float64)
    largest = np.abs(wide[0], where=np.isfinite(wide[0]), out=np.zeros(a.shape)).max(initial=0.0)
    return np.allclose(*wide, rtol=0, atol=TOLERANCE * largest, equal_nan=True)


