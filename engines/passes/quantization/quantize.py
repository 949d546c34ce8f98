"""Choose the stored type of every edge and the arithmetic of every node from calibrated ranges.

    activations   u8 = saturate(round(x / scale) + zero_point)      scale = (high - low) / 255, one per tensor
    weights       s8 = round(w / scale[o])                          scale[o] = max |w[o]| / 127, one per output channel

The range always includes 0, which is represented exactly, so that padding with the zero point is padding with zero. A
tensor without negative values has zero point 0 and uses all of 0..255. Contractions by constant weights compute in
int8, and so do products of tensors that are all stored in 8 bits; their bias, the nodes after them in a body, and all
other nodes compute in float between a dequantisation and a quantisation.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import replace

import numpy as np

from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.dtypes import FLOAT, dtype_named, is_float
from infer_server.engines.ir.graph import Array, Graph, Node, QParams, TensorType
from infer_server.engines.ir.recipe import unpacked_steps
from infer_server.engines.ir.rounding import STEPS, UNSIGNED_STEPS
from infer_server.engines.passes.quantization.bias_correction import corrected_bias, is_correctable
from infer_server.engines.passes.quantization.floats import closed, float_tensors, kept_tensors
from infer_server.engines.passes.quantization.joins import with_conversions_at_joins, with_parts_apart, without_idle
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.storage import classes, computes_by, is_image, with_conversions
from infer_server.engines.passes.quantization.weights import with_int8_weights, with_weights_as_bytes
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import ATTENTION, is_product, is_weighted, output_axis
from infer_server.engines.passes.rewriting.notes import Note, note
from infer_server.engines.passes.rules.pad import never_negative

Ranges = Mapping[str, tuple[float, float]]
SUMS = 1 << 31              # exclusive bound of the sums of an int8 contraction
RANGES_OF_SCALED_ROWS = {STEPS: (-128.0, 127.0), UNSIGNED_STEPS: (0.0, 255.0)}      # one step is 1
FLOAT_PRECISIONS = ("fp32", "fp16", "bf16")


def edges_to_calibrate(graph: Graph) -> tuple[str, ...]:
    """Return the float tensors of an optimised graph whose ranges an int8 build needs."""
    inputs = [node.anchor.inputs[0] for node in contractions(graph, ())]
    read = set(inputs)
    names = [name for group in classes(graph, closed(graph, float_tensors(graph)))
             if _is_worth_it(graph, group, read) for name in group]
    return tuple(dict.fromkeys((*names, *inputs)))


def quantize(graph: Graph, ranges: Ranges, keep_float: Collection[str] = (), log: list[Note] | None = None) -> Graph:
    """Return an optimised graph with edges stored as uint8 and contractions in int8, as far as ranges are known.

    Parameters
    ----------
    graph : Graph
        An optimised float graph.
    ranges : mapping of str to (float, float)
        The (low, high) of the real values of tensors, from calibration.
    keep_float : collection of str
        Names of ONNX nodes that stay float, or patterns of them (kept.py); entries that match no node are ignored.
    log : list of Note, optional
        Receives the contractions that stay float, and why.
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
    """Set the arithmetic of a graph whose stored types are decided.

    Parameters
    ----------
    graph : Graph
        A graph with the stored type of every edge.
    inputs : mapping of int to TensorType
        The type in which an int8 contraction reads its input, by id of the node.
    weights : mapping of tuple of str to QParams
        The quantisation of the weights of the int8 contractions, by the outputs of the node.
    keep_float : collection of str
        Names of the ONNX nodes that compute in float.
    recurrences : bool
        Let Recurrence nodes compute in int8.

    Returns
    -------
    Graph
        The graph with int8 weights and conversions; all other contractions compute in float.
    """
    wanted = {id(node): as_float(graph, node) for node in graph.nodes
              if is_weighted(node) and not is_product(graph, node)} | dict(inputs)
    graph = with_int8_weights(with_conversions(graph, wanted), weights, "int8")
    chosen = [(recurrences and node.op == "Recurrence" or node.precision == "int8" or _is_exact(graph, node))
              and not set(node.origin) & set(keep_float) for node in graph.nodes]
    return graph.rebuild(replace(node, precision="int8" if whole else "fp32")
                         for node, whole in zip(graph.nodes, chosen, strict=True))


def set_float_precision(graph: Graph, precision: str, packed: bool = False, keep_fp32: Collection[str] = ()) -> Graph:
    """Return the graph with edges stored, and contractions computed, in a float precision.

    fp16 edges have dtype float16, bf16 edges ml_dtypes.bfloat16. Graph inputs and outputs, and tensors of nodes without
    kernels on stored types, stay float32.

    Parameters
    ----------
    graph : Graph
        An optimised graph.
    precision : str
        One of FLOAT_PRECISIONS.
    packed : bool
        Keep weights on a grid packed in every precision, by products that compute in float32. Otherwise only fp32
        does, and they become 16-bit floats.
    keep_fp32 : collection of str
        Names of ONNX nodes that compute in float32 in every precision, or patterns of them (kept.py).

    Raises
    ------
    ConfigError
        If `precision` is none of FLOAT_PRECISIONS.
    """
    if precision not in FLOAT_PRECISIONS:
        raise ConfigError(f"unknown float precision '{precision}'; choose one of {', '.join(FLOAT_PRECISIONS)}")
    if packed or precision == "fp32":
        graph = with_weights_as_bytes(graph)
    if precision == "fp32":
        return graph
    dtype = dtype_named("float16" if precision == "fp16" else "bfloat16")
    kept = kept_nodes(graph, keep_fp32)
    floats = closed(graph, kept_tensors(graph, kept)) if kept else frozenset()
    types = {name: replace(graph.types[name], dtype=dtype) for group in classes(graph, floats) for name in group
             if graph.types[name].quant is None}
    graph = graph.rebuild(graph.nodes, types=types)
    anchors = [node for node in contractions(graph, ()) if node.precision != "int8" and not _has_bytes(graph, node)]
    wanted = {id(node): replace(graph.types[node.anchor.inputs[0]],
                                dtype=dtype if kept.isdisjoint(node.origin) else FLOAT) for node in anchors}
    wanted |= {id(node): replace(graph.types[node.anchor.inputs[0]], dtype=FLOAT) for node in graph.nodes
               if packed and (node.anchor.op == "MatMulBlocks" or is_weighted(node) and _has_bytes(graph, node))}
    others = [node for node in graph.nodes
              if node.precision != "int8" and (node.op == "Recurrence" or is_product(graph, node))]
    names = {node.outputs for node in (*anchors, *others) if kept.isdisjoint(node.origin)}
    graph = with_conversions(graph, wanted)
    return graph.rebuild(replace(node, precision=precision) if node.outputs in names else node for node in graph.nodes)


def _has_bytes(graph: Graph, node: Node) -> bool:
    """Return True if the weights of a float contraction are stored in bytes."""
    weight = node.anchor.inputs[1]
    return graph.is_constant(weight) and graph.types[weight].quant is not None


# ---- edges
def contractions(graph: Graph, keep_float: Collection[str]) -> list[Node]:
    """Return the contractions by constant weights, except those to keep in float, that can compute in int8."""
    return [node for node in graph.nodes if computes_by(graph, node) and not set(node.origin) & set(keep_float)
            and is_float(graph.types[node.anchor.inputs[0]]) and not graph.is_constant(node.anchor.inputs[0])]


def _is_worth_it(graph: Graph, group: Collection[str], read: Set[str]) -> bool:
    """Return True if a class holds an image or an input of a contraction; other tensors, such as gates, stay float."""
    return any(name in read or is_image(graph, name) for name in group)


def parted(graph: Graph, ranges: Ranges, kept: Collection[str]) -> Graph:
    """Split the wide layers of an optimised graph whose parts have unlike ranges into one layer per part."""
    return with_parts_apart(graph, _spans(graph, ranges), float_tensors(graph) | kept_tensors(graph, kept))


def _spans(graph: Graph, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the ranges of the graph's tensors, without negative values where the graph rules them out."""
    known = {name: _bounded(graph, name, span) for name, span in ranges.items() if name in graph.types}
    return known | {node.outputs[0]: RANGES_OF_SCALED_ROWS[node.attrs.get("steps", STEPS)]
                    for node in graph.nodes if node.op == "ScaledRows"}


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
    """Clip a range to [0, inf) if the tensor cannot be negative: a histogram's bins may reach below 0."""
    node = graph.producer.get(name)
    last = node.body[-1] if node is not None and node.body else node
    never = last is not None and (last.op == "Relu" or never_negative(graph, name) and not (node and node.body))
    return (max(span[0], 0.0), max(span[1], 0.0)) if never else span


def activation_params(low: float, high: float) -> QParams:
    """Return the uint8 parameters of a range, widened to include 0, which is represented exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / 255)) or 1.0 / 255
    return QParams((scale,), (int(np.clip(round(-low / scale), 0, 255)),), "uint8")


def _input_type(graph: Graph, node: Node, ranges: Ranges) -> TensorType | None:
    """Return the type in which an int8 contraction reads its input, stored or converted; None without a range."""
    name = node.anchor.inputs[0]
    kind = graph.types[name]
    if kind.quant is not None:
        return kind
    return replace(kind, quant=activation_params(*ranges[name])) if name in ranges else None


def _why_float(graph: Graph, node: Node, ranges: Ranges) -> str:
    """Return why a contraction does not compute in int8; "" if it does."""
    name, weight = node.anchor.inputs[:2]
    if _input_type(graph, node, ranges) is None:
        return f"no range is known for its input '{name}'"
    if not sums_fit(graph.constants[weight], output_axis(node)):
        return f"so many products with '{weight}' may add up to more than an int32 holds"
    return ""


def sums_fit(weight: Array, axis: int) -> bool:
    """Return True if a sum of any bytes times the int8 weights fits int32, in any order of summation."""
    depth = weight.size // weight.shape[axis]
    if 255 * 127 * depth < SUMS:
        return True
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    largest = np.maximum(np.abs(rows).max(axis=1), np.finfo(np.float32).tiny)
    one_sided = (np.maximum(sign * rows, 0).sum(axis=1, dtype=np.float64) / largest for sign in (1, -1))
    return bool(255 * (127 * np.maximum(*one_sided).max() + depth / 2) < SUMS)      # depth / 2: error of rounding


def as_float(graph: Graph, node: Node) -> TensorType:
    """Return the type in which a float contraction reads its input."""
    return replace(graph.types[node.anchor.inputs[0]], quant=None)


def _is_exact(graph: Graph, node: Node) -> bool:
    """Return True for a product of run-time tensors that are all stored in 8 bits, which is exact in int8."""
    factors = node.anchor.inputs[:3 if node.anchor.op == ATTENTION else 2]
    return is_product(graph, node) and all(graph.types[name].quant for name in factors)


# ---- weights
def weight_params(weight: Array, axis: int) -> QParams:
    """Return symmetric int8 parameters with one scale per index of `axis`; a channel of zeros has scale 1."""
    largest = np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis))
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return QParams(tuple(map(float, scales)), (0,) * len(scales), "int8", axis)


def nearest_steps(weight: Array, quant: QParams) -> Array:
    """Return the weights in units of their scales, rounded to the nearest integers, float32."""
    assert quant.axis is not None
    along = [-1 if axis == quant.axis else 1 for axis in range(weight.ndim)]
    return np.clip(np.rint(weight / np.array(quant.scale, np.float32).reshape(along)), -127, 127)


def with_rounding(graph: Graph, rounding: Mapping[str, str], means: Mapping[str, Array],
                  keep_float: Collection[str] = ()) -> Graph:
    """Return the graph with weights on the grid of int8, as a recipe rounds them, for the contractions it names.

    Quantising them again gives the same integers, because the largest weight of a channel stays. The bias of a node
    whose input has a mean takes back the mean error of the rounding.
    """
    editor = GraphEditor(graph)
    wanted = {node.outputs for node in contractions(graph, kept_nodes(graph, keep_float))
              if node.outputs[0] in rounding and len(graph.consumers[node.anchor.inputs[1]]) == 1}
    for node in graph.nodes:
        if node.outputs in wanted:
            anchor, (x, source) = node.anchor, node.anchor.inputs[:2]
            weight = graph.constants[source]
            if (steps := unpacked_steps(rounding[node.outputs[0]], weight.shape)) is not None:
                quant = weight_params(weight, output_axis(node))
                along = [-1 if axis == quant.axis else 1 for axis in range(weight.ndim)]
                rounded = (nearest_steps(weight, quant) + steps) * np.array(quant.scale, np.float32).reshape(along)
                inputs = [x, editor.add_constant(f"{source}.rounded", rounded), *anchor.inputs[2:]]
                if x in means and is_correctable(graph, anchor):
                    inputs[2:] = [editor.add_constant(f"{anchor.outputs[0]}.rounded_bias",
                                                      corrected_bias(graph, anchor, rounded, means[x]))]
                node = node.with_body((replace(anchor, inputs=tuple(inputs)), *node.body[1:]))
        editor.nodes.append(node)
    return editor.finish()
