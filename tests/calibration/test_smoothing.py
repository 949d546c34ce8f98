import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from infer_server.calibration.smoothing import ChannelPeaks, equalising_factors, smoothing_factors
from infer_server.engines.ir.graph import Graph, Node, TensorType, type_of, verify
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.quantization.smoothing import (
    carried,
    equalisable,
    is_smoothed,
    smoothable,
    smoothed,
    weight_shares,
)

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
    assert peaks.ranges({"n": (1.0, 0.5)}) == {"n": (-6.0, 4.0)}
    graph = block()
    factors = smoothing_factors(graph, {"n": np.arange(WIDTH)}, 0.8)["n"]
    assert (factors > 0).all() and np.isfinite(factors).all()


# ---- convolutions
CHANNELS = 6
IMAGES = RNG.standard_normal((2, 5, 5, CHANNELS)).astype(np.float32)


def bottleneck() -> Graph:
    """Return the graph a = relu6(x up); b = relu6(depthwise(a)); y = b down + a, channels last."""
    weights = {"up": RNG.standard_normal((CHANNELS, CHANNELS, 1, 1)), "each": RNG.standard_normal((CHANNELS, 1, 3, 3)),
               "down": RNG.standard_normal((CHANNELS, CHANNELS // 2, 1, 1))}
    clip = {"min": 0.0, "max": 6.0}

    def conv(source: str, weight: str, groups: int = 1) -> Node:
        size = weights[weight].shape[-1]
        return Node("Conv", (source, weight), (f"{weight}.y",), {
            "channels_last": 1, "group": groups, "kernel_shape": (size, size), "pads": (size // 2,) * 4})

    nodes = (Node("Fused", ("x", "up"), ("a",), body=(conv("x", "up"), Node("Clip", ("up.y",), ("a",), clip))),
             Node("Fused", ("a", "each"), ("b",), body=(conv("a", "each", CHANNELS),
                                                        Node("Clip", ("each.y",), ("b",), clip))),
             Node("Fused", ("b", "down", "a"), ("y",), body=(conv("b", "down", 2),
                                                             Node("Add", ("down.y", "a"), ("y",)))))
    constants = {name: array.astype(np.float32) for name, array in weights.items()}
    types = {name: TensorType(FLOAT, ("batch", 5, 5, CHANNELS)) for name in ("x", "up.y", "a", "each.y", "b", "down.y",
                                                                             "y")}
    types |= {name: type_of(array) for name, array in constants.items()}
    return verify(Graph("g", ("x",), ("y",), nodes, constants, types))


def test_tensors_that_convolutions_and_sums_read_can_be_equalised() -> None:
    graph = bottleneck()
    assert (equalisable(graph), smoothable(graph)) == (("a", "b"), ())
    assert (equalisable(block()), smoothable(block())) == ((), ("n", "h"))


def test_the_right_factor_of_a_product_keeps_its_values() -> None:
    graph = block()
    product = Node("Fused", ("x", "h"), ("p",), body=(Node("MatMul", ("x", "h"), ("q",)), Node("Relu", ("q",), ("p",))))
    types = {**graph.types, "p": graph.types["x"], "q": graph.types["x"]}
    assert smoothable(Graph("g", ("x",), ("y", "p"), (*graph.nodes, product), graph.constants, types)) == ("n",)


def test_an_equalised_graph_is_the_same_function() -> None:
    graph = bottleneck()
    factors = {name: RNG.uniform(0.1, 10, CHANNELS) for name in "ab"}
    even = verify(smoothed(graph, factors))
    np.testing.assert_allclose(run(even, {"x": IMAGES})["y"], run(graph, {"x": IMAGES})["y"], 1e-4, 1e-4)
    assert [is_smoothed(even, name) for name in "aby"] == [True, True, False]


def test_weights_of_a_depthwise_layer_leave_all_steps_to_its_input() -> None:
    graph = bottleneck()
    np.testing.assert_array_equal(weight_shares(graph)["a"], np.ones(CHANNELS))
    down = np.abs(graph.constants["down"][:, :, 0, 0]).reshape(2, CHANNELS // 2, CHANNELS // 2)
    np.testing.assert_allclose(weight_shares(graph)["b"], (down / down.max(axis=2, keepdims=True)).max(axis=1).ravel())


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_no_equalised_channel_has_a_wider_range_than_the_tensor_had(alpha: float) -> None:
    """The bound of a ReLU6 is then not below the range, and saturation applies it."""
    peaks = {name: np.array([6, 6, 3, 1, 0.5, 0]) for name in "ab"}
    for s in equalising_factors(bottleneck(), peaks, alpha).values():
        scaled = peaks["a"] / s
        assert (6 / s >= scaled.max() * (1 - 1e-9)).all()
        assert scaled[scaled > 0].min() / scaled.max() > 0.5 / 6


def joined(carrier: str = "MaxPool", outputs: tuple[str, ...] = ("y",)) -> Graph:
    """Return the graph a = leaky(x first); p = pool(a); c = leaky(p second); y = (p, c) third."""
    weights = {"first": (CHANNELS, CHANNELS), "second": (CHANNELS, CHANNELS), "third": (CHANNELS, 2 * CHANNELS)}

    def conv(source: str, weight: str) -> Node:
        return Node("Conv", (source, weight), (f"{weight}.y",), {"channels_last": 1, "kernel_shape": (1, 1)})

    def leaky(source: str, weight: str, name: str) -> Node:
        return Node("Fused", (source, weight), (name,), body=(
            conv(source, weight), Node("LeakyRelu", (f"{weight}.y",), (name,), {"alpha": 0.1})))

    pool = {"channels_last": 1, "kernel_shape": (2, 2), "strides": (1, 1)} if carrier == "MaxPool" else {}
    nodes = (leaky("x", "first", "a"), Node(carrier, ("a",), ("p",), pool), leaky("p", "second", "c"),
             Node("Concat", ("p", "c"), ("both",), {"axis": 3}), replace(conv("both", "third"), outputs=("y",)))
    constants = {name: RNG.standard_normal((*shape, 1, 1)).astype(np.float32) for name, shape in weights.items()}
    types = {name: TensorType(FLOAT, ("batch", size, size, CHANNELS)) for size, names in (
        (5, ("x", "first.y", "a")), (4, ("p", "second.y", "c", "y"))) for name in names}
    types["both"] = TensorType(FLOAT, ("batch", 4, 4, 2 * CHANNELS))
    types |= {name: type_of(array) for name, array in constants.items()}
    return Graph("g", ("x",), outputs, nodes, constants, types)


def test_pools_and_concatenations_carry_the_channels_of_an_equalised_graph() -> None:
    graph = verify(joined())
    assert equalisable(graph) == ("a", "c")
    factors = {name: RNG.uniform(0.1, 10, CHANNELS) for name in ("a", "c")}
    even = verify(smoothed(graph, factors))
    for name, factor in carried(graph, factors).items():
        np.testing.assert_allclose(run(even, {"x": IMAGES}, [name])[name],
                                   run(graph, {"x": IMAGES}, [name])[name] / factor, 1e-4, 1e-4)
        assert is_smoothed(even, name)
    np.testing.assert_allclose(run(even, {"x": IMAGES})["y"], run(graph, {"x": IMAGES})["y"], 1e-4, 1e-4)
    only = carried(graph, {"c": factors["c"]})
    np.testing.assert_array_equal(only["both"], [*np.ones(CHANNELS), *factors["c"]])
    assert [*only] == ["c", "both"]


def test_channels_are_carried_only_where_all_readers_behind_allow_it() -> None:
    assert equalisable(joined("Softmax")) == ("c",)
    assert equalisable(joined(outputs=("y", "both"))) == equalisable(joined(outputs=("y", "p", "c"))) == ()
    assert equalisable(joined(outputs=("y", "c"))) == ("a",)


def test_weights_behind_a_concatenation_count_for_their_part() -> None:
    graph, share = joined(), {}
    second, third = (np.abs(graph.constants[name][:, :, 0, 0]) for name in ("second", "third"))
    for name, weights in {"second": second, "third": third}.items():
        share[name] = (weights / weights.max(axis=1, keepdims=True)).max(axis=0)
    np.testing.assert_allclose(weight_shares(graph)["c"], share["third"][CHANNELS:])
    np.testing.assert_allclose(weight_shares(graph)["a"], np.maximum(share["second"], share["third"][:CHANNELS]))


def test_a_chain_of_pools_may_be_longer_than_the_recursion_limit() -> None:
    graph = joined()
    first, pool, *_ = graph.nodes
    names = ["a", *(f"p{n}" for n in range(2 * sys.getrecursionlimit())), "p"]
    pools = [replace(pool, inputs=(source,), outputs=(result,)) for source, result in pairwise(names)]
    types = {**graph.types, **dict.fromkeys(names[1:], graph.types["p"])}
    long = Graph("g", ("x",), ("y",), (first, *pools, *graph.nodes[2:]), graph.constants, types)
    assert equalisable(long) == ("a", "c")
    np.testing.assert_array_equal(weight_shares(long)["a"], weight_shares(graph)["a"])
    even = smoothed(long, {"a": RNG.uniform(0.1, 10, CHANNELS)})
    assert is_smoothed(even, "p") and not is_smoothed(even, "y")
