"""Apply a quantisation recipe to a graph before `quantize`: smooth channels, round weights and correct biases."""
from __future__ import annotations

from collections.abc import Collection

import numpy as np

from infer_server.engines.ir.graph import Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.quantization.bias_correction import correct_biases
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.quantize import parted, quantize, with_rounding
from infer_server.engines.passes.quantization.scaled_rows import with_scaled_rows
from infer_server.engines.passes.quantization.smoothing import scalable, smoothed


def prepared(graph: Graph, recipe: Recipe, keep_float: Collection[str] = ()) -> Graph:
    """Return an optimised float graph with the recipe's smoothing, rounding, bias correction and scaled rows.

    Tensors of the recipe that the graph lacks, as at other shapes, are ignored.
    """
    able = set(scalable(graph)) if recipe.smoothing else ()
    graph = smoothed(graph, {name: factors for name, factors in recipe.smoothing.items() if name in able})
    means = {tensor: np.asarray(values) for tensor, values in recipe.means.items()}
    if recipe.rounding:
        graph = with_rounding(graph, recipe.rounding, means, keep_float)
    if means:
        graph = parted(graph, recipe.ranges, kept_nodes(graph, keep_float))
        graph = correct_biases(graph, quantize(graph, recipe.ranges, keep_float), means).graph
    return with_scaled_rows(graph, recipe.scaled_rows, keep_float) if recipe.scaled_rows else graph
