"""Generated inputs for a model that comes without data: random, but within what each input may hold.

    floats              normal, mean 0, deviation 1
    uint8 images        0 to 255
    indices             of the table that they pick from: token numbers below the vocabulary's size
    masks               ones: every token counts
    other integers      0 or 1; truth: either
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from infer_server.calibration.data.items import CalibrationData, Feed, batched_inputs
from infer_server.engines.ir.dtypes import BITS, as_in_memory, dtype_named
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.facts import moved_from
from infer_server.engines.plan.plan import IoTensor

SEED = 0


def generated(inputs: Sequence[IoTensor], graph: Graph, count: int, seed: int = SEED) -> CalibrationData:
    """Return `count` random items for these inputs of the graph, reproducible by the seed."""
    bounds = {tensor.name: index_bound(graph, tensor.name) for tensor in inputs}

    def read() -> Iterator[Feed]:
        random = np.random.default_rng(seed)
        for _ in range(count):
            yield {tensor.name: _array(tensor, bounds[tensor.name], random) for tensor in inputs}

    return CalibrationData(f"inputs generated with seed {seed}", read, count, batched_inputs(inputs))


@dataflow
def index_bound(graph: Graph, name: str) -> Walk[int | None]:
    """Return the extent that a tensor of indices must stay below, or None if no node reads it as indices."""
    bounds: list[int] = []
    for node in graph.consumers[name]:
        for part in (node, *node.body):
            if part.op in ("Gather", "GatherElements") and name in part.inputs[1:]:
                extent = graph.shape(part.inputs[0])[part.attrs.get("axis", 0)]
                bounds += [extent] if isinstance(extent, int) else []
        if node.op == "Cast" or name in moved_from(node):
            for output in node.outputs:
                bound = yield output
                bounds += [] if bound is None else [bound]
    return min(bounds, default=None)


def _array(tensor: IoTensor, bound: int | None, random: np.random.Generator) -> Array:
    shape = [1 if isinstance(extent, str) else extent for extent in tensor.shape]
    if tensor.dtype in BITS:
        return as_in_memory(random.standard_normal(shape, np.float32).astype(dtype_named(tensor.dtype)))
    dtype = np.dtype(tensor.dtype)
    if dtype.kind == "f":
        return np.asarray(random.standard_normal(shape), dtype)
    if "mask" in tensor.name.lower():
        return np.ones(shape, dtype)
    return np.asarray(random.integers(0, bound or (256 if dtype == np.uint8 else 2), shape), dtype)
