"""Node.with_body: a Fused node's inputs are the inputs of its body that no part produces."""
from infer_server.engines.ir.graph import Node

CONV = Node("Conv", ("x", "w", ""), ("t",), {"group": 1}, "conv", ("a",))
ADD = Node("Add", ("t", "r"), ("u",), {}, "add", ("b",))
MUL = Node("Mul", ("u", "x"), ("y",), {}, "mul", ("c",), precision="int8")


def test_a_fused_node_reads_each_outer_tensor_once_in_the_order_of_its_body() -> None:
    fused = MUL.with_body([CONV, ADD, MUL])
    assert (fused.op, fused.inputs, fused.outputs) == ("Fused", ("x", "w", "r"), ("y",))
    assert fused.body == (CONV, ADD, MUL) and fused.anchor is CONV


def test_a_fused_node_keeps_the_name_the_origin_and_the_precision_of_the_one_it_stands_for() -> None:
    fused = MUL.with_body([CONV, ADD, MUL])
    assert (fused.name, fused.origin, fused.precision) == ("mul", ("c",), "int8")
    assert not fused.attrs


def test_a_part_alone_is_the_node_itself_in_the_precision_that_it_had() -> None:
    assert MUL.with_body([ADD]) == Node("Add", ("t", "r"), ("u",), {}, "add", ("b",), precision="int8")
