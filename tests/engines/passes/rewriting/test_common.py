"""Equal constants are merged, whatever their memory layout; different ones are not."""
import numpy as np

from infer_server.engines.passes.rewriting.common import merge_common
from tests.engines.passes.build import Build, keeps


def test_equal_weights_of_several_layers_are_one_and_others_stay() -> None:
    net = Build()
    x = net.input("x", 4)
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    weight[:, 0] = weight[0]        # by their first rows all of them may be equal
    other = weight.copy()
    other[-1] += 1
    twice = np.ascontiguousarray(weight.T)
    names = [net.constant(array) for array in (twice, other, weight.T, weight, weight.T)]
    for name, array in zip(names, (twice, other, weight.T, weight, weight.T), strict=True):
        net.constants[name] = array         # as it lies: transposed, in one place with another
        x = net("MatMul", x, name)
    after = keeps(merge_common, net.graph(x))
    assert [node.inputs[1] for node in after.nodes] == [names[index] for index in (0, 1, 0, 3, 0)]
