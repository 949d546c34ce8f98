"""Instance norms become norms of rows in channels first, and means over images elsewhere."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.ir.graph import Graph
from infer_server.engines.passes.pipeline import optimise, simplify
from tests.engines.passes.build import Build, keeps, ops


def through(graph: Graph) -> Graph:
    return keeps(lambda before: optimise(simplify(before)), graph)


@pytest.mark.parametrize("shape", [(6, 20), (6, 5, 5), (6, 3, 4, 5)], ids=["signals", "images", "volumes"])
def test_alone_it_is_a_norm_of_rows(shape: tuple[int, ...]) -> None:
    net = Build()
    y = net("InstanceNormalization", net.input("x", *shape), net.draw(shape[0]), net.draw(shape[0]), epsilon=1e-3)
    assert [op for op in ops(through(net.graph(y))) if op != "Reshape"] == ["LayerNormalization"]


def test_by_a_scale_that_is_computed_it_is_one_too() -> None:
    net = Build()
    scale = net("Relu", net.draw(6))
    y = net("InstanceNormalization", net.input("x", 6, 5, 5), scale, net.draw(6))
    assert "LayerNormalization" in ops(through(net.graph(y)))


@pytest.mark.parametrize("signal", [False, True], ids=["images", "signals"])
def test_between_convolutions_it_is_made_of_means_and_turns_nothing(signal: bool) -> None:
    net = Build()
    shape = (6, 30) if signal else (6, 7, 7)

    def conv(x: str) -> str:
        if not signal:
            return net.conv(x, 6, 3)
        made: str = net("Conv", x, net.draw(6, 6, 3), kernel_shape=(3,), pads=(1, 1), strides=(1,), dilations=(1,),
                        group=1)
        return made

    normed = net("InstanceNormalization", conv(net.input("x", *shape)), net.draw(6), net.draw(6))
    made = [op for op in ops(through(net.graph(conv(net("Relu", normed))))) if op != "Reshape"]
    assert made == ["Transpose", "Conv", "GlobalAveragePool", "Sub", "Mul", "GlobalAveragePool+Add+Sqrt+Div",
                    "Mul+Add+Relu", "Conv", "Transpose"]


def test_of_groups_it_is_a_norm_of_rows() -> None:
    net = Build()
    groups = net("Reshape", net.input("x", 6, 5, 5), shape=("batch", 3, 50))
    normed = net("InstanceNormalization", groups, net.constant(np.ones(3)), net.constant(np.zeros(3)))
    made = ops(through(net.graph(net("Reshape", normed, shape=("batch", 6, 5, 5)))))
    assert made == ["Reshape", "LayerNormalization", "Reshape"]
