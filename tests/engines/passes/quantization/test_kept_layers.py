"""Each layer of a network may be kept in float, whatever it shares kernels, Splits and Concats with."""
from __future__ import annotations

import pytest

from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.quantize import contractions, edges_to_calibrate, quantize
from tests.zoo import TINY

# Bottlenecks, inception modules, CSP blocks and shuffled channels: Splits of layers that read one tensor, or of halves
MODELS = ("resnet50", "googlenet", "inception_v3", "yolo_v5", "nanodet", "densenet", "views")


@pytest.mark.parametrize("name", MODELS)
def test_any_layer_may_be_kept(name: str) -> None:
    graph = optimise(simplify(graph_from_onnx(TINY[name]())))
    ranges = {tensor: (-1.0, 1.0) for tensor in edges_to_calibrate(graph)}
    layers = contractions(graph, ())
    for layer in layers:
        quantised = quantize(graph, ranges, layer.origin)
        kept = [node for node in quantised.nodes if not set(node.origin).isdisjoint(layer.origin)]
        assert kept and all(node.precision != "int8" for node in kept), layer.name
        others = sum(node.precision == "int8" for node in quantised.nodes)
        assert others >= len(layers) - 1, f"{layer.name}: {others} other layers of {len(layers)} compute in INT8"
