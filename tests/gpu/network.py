"""Small network, and INT8 plans of it."""
from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo.vision.mobile import inverted_residual
from benchmarks.zoo.vision.resnet import basic_block
from infer_server.engines.plan.plan import Plan
from tests.zoo import Net, Tensor, architecture

Plans = Callable[[str], Plan]       # by target


@architecture(size=16)
def small(net: Net, x: Tensor) -> Tensor:
    """Build a stem of three channels, a pool, a residual and an inverted residual block, a mean and a product."""
    x = net.max_pool(net.conv_bn_act(x, 16, 3, stride=2, name="stem"), 3, stride=2)
    x = inverted_residual(net, basic_block(net, x, 16, 1), 16, expanded=32, act="relu6")
    return net.classify(x)


MODEL = small(classes=10)
