"""Whether the items of a batch are independent: only then may a batch be cut into slices, and requests be merged.

Item i of an output must follow from item i of the inputs. That is followed from node to node (Op.item_axes). Where a
node is not known to keep items apart, three items are run at once and one by one: if a row differs, or cannot be
computed, they depend on each other.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from engines.errors import EngineError
from engines.ir.counted import as_int
from engines.ir.graph import BATCH, Array, Graph, Node, TensorType
from engines.ops import describe, op_of
from engines.ops.items import ItemAxes, Mixed
from engines.ops.reference import run
from engines.passes.rewriting.notes import Note

ITEMS = 3
SEEDS, SEEDS_OF_INTEGERS = 2, 4     # trials: integers of three values and truth are alike by chance more often
TOLERANCE = 1e-4        # of the largest number of an output: sums of more rows may be taken in another order


def with_dependence(graph: Graph, log: list[Note] | None = None, known: str | None = None) -> Graph:
    """The graph with `dependence` said: why its items must stay together, or "" if they need not.

    known: what was found for the same model at other shapes; nothing is tried a second time.
    """
    try:
        _follow(graph)
    except Mixed as reason:
        if known is not None:
            return replace(graph, dependence=known)
        differing = _tried(graph)
        if log is not None:
            found = differing or f"{ITEMS} items gave the same one by one, so they are taken to be independent"
            log.append(Note(graph.name, "dependence", f"{reason}; {found}"))
        return replace(graph, dependence=f"{reason}; {differing}" if differing else "")
    return replace(graph, dependence="")


# ---- by analysis
def _follow(graph: Graph) -> None:
    """Raises Mixed, naming the node, unless every output follows item by item."""
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
    """The axes of the items in what a node makes."""
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
def _tried(graph: Graph) -> str:
    """What differs between items run together and one by one; "" if nothing does."""
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
    """The tensors that follow from inputs with an axis of items."""
    found = {name for name in graph.inputs if _axis_of(graph.types[name]) is not None}
    for node in graph.nodes:
        if found.intersection(node.inputs):
            found.update(node.outputs)
    return found


def _feeds(graph: Graph, random: np.random.Generator) -> dict[str, Array]:
    """Three different items: numbers around 0, and integers that are 0, 1 or 2, which most tables have."""
    def values(kind: TensorType) -> Array:
        shape = [ITEMS if extent == BATCH else as_int(extent) for extent in kind.shape]
        if kind.dtype.kind in "iub":
            return np.asarray(random.integers(0, 3, shape), kind.dtype)
        return np.asarray(random.standard_normal(shape), kind.dtype)

    return {name: values(graph.types[name]) for name in graph.inputs}


def _same(kind: TensorType, together: Array, alone: list[Array]) -> bool:
    """Whether the rows of a tensor are those of its items; a tensor without items is the same for each of them."""
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


