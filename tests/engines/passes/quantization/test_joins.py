"""Scales of tensors that are joined or moved, by `quantize` with given ranges."""
from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from infer_server.engines.errors import ConfigError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import Graph, verify
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.kept import check_kept, check_names, kept_nodes
from infer_server.engines.passes.quantization.quantize import edges_to_calibrate, quantize

RANDOM = np.random.default_rng(0)
TWO_READERS = """s = Conv(x, w8)  b = Conv(s, w8)  cc = Concat<axis = 1>(s, b)  z = Conv(cc, w16)
    y = Conv<strides = [2, 2]>(s, w8)"""


def graph_of(nodes: str, outputs: str = "y") -> Graph:
    """Return an optimised graph; w8, v8 and w16 are weights with 8 output and 8, 8 and 16 input channels."""
    results = ", ".join(f"float[N,A,B,C] {name}" for name in outputs.split())
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> m (float[N,8,6,6] x) => ({results}) {{ {nodes} }}')
    for index, item in enumerate(model.graph.node):
        item.name = item.output[0] if not item.name else f"{item.name}{index}"
    for name, channels in (("w8", 8), ("v8", 8), ("w16", 16)):
        array = RANDOM.standard_normal((8, channels, 1, 1)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return optimise(simplify(graph_from_onnx(model)))


def with_ranges(graph: Graph, keep_float: tuple[str, ...] = (), **widest: float) -> Graph:
    """Return the INT8 graph where each tensor ranges from 0 to its number in `widest`, else to 1."""
    return verify(quantize(graph, {name: (0.0, widest.get(name, 1.0)) for name in edges_to_calibrate(graph)},
                           keep_float))


def scales(graph: Graph) -> dict[str, int]:
    """Return the largest value of each tensor stored in 8 bits, rounded."""
    return {name: round(255 * graph.types[name].quant.scale[0]) for node in graph.nodes for name in node.outputs
            if graph.types[name].quant is not None}


def conversions(graph: Graph) -> list[str]:
    return [node.inputs[0] for node in graph.nodes if node.op == "Identity"]


def test_a_source_of_a_concat_keeps_its_scale_for_its_other_readers():
    graph = with_ranges(graph_of(TWO_READERS, "y z"), s=1, b=100, cc=100)
    assert {name: scales(graph)[name] for name in ("s", "b", "cc")} == {"s": 1, "b": 100, "cc": 100}
    assert conversions(graph) == ["s"]


def test_sources_of_like_ranges_are_written_where_the_concat_lies():
    graph = with_ranges(graph_of(TWO_READERS, "y z"), s=1, b=4, cc=4)
    assert {scales(graph)[name] for name in ("s", "b", "cc")} == {4} and not conversions(graph)


def test_a_source_that_only_the_concat_reads_is_written_at_its_scale():
    nodes = """s = Conv(x, w8)  t = Relu(s)  b = Conv(x, v8)  u = Sigmoid(b)  cc = Concat<axis = 1>(t, u)
        y = Conv(cc, w16)"""
    graph = with_ranges(graph_of(nodes), t=100, cc=100)
    assert not conversions(graph) and scales(graph)["u"] == scales(graph)["cc"] == 100


def test_scales_stay_fine_through_concats_of_concats():
    """Each range is less than 4 times the one before, but the last is 9 times the first."""
    nodes = """a = Conv(x, w8)  b = Conv(a, w8)  c1 = Concat<axis = 1>(a, b)  c = Conv(c1, w16)
        c2 = Concat<axis = 1>(c1, c)  d = MaxPool<kernel_shape = [2, 2]>(c2)  e, f, g = Split<axis = 1>(d)
        h = Conv(e, w8)  i = Add(h, f)  y = Conv(i, w8)"""
    graph = with_ranges(graph_of(nodes), a=1, b=3, c1=3, c=9, c2=9, d=9, e=9, f=9, g=9)
    assert scales(graph)["c1"] == 3 and scales(graph)["c2"] == 9 and conversions(graph) == ["c1"]


@pytest.mark.parametrize("behind", ["", "k = Transpose<perm = [0, 2, 3, 1]>(cc)  y = Relu(k)",
                                    "p, q = Split<axis = 1>(cc)  y = Add(p, q)"])
def test_results_stay_float(behind):
    """The first result is a graph output."""
    nodes = f"""a = Conv(x, w8)  b = Abs(a)  c = Conv(x, w8)  d = Sigmoid(c)
        {'cc' if behind else 'y'} = Concat<axis = 1>(b, d)  {behind}"""
    graph = with_ranges(graph_of(nodes), b=300, cc=300)
    assert set(scales(graph)) <= {"x.nhwc"} and not conversions(graph)
    assert any(node.precision == "int8" for node in graph.nodes)


def test_a_concat_that_is_a_result_and_is_read_inside_stays_float_where_its_sources_are_unlike():
    nodes = "a = Conv(x, w8)  b = Conv(a, w8)  y = Concat<axis = 1>(a, b)  z = Conv(y, w16)  v = Conv(a, w8)"
    graph = with_ranges(graph_of(nodes, "y z v"), a=1, b=100, **{"y.nhwc": 100})
    concat = next(node for node in graph.nodes if node.op == "Concat")
    assert not scales(graph).keys() & {*concat.inputs, *concat.outputs} and scales(graph)["a"] == 1
    assert all(node.precision == "int8" for node in graph.nodes if node.anchor.op == "Conv")


def test_parts_of_a_wide_layer_are_layers_where_their_ranges_are_unlike():
    nodes = """a = Conv(x, w8)  b = Conv(x, v8)  c = Relu(a)  p = MaxPool<kernel_shape = [2, 2]>(c)
        q = MaxPool<kernel_shape = [2, 2]>(b)  d = Conv(p, w8)  e = Conv(q, w8)  y = Add(d, e)"""
    graph = graph_of(nodes)
    assert "Split" in [node.op for node in graph.nodes]
    like = with_ranges(graph, c=2, b=2, p=2, q=2, **{"c.siblings": 2})
    assert "Split" in [node.op for node in like.nodes]
    wide = next(node for node in graph.nodes if node.op == "Split").inputs[0]
    apart = with_ranges(graph, b=50, q=50, **{wide: 50})
    assert "Split" not in [node.op for node in apart.nodes] and not conversions(apart)
    assert scales(apart)["c"] == 1 and scales(apart)["b"] == 50


def test_parts_of_what_is_no_layer_are_converted_each_from_float():
    nodes = """a = Conv(x, w8)  b = Conv(a, w8)  cc = Concat<axis = 1>(a, b)  m = MaxPool<kernel_shape = [3, 3]>(cc)
        l, q = Split<axis = 1>(m)  d = Conv(l, w8)  e = Conv(q, w8)  y = Add(d, e)"""
    graph = with_ranges(graph_of(nodes), a=1, b=100, cc=100, m=100, l=1, q=100)
    assert not scales(graph).keys() & {"cc", "m", "l", "q"} and scales(graph)["a"] == 1
    read = [scales(graph)[node.inputs[0]] for node in graph.nodes if node.origin in (("d",), ("e",), ("e", "y"))]
    assert sorted(read) == [1, 100]


@pytest.mark.parametrize("axes", [[2, 3], [1], [1, 2, 3]])
@pytest.mark.parametrize("deviation", ["d = Sub(a, m)", "d = Identity(a)"], ids=["about the mean", "about 0"])
def test_the_inside_of_a_norm_stays_float(axes, deviation):
    nodes = f"""a = Conv(x, w8)  m = ReduceMean<axes = {axes}>(a)  {deviation}  s = Mul(d, d)
        v = ReduceMean<axes = {axes}>(s)  r = Sqrt(v)  n = Div(d, r)  y = Conv(n, w8)"""
    stored = scales(with_ranges(graph_of(nodes)))
    assert not stored.keys() & {"s", *(["d"] if "Sub" in deviation else [])}


# ---- what users keep
CHAIN = "a = Conv(x, w8)  b = Relu(a)  c = Conv(b, w8)  d = Abs(c)  e = Conv(d, w8)  f = Relu(e)  y = Conv(f, w8)"


def test_a_kept_node_that_is_no_layer_stores_floats():
    nodes = "a = Conv(x, w8)  b = Conv(a, w8)  cc = Concat<axis = 1>(a, b)  y = Conv(cc, w16)"
    plain, graph = (with_ranges(graph_of(nodes), kept) for kept in ((), ("cc",)))
    assert {"a", "b", "cc"} <= scales(plain).keys()
    assert not scales(graph).keys() & {"b", "cc"} and "a" in conversions(graph)


@pytest.mark.parametrize("entry, kept", [
    ("c", {"c"}), ("[ce]", {"c", "e"}), ("c...", {"c", "d", "e", "f", "y"}), ("[de]...", {"c", "d", "e", "f", "y"})])
def test_entries_are_names_patterns_and_all_that_follows(entry, kept):
    """Node d is fused into layer c, and f into e."""
    graph = graph_of(CHAIN)
    check_kept(graph, [entry])
    assert kept_nodes(graph, [entry]) >= kept - {"d", "f"} and not kept_nodes(graph, [entry]) & {"a", "b"}
    int8 = {node.outputs[0] for node in with_ranges(graph, (entry,)).nodes if node.precision == "int8"}
    assert int8 == {"b", "d", "f", "y.nhwc"} - {{"c": "d", "e": "f", "y": "y.nhwc"}.get(name, name) for name in kept}


@pytest.mark.parametrize("entry, reason", [
    ("bb", "no node of m is called 'bb'; did you mean 'b'"), ("head/*", "has a name that fits 'head/\\*'"),
    ("nothing...", "no node of m is called 'nothing' ")])
def test_an_entry_that_fits_nothing_is_refused(entry, reason):
    with pytest.raises(ConfigError, match=reason):
        check_kept(graph_of(CHAIN), [entry])
    with pytest.raises(ConfigError, match=reason):
        check_names("m", set("abcdefy"), [entry])
