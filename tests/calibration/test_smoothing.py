from typing import Any

import numpy as np
import pytest

from infer_server.calibration.smoothing import ChannelPeaks, smoothing_factors
from infer_server.engines.ir.graph import Graph, Node, TensorType, type_of, verify
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.quantization.smoothing import is_smoothed, smoothable, smoothed

FLOAT = np.dtype(np.float32)
RNG = np.random.default_rng(0)
WIDTH, HIDDEN = 8, 12
ITEMS = RNG.standard_normal((3, 5, WIDTH)).astype(np.float32)
CONSTANTS = {"g": RNG.uniform(0.5, 2, WIDTH), "b": RNG.standard_normal(WIDTH),
             "up": RNG.standard_normal((WIDTH, HIDDEN)), "down": RNG.standard_normal((HIDDEN, WIDTH))}


def block(act: str = "Gelu", outputs: tuple[str, ...] = ("y",)) -> Graph:
    """Return the graph n = norm(x); h = act(n up); y = h down + n."""
    norm = Node("LayerNormalization", ("x", "g", "b"), ("n",), {"axis": -1})
    up = Node("Fused", ("n", "up"), ("h",), body=(Node("MatMul", ("n", "up"), ("u",)), Node(act, ("u",), ("h",))))
    down = Node("Fused", ("h", "down", "n"), ("y",),
                body=(Node("MatMul", ("h", "down"), ("d",)), Node("Add", ("d", "n"), ("y",))))
    constants = {name: array.astype(np.float32) for name, array in CONSTANTS.items()}
    types = {name: TensorType(FLOAT, ("batch", 5, HIDDEN if name in "uh" else WIDTH)) for name in "xnuhdy"}
    types |= {name: type_of(array) for name, array in constants.items()}
    return verify(Graph("g", ("x",), outputs, (norm, up, down), constants, types))


def peaks_of(graph: Graph, tensors: tuple[str, ...]) -> dict[str, Any]:
    watched = ChannelPeaks(tensors)
    values = run(Graph(graph.name, graph.inputs, (*graph.outputs, *tensors), graph.nodes, graph.constants, graph.types),
                 {"x": ITEMS})
    for name in tensors:
        watched.observe(name, values[name])
    return watched.result()


def test_what_a_norm_or_arithmetic_makes_for_products_can_be_smoothed() -> None:
    assert smoothable(block()) == ("n", "h")


def test_a_graph_output_keeps_its_values() -> None:
    assert smoothable(block(outputs=("y", "n"))) == ("h",)


@pytest.mark.parametrize("act", ("Gelu", "Relu"))
def test_a_smoothed_graph_is_the_same_function_and_its_tensors_are_divided(act: str) -> None:
    graph = block(act)
    factors = {"n": RNG.uniform(0.1, 10, WIDTH), "h": RNG.uniform(0.1, 10, HIDDEN)}
    even = verify(smoothed(graph, factors))
    np.testing.assert_allclose(run(even, {"x": ITEMS})["y"], run(graph, {"x": ITEMS})["y"], 1e-4, 1e-4)
    assert [is_smoothed(one, name) for one in (graph, even) for name in "nhy"] == [False] * 3 + [True, True, False]
    before, after = peaks_of(graph, ("n", "h")), peaks_of(even, ("n", "h"))
    for name, s in factors.items():
        np.testing.assert_allclose(after[name] * s, before[name], 1e-5, 1e-5)


def test_a_product_stays_the_first_of_its_body() -> None:
    even = smoothed(block(), {"n": np.full(WIDTH, 3.0)})
    assert [part.op for part in even.producer["y"].body] == ["MatMul", "Mul", "Add"]


def test_what_ends_in_a_relu_still_does_so_that_it_is_known_to_be_never_negative() -> None:
    even = smoothed(block("Relu"), {"h": np.full(HIDDEN, 3.0)})
    assert even.producer["h"].body[-1].op == "Relu"


def test_a_channel_of_outliers_comes_down_to_the_others() -> None:
    graph = block()
    wild = graph.rebuild(graph.nodes, {"g": graph.constants["g"] * np.float32([50] + [1] * (WIDTH - 1))})
    peaks = peaks_of(wild, ("n",))
    even = peaks_of(smoothed(wild, smoothing_factors(wild, peaks, 0.8)), ("n",))
    assert even["n"].max() / np.median(even["n"]) < 0.2 * peaks["n"].max() / np.median(peaks["n"])


def test_peaks_are_over_all_batches_and_a_channel_of_zeros_has_a_factor_too() -> None:
    peaks = ChannelPeaks(["n"])
    peaks.observe("n", np.float32([[0, 1], [0, -3]]))
    peaks.observe("n", np.float32([[0, 2]]))
    np.testing.assert_array_equal(peaks.result()["n"], [0, 3])
    graph = block()
    factors = smoothing_factors(graph, {"n": np.arange(WIDTH)}, 0.8)["n"]
    assert (factors > 0).all() and np.isfinite(factors).all()
