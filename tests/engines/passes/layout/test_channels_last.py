"""Operators along axes follow images into channels last and out of it, with renumbered axes."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.passes.layout.channels_last import to_channels_last
from tests.engines.passes.build import Build, keeps, ops

FOLLOWING: dict[str, dict[str, Any]] = {
    "Softmax": {"axis": 1}, "LpNormalization": {"axis": 1}, "CumSum": {"axis": 1}, "ReduceMax": {"axes": (2,)},
    "ArgMax": {"axis": 3, "keepdims": 1}, "Tile": {"repeats": (1, 2, 1, 3)},
    "TopK": {"axis": 1, "k": 3, "largest": 1, "count": 2},
    "Pad": {"pads": (0, 1, 2, 0, 0, 0, 0, 3), "value": 0.5}, "Expand": {"shape": ("batch", 4, 6, 7)},
    "Slice": {"axes": (3, 1), "starts": (1, 0), "ends": (4, 2), "steps": (1, 1)},
}


def image_between(op: str) -> Build:
    """Return x -> Conv -> op -> image."""
    net = Build()
    made = net(op, net.conv(net.input("x", 3, 6, 7), 4, 3), **FOLLOWING[op])
    net("Identity", made if isinstance(made, str) else made[0], name="y")
    return net


@pytest.mark.parametrize("op", FOLLOWING)
def test_an_operator_along_axes_works_on_images_as_they_are_stored(op: str) -> None:
    graph = keeps(to_channels_last, image_between(op).graph("y"))
    assert ops(graph) == ["Transpose", "Conv", op, "Identity", "Transpose"]


@pytest.mark.parametrize("op", FOLLOWING)
def test_written_to_onnx_it_works_on_channels_first_again(op: str) -> None:
    graph = to_channels_last(image_between(op).graph("y"))
    written = keeps(lambda g: graph_from_onnx(onnx_from_graph(g)), graph)
    assert "Transpose" not in ops(written)


def test_an_operator_that_drops_its_axes_leaves_the_others_in_their_order() -> None:
    net = Build()
    x = net.conv(net.input("x", 3, 6, 7), 4, 3)
    outputs = [net("ReduceSum", x, axes=(1, 3), keepdims=0), net("ArgMin", x, axis=1, keepdims=0),
               net("Gather", x, net.constant(np.array(2)), axis=2)]
    assert ops(keeps(to_channels_last, net.graph(*outputs))).count("Transpose") == 2      # of x, and of the last output
