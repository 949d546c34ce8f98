"""Each rule and pass keeps the results of the graph, and refuses cases in which it could not."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.ir.graph import Graph, TensorType
from infer_server.engines.ops import reference
from infer_server.engines.passes.layout.permutations import reshaped
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.quantize import edges_to_calibrate, quantize, set_float_precision
from infer_server.engines.passes.rewriting.notes import Note
from tests.engines.passes.build import FLOAT, Build, feeds, keeps, ops


def image(net: Build, channels: int = 4, size: int = 8) -> str:
    return net.input("x", channels, size, size)


def ranges(graph: Graph) -> dict[str, tuple[float, float]]:
    seen = reference.run(graph, feeds(graph, 8), edges_to_calibrate(graph))
    return {name: (float(array.min()), float(array.max())) for name, array in seen.items()}


def bottleneck() -> Graph:
    net = Build()
    x = net("Relu", net.batch_norm(net.conv(image(net, 3), 16, 3)))
    main = net("Relu", net.batch_norm(net.conv(x, 8)))
    main = net.batch_norm(net.conv(net("Relu", net.batch_norm(net.conv(main, 8, 3))), 32))
    y = net("Relu", net("Add", main, net.batch_norm(net.conv(x, 32))))
    return net.graph(net.linear(net("Flatten", net("GlobalAveragePool", y)), 10))


def test_a_residual_block_is_one_kernel_a_convolution_and_its_siblings_are_one() -> None:
    graph = keeps(optimise, keeps(simplify, bottleneck()))
    assert ops(graph) == ["Transpose", "Conv+Relu", "Conv+Clip", "Split", "Conv+Relu", "Conv+Add+Relu",
                          "GlobalAveragePool", "Reshape", "Gemm"]


def test_a_merged_node_stands_for_all_that_it_replaced_in_order() -> None:
    graph = optimise(simplify(bottleneck()))
    last = next(node for node in graph.nodes if len(node.body) == 3)
    assert last.origin == ("conv9", "batchnormalization10", "add13", "relu14")


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Gemm"])
def test_batch_normalisation_disappears_into_the_layer_before_it(op: str) -> None:
    net = Build()
    if op == "Gemm":
        y = net.linear(net.input("x", 6), 5)
    elif op == "Conv":
        y = net.conv(image(net), 8, 3, group=2)
    else:
        y = net(op, image(net), net.draw(4, 3, 2, 2), kernel_shape=(2, 2), strides=(2, 2), group=2)
    assert ops(keeps(simplify, net.graph(net.batch_norm(y)))) == [op]


def test_a_value_that_others_read_keeps_its_batch_normalisation_apart() -> None:
    net = Build()
    x = net.conv(image(net), 8)
    graph = keeps(simplify, net.graph(net.batch_norm(x), x))
    assert ops(graph) == ["Conv", "Mul", "Add"]


def test_batch_normalisation_before_a_padded_convolution_stays_and_says_why() -> None:
    net, log = Build(), list[Note]()
    graph = keeps(lambda g: simplify(g, log), net.graph(net.conv(net.batch_norm(image(net)), 8, 3)))
    assert ops(graph) == ["Mul", "Add", "Conv"]
    assert "pads with zeros" in str(log[0])
    net = Build()
    assert ops(keeps(simplify, net.graph(net.conv(net.batch_norm(image(net)), 8, 3, pads=0)))) == ["Conv"]


def test_zeros_padded_before_a_max_pool_need_values_that_are_never_negative() -> None:
    for first, left in (("Relu", ["Relu", "MaxPool"]), ("Tanh", ["Tanh", "Pad", "MaxPool"])):
        net = Build()
        padded = net("Pad", net(first, image(net)), pads=(0, 0, 1, 1, 0, 0, 1, 1))
        graph = net.graph(net("MaxPool", padded, kernel_shape=(3, 3), strides=(2, 2)))
        assert ops(keeps(simplify, graph)) == left


@pytest.mark.parametrize("value", [-np.inf, -3.4e38])
def test_minus_infinity_padded_before_a_max_pool_is_its_padding(value: float) -> None:
    net = Build()
    padded = net("Pad", net("Tanh", image(net)), pads=(0, 0, 1, 1, 0, 0, 1, 1), value=value)
    graph = keeps(simplify, net.graph(net("MaxPool", padded, kernel_shape=(3, 3), strides=(2, 2))))
    assert ops(graph) == ["Tanh", "MaxPool"]


def test_pads_of_convolutions_and_average_pools_are_their_own() -> None:
    net = Build()
    x = net.conv(net("Pad", image(net), pads=(0, 0, 0, 1, 0, 0, 2, 1)), 8, 3)
    y = net("AveragePool", net("Pad", x, pads=(0, 0, 1, 1, 0, 0, 1, 1)), kernel_shape=(3, 3), strides=(2, 2))
    assert ops(keeps(simplify, net.graph(y))) == ["Conv", "AveragePool"]


def padded_1x1(pads: tuple[int, ...], strides: tuple[int, int], bias: bool = True) -> Graph:
    net = Build()
    constants = [net.draw(6, 4, 1, 1), *([net.draw(6)] if bias else [])]
    return net.graph(net("Conv", image(net), *constants, kernel_shape=(1, 1), strides=strides, pads=pads))


@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (3, 3, 3, 3), (0, 5, 2, 0)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_padded_1x1_convolution_has_its_bias_around_it(pads: tuple[int, ...], stride: int) -> None:
    with_bias, without = (ops(keeps(simplify, padded_1x1(pads, (stride, stride), bias))) for bias in (True, False))
    assert with_bias[-3:] == ["Conv", "Pad", "Add"] and without[-2:] == ["Conv", "Pad"]


def test_a_1x1_convolution_of_nothing_but_padding_stays() -> None:
    assert ops(keeps(simplify, padded_1x1((1, 0, 0, 0), (20, 1)))) == ["Conv"]


def test_a_channel_shuffle_is_a_gather() -> None:
    net = Build()
    x = net("Reshape", image(net, 12), shape=("batch", 3, 4, 8, 8))
    y = net("Reshape", net("Transpose", x, perm=(0, 2, 1, 3, 4)), shape=("batch", 12, 8, 8))
    assert ops(keeps(simplify, net.graph(y))) == ["Gather"]


def test_activations_written_as_arithmetic_get_their_names() -> None:
    net = Build()
    x = image(net)
    clipped = net("Clip", net("Add", x, net.constant(3.0)), min=0.0, max=6.0)
    swish = net("Div", net("Mul", x, clipped), net.constant(6.0))
    silu = net("Mul", net("Sigmoid", swish), swish)
    erf = net("Add", net("Erf", net("Div", silu, net.constant(np.sqrt(2)))), net.constant(1.0))
    gelu = net("Mul", net("Mul", silu, erf), net.constant(0.5))
    assert ops(keeps(simplify, net.graph(gelu))) == ["HardSwish", "Swish", "Gelu"]


def test_x_times_four_sixths_is_no_hard_swish() -> None:
    net = Build()
    x = image(net)
    clipped = net("Clip", net("Add", x, net.constant(3.0)), min=0.0, max=6.0)
    graph = net.graph(net("Mul", net("Mul", x, clipped), net.constant(4 / 6)))
    assert "HardSwish" not in ops(keeps(simplify, graph))


def test_twins_are_one_and_a_graph_output_keeps_its_name() -> None:
    net = Build()
    x = image(net)
    a, b = net("Sigmoid", x), net("Sigmoid", x)
    graph = keeps(simplify, net.graph(net("Add", a, b), net("Identity", x)))
    assert ops(graph) == ["Sigmoid", "Add", "Identity"]


def test_a_product_by_the_identity_is_none_but_by_a_permutation_is() -> None:
    net = Build()
    x = net.input("x", 5, 4)
    same = net("MatMul", x, net.constant(np.eye(4, dtype=np.float32)))
    turned = net("MatMul", x, net.constant(np.eye(4, dtype=np.float32)[::-1].copy()))
    assert sorted(ops(keeps(simplify, net.graph(net("Relu", same), net("Relu", turned))))) == ["MatMul", "Relu", "Relu"]


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_gemm_of_computed_factors_is_a_product_of_views(transposed: tuple[int, int]) -> None:
    net, (left, right) = Build(), transposed
    for name, shape in (("a", (5, 6)), ("b", (6, 7)), ("c", (1, 7))):
        net.input(name)
        net.types[name] = TensorType(FLOAT, shape[::-1] if (name, 1) in zip("ab", transposed, strict=True) else shape)
    y = net("Gemm", *net.inputs, alpha=0.5, beta=3.0, transA=left, transB=right)
    assert ops(keeps(simplify, net.graph(y))) == ["Transpose"] * sum(transposed) + ["MatMul", "Mul", "Mul", "Add"]
    by_constant = net("Gemm", "a", net.draw(7, 6), "c", beta=3.0, transA=left, transB=1)
    assert ops(keeps(simplify, net.graph(by_constant))) == ["Transpose"] * left + ["Gemm", "Mul", "Add"]


def test_a_gemm_whose_items_would_be_moved_stays() -> None:
    net = Build()
    x = net.input("x", 6)
    assert ops(keeps(simplify, net.graph(net("Gemm", x, net.draw(5, 6), transB=1), net("Gemm", x, x, transB=1)))) == [
        "Gemm", "Gemm"]


def test_an_image_flattened_into_a_product_costs_no_transpose() -> None:
    net = Build()
    flat = net("Flatten", net("Relu", net.conv(image(net), 6, 3)))
    y = net("Gemm", flat, net.draw(5, 6 * 64), transB=1)
    assert ops(keeps(optimise, simplify(net.graph(y)))) == ["Transpose", "Conv+Relu", "Reshape", "Gemm"]


def test_a_value_with_two_readers_is_not_fused_away() -> None:
    net = Build()
    x = net.conv(image(net), 4, 3)
    graph = keeps(optimise, simplify(net.graph(net("Relu", x), net.conv(x, 4, 3))))
    assert "Conv+Relu" not in ops(graph)


def test_a_graph_output_in_the_middle_of_a_chain_is_not_fused_away() -> None:
    net = Build()
    x = net.conv(image(net), 4, 3)
    middle = net("Sigmoid", x)
    graph = keeps(optimise, simplify(net.graph(middle, net("Exp", middle))))
    assert ops(graph)[:2] == ["Transpose", "Conv+Sigmoid"]


def test_readers_that_meet_again_are_fused_together() -> None:
    net = Build()
    x = net.conv(image(net), 4, 3)
    y = net("Mul", x, net("Tanh", net("Exp", x)))
    assert ops(keeps(optimise, simplify(net.graph(y)))) == ["Transpose", "Conv+Exp+Tanh+Mul", "Transpose"]


def test_the_sum_of_two_convolutions_goes_to_the_later_one() -> None:
    net = Build()
    x = net("Relu", image(net))
    y = net("Add", net.conv(x, 4, 3), net.conv(x, 4, 5))
    assert ops(keeps(optimise, simplify(net.graph(y)))) == ["Transpose", "Relu", "Conv", "Conv+Add", "Transpose"]


def test_a_gate_of_one_pixel_is_not_computed_for_every_pixel() -> None:
    net = Build()
    x = net("Relu", net.conv(image(net), 4, 3))
    gate = net("Sigmoid", net.conv(net("GlobalAveragePool", x), 4))
    graph = keeps(optimise, simplify(net.graph(net.conv(net("Mul", x, gate), 4))))
    assert ops(graph) == ["Transpose", "Conv+Relu", "GlobalAveragePool", "Conv+Sigmoid", "Mul", "Conv", "Transpose"]


def test_a_reshape_keeps_a_form_unless_it_tears_axes_apart() -> None:
    before = ("batch", 6, 4, 5)
    assert reshaped((0, 2, 3, 1), before, ("batch", 6, 20)) == (0, 2, 1)
    assert reshaped((0, 2, 3, 1), before, ("batch", 2, 3, 4, 5)) == (0, 3, 4, 1, 2)
    assert reshaped((0, 2, 3, 1), before, ("batch", 120)) is None


def test_int8_is_close_to_float_and_every_contraction_computes_in_it() -> None:
    graph = optimise(simplify(bottleneck()))
    quantised = quantize(graph, ranges(graph))
    contractions = [node for node in quantised.nodes if node.anchor.op in ("Conv", "Gemm")]
    assert {node.precision for node in contractions} == {"int8"}
    (wanted,), (got,) = (reference.run(g, feeds(graph, 8)).values() for g in (graph, quantised))
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - got).sum()) > 25


def test_a_transposed_convolution_computes_in_int8_with_a_scale_for_each_of_its_outputs() -> None:
    net = Build()
    y = net("ConvTranspose", net("Relu", net.conv(image(net), 6)), net.draw(6, 5, 2, 2), kernel_shape=(2, 2),
            strides=(2, 2))
    graph = optimise(simplify(net.graph(y)))
    quantised = quantize(graph, ranges(graph))
    node = next(node for node in quantised.nodes if node.anchor.op == "ConvTranspose")
    weights = quantised.types[node.anchor.inputs[1]].quant
    assert node.precision == "int8" and weights is not None and (weights.axis, len(weights.scale)) == (1, 5)
    (wanted,), (got,) = (reference.run(g, feeds(graph, 8)).values() for g in (graph, quantised))
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - got).sum()) > 25


def test_a_tensor_without_negative_values_has_zero_point_0_and_parts_share_a_scale() -> None:
    quantised = quantize(graph := optimise(simplify(bottleneck())), ranges(graph))
    relu = quantised.types["relu2"].quant
    assert relu is not None and relu.zero_point == (0,)
    split = next(node for node in quantised.nodes if node.op == "Split")
    assert len({quantised.types[name].quant for name in (*split.inputs, *split.outputs)}) == 1
    assert quantised.types[graph.outputs[0]].quant is None


def test_a_layer_kept_in_float_and_one_without_a_range_stay_float_and_the_log_says_so() -> None:
    graph, log = optimise(simplify(bottleneck())), list[Note]()
    known = {name: span for name, span in ranges(graph).items() if name != "relu2"}
    quantised = quantize(graph, known, keep_float=["gemm17"], log=log)
    precision = {node.anchor.outputs[0]: node.precision for node in quantised.nodes}
    assert precision["gemm17"] == "fp32"
    assert [note.why for note in log] == ["stays float: no range is known for its input 'relu2'"]
    reference.run(quantised, feeds(graph))


@pytest.mark.parametrize("precision, decibels", [("fp16", 50), ("bf16", 30)])
def test_float_precisions_change_what_is_stored_and_hardly_what_is_computed(precision: str, decibels: float) -> None:
    graph = optimise(simplify(bottleneck()))
    stored = set_float_precision(graph, precision)
    (wanted,), (got,) = (reference.run(g, feeds(graph)).values() for g in (graph, stored))
    assert got.dtype == np.float32
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - got).sum()) > decibels
