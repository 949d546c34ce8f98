"""Weight-only quantisation of an ONNX model before it is imported.

    model, report = quantise_weights(source, WeightOnly("int4"))
"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.compiler.weight_only.scheme import WeightOnly
from infer_server.engines.errors import ConfigError
from infer_server.engines.frontend.names import nodes_in
from infer_server.engines.frontend.onnx_file import OnnxModel, read_by
from infer_server.engines.frontend.weight_only.groups import GroupedWeights, nearest
from infer_server.engines.frontend.weight_only.layers import (
    FLOATS,
    SMALLEST,
    Layer,
    Rounder,
    find_layers,
    name_of,
)
from infer_server.engines.frontend.weight_only.rewrite import with_weights
from infer_server.engines.ir.graph import Array
from infer_server.engines.passes.quantization.kept import BEHIND, check_names, fitting_names

NEAREST = "nearest"
RATIO_PARTS = 1 << 22       # weights whose errors are summed at once


def to_nearest(layer: Layer, rows: Array, bits: int, group: int) -> tuple[GroupedWeights, str, float | None]:
    """Round weights to the nearest integers: the Rounder without calibration data."""
    return nearest(rows, bits, group), NEAREST, None


def quantise_weights(source: OnnxModel, scheme: WeightOnly, keep_float: Collection[str] = (),
                     rounder: Callable[[tuple[Layer, ...]], Rounder] = lambda layers: to_nearest,
                     progress: Callable[[int, int, str], None] = lambda done, of, what: None,
                     ) -> tuple[OnnxModel, dict[str, Any]]:
    """Quantise the weights of a float model.

    Parameters
    ----------
    source : OnnxModel
    scheme : WeightOnly
    keep_float : collection of str
        Nodes whose weights stay float: names, patterns and "NODE..." (passes/quantization/kept.py).
    rounder : callable
        Returns how the weights of products are rounded; tables are rounded to the nearest.
    progress : callable
        Called with (done, of, node) for each layer.

    Returns
    -------
    The model with packed weights, and a report of JSON values.

    Raises
    ------
    ConfigError
        There are no weights to quantise, or an entry of keep_float matches no node.
    """
    found = find_layers(source, kept_names(source, keep_float))
    if not found.layers:
        raise ConfigError(_nothing(source.name, scheme, found.kept))
    products = tuple(layer for layer in found.layers if not layer.is_table)
    by_product = rounder(products) if products else to_nearest
    made: dict[Layer, GroupedWeights] = {}
    rows: list[dict[str, Any]] = []
    known: dict[tuple[str, int], Layer] = {}        # layers of the same weights are rounded once
    for number, layer in enumerate(found.layers):
        progress(number, len(found.layers), layer.node)
        bits = 8 if layer.is_table else scheme.bits
        if (first := known.setdefault((layer.weight, bits), layer)) is not layer:
            made[layer] = made[first]
            continue
        weights = layer.rows(source.weights)
        group = scheme.group if bits == 4 else weights.shape[1]
        made[layer], method, output_db = (to_nearest if layer.is_table else by_product)(layer, weights, bits, group)
        rows.append({"node": layer.node, "weight": layer.weight, "shape": list(weights.shape), "bits": bits,
                     "table": layer.is_table, "rounding": method, "sqnr_db": sqnr_db(weights, made[layer]),
                     "output_sqnr_db": output_db})
    progress(len(found.layers), len(found.layers), "")
    result = with_weights(source, made, scheme.accuracy_level)
    return result, _report(source, result, scheme, rows, found.kept)


def kept_names(source: OnnxModel, keep_float: Collection[str]) -> set[str]:
    """Return the names of the nodes that the entries of keep_float select (passes/quantization/kept.py).

    Raises
    ------
    ConfigError
        An entry matches no node.
    """
    nodes = source.proto.graph.node
    check_names(source.name, {name_of(node) for node in nodes_in(nodes)}, keep_float)
    names, kept = {name_of(node) for node in nodes}, set[str]()
    for entry in keep_float:
        first, made = fitting_names(entry.removesuffix(BEHIND), names), set[str]()
        kept |= {entry} if entry in names else first
        for node in nodes if entry.endswith(BEHIND) and entry not in names else ():
            if name_of(node) in first or not made.isdisjoint(read_by(node)):
                made.update(node.output)
                kept.add(name_of(node))
    return kept


def _report(source: OnnxModel, result: OnnxModel, scheme: WeightOnly, layers: list[dict[str, Any]],
            kept: Mapping[str, str]) -> dict[str, Any]:
    count = sum(math.prod(layer["shape"]) for layer in layers)
    stored = sum(array.nbytes for name, array in result.weights.items() if name not in source.weights)
    floats = [array.size for array in source.weights.values() if array.dtype in FLOATS]
    return {"type": scheme.type, "group_size": scheme.group, "accuracy_level": scheme.accuracy_level,
            "quantised": count, "float_weights": sum(floats), "bits": 8 * stored / count,
            "bytes": sum(array.nbytes for array in result.weights.values()),
            "float_bytes": sum(array.nbytes for array in source.weights.values()),
            "layers": layers, "float_layers": dict(kept)}


def sqnr_db(rows: Array, groups: GroupedWeights) -> float | None:
    """Return the signal to noise ratio of quantised weights in dB; None if they are exact, or all 0."""
    signal = noise = 0.0
    step = max(RATIO_PARTS // max(rows.shape[1], 1), 1)
    for first in range(0, len(rows), step):
        some = slice(first, first + step)
        part = rows[some]
        error = part - replace(groups, numbers=groups.numbers[some], scales=groups.scales[some]).real()
        signal, noise = signal + float(np.vdot(part, part)), noise + float(np.vdot(error, error))
    return 10 * math.log10(signal / noise) if signal and noise else None


def _nothing(model: str, scheme: WeightOnly, kept: Mapping[str, str]) -> str:
    """Return the error for a model without weights to quantise."""
    most = "; ".join(f"'{node}': {reason}" for node, reason in [*kept.items()][:3])
    return (f"--weight-only {scheme.type}: {model} has no weights to quantise. They are matrices of float32 or "
            f"float16, of at least {SMALLEST} elements, that MatMul, Gemm or Gather nodes alone read, as initializers"
            + (f"; left out: {most}" if most else "") + ". Build without --weight-only")
