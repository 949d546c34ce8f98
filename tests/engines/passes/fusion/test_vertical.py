"""A layer and the pointwise nodes after it become one Fused node."""
import pytest

from infer_server.engines.passes.fusion.vertical import fuse_pointwise
from tests.engines.passes.build import Build, keeps, ops


def test_a_layer_takes_the_pointwise_nodes_after_it() -> None:
    net = Build()
    x = net.input("x", 4)
    after = keeps(fuse_pointwise, net.graph(net("Tanh", net("Relu", net.linear(x, 3, name="fc")), name="y")))
    assert ops(after) == ["Gemm+Relu+Tanh"]
    fused, = after.nodes
    assert (fused.name, fused.outputs, fused.origin) == ("y", ("y",), ("fc", "relu1", "y"))


def test_a_value_that_an_output_shows_is_not_fused_away() -> None:
    net = Build()
    x = net.input("x", 4)
    layer = net.linear(x, 3, name="fc")
    assert ops(keeps(fuse_pointwise, net.graph(net("Relu", layer, name="y"), layer))) == ["Gemm", "Relu"]


def test_readers_whose_results_meet_again_are_part_of_the_node() -> None:
    net = Build()
    layer = net.linear(net.input("x", 4), 3)
    gated = net("Mul", layer, net("Sigmoid", net("Tanh", layer)), name="y")
    assert ops(keeps(fuse_pointwise, net.graph(gated))) == ["Gemm+Tanh+Sigmoid+Mul"]


def test_a_sum_of_two_layers_goes_to_the_later_one() -> None:
    net = Build()
    x = net.input("x", 4)
    total = net("Add", net.linear(x, 3, name="first"), net.linear(x, 3, name="second"), name="y")
    after = keeps(fuse_pointwise, net.graph(total))
    assert ops(after) == ["Gemm", "Gemm+Add"] and after.nodes[1].anchor.name == "second"


def test_pointwise_nodes_without_a_layer_are_one_node_among_themselves() -> None:
    net = Build()
    chain = net("Relu", net("Tanh", net.input("x", 4)), name="y")
    assert ops(keeps(fuse_pointwise, net.graph(chain))) == ["Tanh+Relu"]


def test_a_node_is_in_one_group_only() -> None:
    """Readers of two values lead to common nodes, which join the group of the first value."""
    net = Build()
    first = net("Neg", net.input("a", 4))
    gate = net("Sigmoid", first)
    second = net("Abs", net.input("b", 4))
    met = net("Sub", net("Mul", net("Exp", second), first), gate)
    after = keeps(fuse_pointwise, net.graph(net("Add", met, second, name="y")))
    assert sum(len(kind.split("+")) for kind in ops(after)) == 7


@pytest.mark.parametrize(("last", "fused"), [
    ({"min": 0.0, "max": 255.0, "saturates": 1}, True), ({"min": 0.0, "max": 255.0}, False),
    ({"min": -1.0, "max": 255.0, "saturates": 1}, False), ({"min": 0.0, "max": 256.0, "saturates": 1}, False)], ids=str)
def test_what_was_rounded_to_bytes_is_stored_as_bytes(last: dict[str, float], fused: bool) -> None:
    net = Build()
    rounded = net("Round", net("Exp", net.input("x", 4)))
    after = keeps(fuse_pointwise, net.graph(net("Cast", net("Clip", rounded, **last), to="uint8")))
    assert ops(after) == (["Exp+Round+Clip+Cast"] if fused else ["Exp+Round+Clip", "Cast"])


def test_bytes_behind_a_layer_are_made_by_themselves() -> None:
    """Some kernels of layers cannot store bytes."""
    net = Build()
    rounded = net("Clip", net("Round", net.linear(net.input("x", 4), 3)), min=0.0, max=255.0, saturates=1)
    assert ops(keeps(fuse_pointwise, net.graph(net("Cast", rounded, to="uint8")))) == ["Gemm+Round+Clip", "Cast"]
