"""GraphEditor applies its changes to a new graph, and leaves the original one unchanged."""
import numpy as np
import pytest

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Graph, Node, QParams, TensorType, verify
from infer_server.engines.passes.rewriting.editor import GraphEditor, merged_origin, renamed
from tests.engines.passes.build import Build, keeps, ops


def relu_of_conv() -> Graph:
    net = Build()
    x = net.input("x", 3, 8, 8)
    return net.graph(net("Relu", net.conv(x, 4, 3, name="conv"), name="y"))


def test_nodes_that_are_appended_make_the_same_graph() -> None:
    graph = relu_of_conv()
    editor = GraphEditor(graph)
    editor.nodes.extend(graph.nodes)
    assert str(editor.finish()) == str(graph)


def test_a_constant_that_arithmetic_made_a_scalar_is_an_array() -> None:
    editor = GraphEditor(relu_of_conv())
    assert isinstance(editor.constants[editor.add_constant("half", np.array(1, np.float32) / 2)], np.ndarray)


def test_a_node_is_written_out_as_two() -> None:
    def clipped(graph: Graph) -> Graph:
        editor = GraphEditor(graph)
        for node in graph.nodes:
            if node.op == "Relu":
                zero = editor.add_constant("zero", np.zeros(1, np.float32))
                less = editor.add(f"{node.inputs[0]}.less", "Max", [node.inputs[0], zero])
                editor.make("y", "Max", [less, zero], origin=node.origin)
            else:
                editor.nodes.append(node)
        return editor.finish()

    after = keeps(clipped, relu_of_conv())
    assert ops(after) == ["Conv", "Max", "Max"]
    assert [node.name for node in after.nodes] == ["conv", "conv.less", "y"]
    assert after.nodes[-1].origin == ("y",)


def test_a_name_that_is_taken_gets_a_number() -> None:
    editor = GraphEditor(relu_of_conv())
    type_ = editor.type("conv")
    assert [editor.add_tensor("conv", type_) for _ in range(2)] == ["conv.1", "conv.2"]
    assert [editor.fresh_name("free") for _ in range(2)] == ["free", "free.1"]


def test_what_was_added_is_known_beside_what_there_was() -> None:
    graph = relu_of_conv()
    editor = GraphEditor(graph)
    quant = QParams((0.5,), (0,), "int8")
    name = editor.add_constant("stored", np.ones((2, 3), np.int8), quant)
    added = editor.constant(name)
    assert added is not None and added.sum() == 6
    assert editor.type(name) == TensorType(np.dtype(np.int8), (2, 3), quant) and editor.shape(name) == (2, 3)
    assert editor.constant("x") is None and editor.shape("x") == graph.shape("x")
    weight = graph.nodes[0].inputs[1]
    assert editor.constant(weight) is graph.constants[weight]


def test_what_nothing_needs_is_dropped() -> None:
    graph = relu_of_conv()
    editor = GraphEditor(graph)
    editor.add("unused", "Relu", [editor.add_constant("unread", np.ones(1, np.float32))])
    editor.nodes.extend(graph.nodes)
    assert str(editor.finish()) == str(graph)


def test_readers_of_a_replaced_tensor_read_the_other_one() -> None:
    net = Build()
    x = net.input("x", 3)
    same = net("Identity", net("Identity", x, name="first"), name="second")

    def shortened(graph: Graph) -> Graph:
        editor = GraphEditor(graph)
        for node in graph.nodes:
            if node.op == "Identity":
                editor.replace(node.outputs[0], by=node.inputs[0])
            else:
                editor.nodes.append(node)
        assert editor.current("second") == "x"
        return editor.finish()

    assert [str(node) for node in keeps(shortened, net.graph(net("Relu", same, name="y"))).nodes] == ["y = Relu(x)"]


def test_a_graph_output_that_is_replaced_keeps_its_name() -> None:
    graph = relu_of_conv()
    editor = GraphEditor(graph)
    editor.nodes.append(graph.nodes[0])
    editor.replace("y", by="conv")
    assert [node.outputs for node in verify(editor.finish()).nodes] == [("y",)]


@pytest.mark.parametrize("by", ("x", "other"))
def test_a_graph_output_that_is_an_input_or_another_output_is_an_identity(by: str) -> None:
    net = Build()
    x = net.input("x", 3)
    graph = net.graph(net("Relu", x, name="y"), net("Abs", x, name="other"))
    editor = GraphEditor(graph)
    editor.nodes.append(graph.nodes[1])
    editor.replace("y", by=by)
    assert str(verify(editor.finish()).nodes[-1]) == f"y = Identity({by})"


def test_a_replaced_tensor_is_replaced_in_bodies_too() -> None:
    parts = (Node("Conv", ("x", "w"), ("t",)), Node("Relu", ("t",), ("y",)))
    fused = renamed(Node("", (), ("y",), name="y").with_body(parts), {"x": "pixels", "t": "inner"})
    assert fused.inputs == ("pixels", "w")
    assert [str(part) for part in fused.body] == ["inner = Conv(pixels, w)", "y = Relu(inner)"]


def test_a_graph_that_reads_what_nothing_makes_is_refused_by_verify() -> None:
    graph = relu_of_conv()
    editor = GraphEditor(graph)
    editor.nodes.append(graph.nodes[1])
    with pytest.raises(GraphError, match="reads 'conv', which no node before it produces"):
        verify(editor.finish())


def test_the_origin_of_many_nodes_is_each_name_once_in_order() -> None:
    nodes = [Node("Relu", ("x",), ("y",), origin=origin) for origin in (("b", "a"), ("a", "c"))]
    assert merged_origin(nodes) == ("b", "a", "c")
