"""The stored type of every edge, and the arithmetic of every node.

    activations   u8 = saturate(round(x / scale) + zero_point)      scale = (high - low) / 255, one per tensor
    weights       s8 = round(w / scale[o])                          scale[o] = max |w[o]| / 127, one per output channel

The range always holds 0, which is exact: padding with the zero point is padding with zero. A tensor that is never
negative has zero point 0 and all of 0..255. Contractions by constant weights compute in int8, and products of tensors
that are all stored so; their bias, what follows them in a body, and all other nodes compute in float between a
dequantisation and a quantisation.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import replace

import numpy as np

from engines.errors import ConfigError
from engines.ir.dtypes import dtype_named, is_float
from engines.ir.graph import Array, Graph, Node, QParams, TensorType
from engines.passes.quantization.floats import closed, float_tensors, kept_tensors
from engines.passes.quantization.joins import with_conversions_at_joins, with_parts_apart, without_idle
from engines.passes.quantization.kept import kept_nodes
from engines.passes.quantization.storage import classes, computes_by, is_image, with_conversions
from engines.passes.quantization.weights import with_int8_weights, with_weights_as_bytes
from engines.passes.rewriting.facts import ATTENTION, is_product, is_weighted, output_axis
from engines.passes.rewriting.notes import Note, note
from engines.passes.rules.pad import never_negative

Ranges = Mapping[str, tuple[float, float]]
SUMS = 1 << 31              # of an int8 contraction stay below
FLOAT_PRECISIONS = ("fp32", "fp16", "bf16")


def edges_to_calibrate(graph: Graph) -> tuple[str, ...]:
    """The float tensors of an optimised graph that an int8 build may store in 8 bits."""
    inputs = [node.anchor.inputs[0] for node in contractions(graph, ())]
    read = set(inputs)
    names = [name for group in classes(graph, closed(graph, float_tensors(graph)))
             if _is_worth_it(graph, group, read) for name in group]
    return tuple(dict.fromkeys((*names, *inputs)))


def quantize(graph: Graph, ranges: Ranges, keep_float: Collection[str] = (), log: list[Note] | None = None) -> Graph:
    """An optimised graph with its edges stored as uint8 and its contractions in int8, as far as ranges are known.

    ranges: tensor -> (low, high) of its real values, from calibration. keep_float: names of ONNX nodes that stay float,
    or patterns of them (kept.py); an entry that fits no node is passed over.
    """
    keep_float = kept_nodes(graph, keep_float)
    graph = _with_stored_types(graph, ranges, keep_float)
    anchors = contractions(graph, keep_float)
    refused = {node.outputs: reason for node in anchors if (reason := _why_float(graph, node, ranges))}
    chosen = [node for node in anchors if node.outputs not in refused]
    for node in anchors:
        if node.outputs in refused:
            note(log, node, "quantize", f"stays float: {refused[node.outputs]}")
    wanted = {id(node): _input_type(graph, node, ranges) or as_float(graph, node) for node in chosen}
    weights = {node.outputs: weight_params(graph.constants[node.anchor.inputs[1]], output_axis(node))
               for node in chosen}
    return in_int8(graph, wanted, weights, keep_float, recurrences=True)


def in_int8(graph: Graph, inputs: Mapping[int, TensorType], weights: Mapping[tuple[str, ...], QParams],
            keep_float: Collection[str], recurrences: bool = False) -> Graph:
    """A graph with stored types whose contractions compute as told: those that make the outputs in `weights` in int8,
    by weights quantised so and inputs of these types, by id of the node; all others in float."""
    wanted = {id(node): as_float(graph, node) for node in graph.nodes
              if is_weighted(node) and not is_product(graph, node)} | dict(inputs)
    graph = with_int8_weights(with_conversions(graph, wanted), weights, "int8")
    chosen = [(recurrences and node.op == "Recurrence" or node.precision == "int8" or _is_exact(graph, node))
              and not set(node.origin) & set(keep_float) for node in graph.nodes]
    return graph.rebuild(replace(node, precision="int8" if whole else "fp32")
                         for node, whole in zip(graph.nodes, chosen, strict=True))


def set_float_precision(graph: Graph, precision: str) -> Graph:
    """The graph with every edge that allows it stored in a float precision, and its contractions computed in it.

    fp16 edges have dtype float16; bf16 ones ml_dtypes.bfloat16, NumPy's dtype of that name. Inputs, outputs and what
    kernels do not run on stored types stay float32.
    """
    if precision not in FLOAT_PRECISIONS:
        raise ConfigError(f"'{precision}' is no float precision; those are {', '.join(FLOAT_PRECISIONS)}")
    if precision == "fp32":
        return with_weights_as_bytes(graph)
    dtype = dtype_named("float16" if precision == "fp16" else "bfloat16")
    types = {name: replace(graph.types[name], dtype=dtype) for group in classes(graph) for name in group
             if graph.types[name].quant is None}
    graph = graph.rebuild(graph.nodes, types=types)
    anchors = [node for node in contractions(graph, ()) if node.precision != "int8"]
    wanted = {id(node): replace(graph.types[node.anchor.inputs[0]], dtype=dtype) for node in anchors}
    others = [node for node in graph.nodes
              if node.precision != "int8" and (node.op == "Recurrence" or is_product(graph, node))]
    names = {node.outputs for node in (*anchors, *others)}
    graph = with_conversions(graph, wanted)
    return graph.rebuild(replace(node, precision=precision) if node.outputs in names else node for node in graph.nodes)


# ---- what is quantised
def contractions(graph: Graph, keep_float: Collection[str]) -> list[Node]:
    """The nodes that kernels run in int8, if their inputs and weights are quantised."""
    return [node for node in graph.nodes if computes_by(graph, node) and not set(node.origin) & set(keep_float)
            and is_float(graph.types[node.anchor.inputs[0]]) and not graph.is_constant(node.anchor.inputs[0])]


def _is_worth_it(graph: Graph, group: Collection[str], read: Set[str]) -> bool:
    """Return True for images, whose bytes matter, and for vectors that contractions read; a gate of one pixel stays
    exact."""
    return any(name in read or is_image(graph, name) for name in group)


def parted(graph: Graph, ranges: Ranges, kept: Collection[str]) -> Graph:
    """Return the graph with a layer for each part of a wide one that is split into parts of unlike ranges."""
    return with_parts_apart(graph, _spans(graph, ranges), float_tensors(graph) | kept_tensors(graph, kept))


def _spans(graph: Graph, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the ranges of the graph's tensors, of which some are known never to be negative."""
    return {name: _bounded(graph, name, span) for name, span in ranges.items() if name in graph.types}


def _with_stored_types(graph: Graph, ranges: Ranges, kept: Collection[str]) -> Graph:
    """Return the graph with the stored type of every edge, and conversions between edges of unlike ranges."""
    graph = parted(graph, ranges, kept)
    spans = _spans(graph, ranges)
    joined = with_conversions_at_joins(graph, spans, float_tensors(graph) | kept_tensors(graph, kept))
    graph = joined.graph
    read = {node.anchor.inputs[0] for node in contractions(graph, kept)}
    types: dict[str, TensorType] = {}
    for group in classes(graph, joined.floats):
        known = [spans[name] for name in group if name in spans]
        if known and _is_worth_it(graph, group, read):
            quant = activation_params(min(low for low, _ in known), max(high for _, high in known))
            types |= {name: replace(graph.types[name], quant=quant) for name in group}
    return without_idle(graph.rebuild(graph.nodes, types=types), joined.conversions)


def _bounded(graph: Graph, name: str, span: tuple[float, float]) -> tuple[float, float]:
    """A range without the negative values that a histogram's bins may add to a tensor that has none."""
    node = graph.producer.get(name)
    last = node.body[-1] if node is not None and node.body else node
    never = last is not None and (last.op == "Relu" or never_negative(graph, name) and not (node and node.body))
    return (max(span[0], 0.0), max(span[1], 0.0)) if never else span


def activation_params(low: float, high: float) -> QParams:
    """uint8 over [low, high], widened to hold 0; 0 is exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / 255)) or 1.0 / 255
    return QParams((scale,), (int(np.clip(round(-low / scale), 0, 255)),), "uint8")


def _input_type(graph: Graph, node: Node, ranges: Ranges) -> TensorType | None:
    """How an int8 contraction reads its input: as it is stored, or converted from float. None: no range is known."""
    name = node.anchor.inputs[0]
    kind = graph.types[name]
    if kind.quant is not None:
        return kind
    return replace(kind, quant=activation_params(*ranges[name])) if name in ranges else None


def _why_float(graph: Graph, node: Node, ranges: Ranges) -> str:
    """Why a contraction does not compute in int8; "" if it does."""
    name, weight = node.anchor.inputs[:2]
    if _input_type(graph, node, ranges) is None:
        return f"no range is known for its input '{name}'"
    if not sums_fit(graph.constants[weight], output_axis(node)):
        return f"so many products with '{weight}' may add up to more than an int32 holds"
    return ""


def sums_fit(weight: Array, axis: int) -> bool:
    """Whether no sum of bytes times these weights, as int8, leaves int32, whatever the bytes and in whatever order."""
    depth = weight.size // weight.shape[axis]
    if 255 * 127 * depth < SUMS:
        return True
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    largest = np.maximum(np.abs(rows).max(axis=1), np.finfo(np.float32).tiny)
    one_sided = (np.maximum(sign * rows, 0).sum(axis=1, dtype=np.float64) / largest for sign in (1, -1))
    return bool(255 * (127 * np.maximum(*one_sided).max() + depth / 2) < SUMS)      # depth / 2: of rounding


def as_float(graph: Graph, node: Node) -> TensorType:
    """How a contraction reads its input that does not compute in int8."""
    return replace(graph.types[node.anchor.inputs[0]], quant=None)


def _is_exact(graph: Graph, node: Node) -> bool:
    """Whether a node without constant weights computes in int8: a product does if its factors are stored in 8 bits, as
    they are, so nothing more is lost."""
    factors = node.anchor.inputs[:3 if node.anchor.op == ATTENTION else 2]
    return is_product(graph, node) and all(graph.types[name].quant for name in factors)


# ---- weights
def weight_params(weight: Array, axis: int) -> QParams:
    """int8, symmetric, one scale for each index of `axis`; a channel of zeros has scale 1."""
    largest = np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis))
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return QParams(tuple(map(float, scales)), (0,) * len(scales), "int8", axis)
