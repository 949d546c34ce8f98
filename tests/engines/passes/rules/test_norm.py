"""Norms are recognised in every form, and nothing that only resembles one is."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.ir.graph import Graph
from infer_server.engines.passes.pipeline import simplify
from tests.engines.passes.build import Build, keeps, ops

WIDTH = 6


def layer_norm(axis: int = 2, variance_axis: int = 2, square_of: str = "centred") -> Graph:
    """Return gamma (x - mean) / sqrt(variance + epsilon) + beta, or a graph that only resembles it."""
    net = Build()
    x = net.input("x", 5, WIDTH)
    centred = net("Sub", x, net("ReduceMean", x, axes=(axis,), keepdims=1))
    squared = net("Pow", {"centred": centred, "x": x}[square_of], net.constant(np.float32(2)))
    variance = net("ReduceMean", squared, axes=(variance_axis,), keepdims=1)
    root = net("Sqrt", net("Add", variance, net.constant(np.float32(1e-5))))
    scaled = net("Mul", net("Div", centred, root), net.constant(np.linspace(0.5, 2, WIDTH)))
    return net.graph(net("Add", scaled, net.constant(np.linspace(-1, 1, WIDTH))))


def test_a_layer_norm_written_out_is_one_node_with_its_scale_and_shift() -> None:
    graph = keeps(simplify, layer_norm())
    assert ops(graph) == ["LayerNormalization"]
    assert len(graph.nodes[0].origin) == 9


@pytest.mark.parametrize("options", ({"axis": 1}, {"variance_axis": 1}, {"square_of": "x"}), ids=str)
def test_what_only_looks_like_a_layer_norm_is_none(options: dict[str, object]) -> None:
    assert "LayerNormalization" not in ops(keeps(simplify, layer_norm(**options)))      # type: ignore[arg-type]


@pytest.mark.parametrize("way", ("Div", "Reciprocal", "one"))
def test_a_norm_by_root_mean_square_written_out_is_one_node_with_its_scale(way: str) -> None:
    net = Build()
    x = net.input("x", 5, WIDTH)
    mean = net("ReduceMean", net("Pow", x, net.constant(np.float32(2))), axes=(2,), keepdims=1)
    root = net("Sqrt", net("Add", mean, net.constant(np.float32(1e-6))))
    normal = {"Div": lambda: net("Div", x, root), "Reciprocal": lambda: net("Mul", x, net("Reciprocal", root)),
              "one": lambda: net("Mul", x, net("Div", net.constant(np.float32(1)), root))}[way]()
    graph = keeps(simplify, net.graph(net("Mul", net.constant(np.linspace(0.5, 2, WIDTH)), normal)))
    assert ops(graph) == ["RMSNormalization"]


@pytest.mark.parametrize("low, found", ((1e-12, True), (0.5, False)))
def test_a_division_by_the_norm_has_a_name_unless_its_bound_matters(low: float, found: bool) -> None:
    net = Build()
    x = net.input("x", WIDTH)
    graph = net.graph(net("Div", x, net("Clip", net("ReduceL2", x, axes=(1,), keepdims=1), min=low)))
    simple = keeps(simplify, graph)
    assert (ops(simple) == ["LpNormalization"]) is found
    assert "ReduceL2" not in ops(simple)


def test_sums_of_embeddings_are_one_and_a_number_waits_for_its_activation() -> None:
    net = Build()
    x = net.input("x", 5, WIDTH)
    y = net("Add", net("Add", x, net.constant(np.ones((5, WIDTH)))), net.constant(np.arange(WIDTH, dtype=np.float32)))
    assert ops(keeps(simplify, net.graph(y))) == ["Add"]
    net = Build()
    x = net("Add", net.input("x", 5, WIDTH), net.constant(np.arange(WIDTH, dtype=np.float32)))
    six = net("Clip", net("Add", x, net.constant(np.float32(3))), min=0.0, max=6.0)
    assert ops(keeps(simplify, net.graph(net("Div", six, net.constant(np.float32(6)))))) == ["Add", "HardSigmoid"]
