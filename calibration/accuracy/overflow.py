"""Find tensors whose values float16 cannot hold: they become infinite, and what follows may hide it."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from infer_server.calibration.data.items import Feed
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.passes.rewriting.facts import is_weighted
from infer_server.engines.runtime.specialisation import Specialisation

FLOAT16 = np.dtype(np.float16)
LARGEST = float(np.finfo(FLOAT16).max)


def overflow(graph: Graph, feeds: Iterable[Feed]) -> tuple[str, ...]:
    """Run a graph that is stored in float16 in float32, and say which tensors exceed float16's largest number.

    feeds: of at most a trial's items each. Returns a sentence, or () where all fit.
    """
    converted = [name for name, node in graph.producer.items()
                 if graph.types[name].dtype == FLOAT16 and node.anchor.op != "Cast" and name not in graph.outputs]
    if not converted:
        return ()
    types = {name: replace(graph.types[name], dtype=np.dtype(np.float32)) for name in converted}
    wide = graph.rebuild([replace(node, precision="fp32") for node in graph.nodes], types=types)
    engine = Specialisation(Builder(BuildConfig(timing=False)).observable(wide, converted))
    peaks = dict.fromkeys(converted, 0.0)

    def observe(name: str, values: Array) -> None:
        if name in peaks and values.size:
            with np.errstate(invalid="ignore"):
                peaks[name] = max(peaks[name], float(np.abs(values).max()))

    for feed in feeds:
        engine.show({name: feed[name] for name in graph.inputs}, observe)
    for node in graph.nodes:        # FP16 weights of these nodes are rounded only when they are packed
        if node.precision == "fp16" and is_weighted(node) and graph.is_constant(weight := node.anchor.inputs[1]):
            peaks[weight] = float(np.abs(graph.constants[weight]).max(initial=0.0))
    over = sorted((name for name, peak in peaks.items() if peak > LARGEST), key=lambda name: -peaks[name])
    if not over:
        return ()
    return (f"{len(over)} tensors exceed {LARGEST:g}, the largest number of float16, on these items: '{over[0]}' "
            f"reaches {peaks[over[0]]:.4g}; they become infinite, build with --bf16 or --fp32",)
