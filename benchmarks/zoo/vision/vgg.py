"""Plain stacks of convolutions.

AlexNet (Krizhevsky 2014), VGG (Simonyan and Zisserman 2015), SqueezeNet (Iandola et al. 2016).
"""
from __future__ import annotations

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor


def _vgg_features(net: Net, x: Tensor, depths: tuple[int, ...], normalised: bool) -> Tensor:
    for stage, depth in enumerate(depths):
        for layer in range(depth):
            out, name = net.scaled(min(64 << stage, 512)), f"features.{stage}.{layer}"
            x = net.conv_bn_act(x, out, 3, bias=True, name=name) if normalised else net.act(
                net.conv(x, out, 3, bias=True, name=name), "relu")
        x = net.max_pool(x, 2, 2)
    return x


def _vgg_classifier(net: Net, x: Tensor) -> Tensor:
    x = net.flatten(x)
    for layer in range(2):
        x = net.dropout(net.act(net.linear(x, net.scaled(4096), name=f"classifier.{layer}"), "relu"))
    return net.linear(x, net.classes, name="classifier.2")


@architecture(size=224)
def vgg16(net: Net, x: Tensor) -> Tensor:
    return _vgg_classifier(net, _vgg_features(net, x, (2, 2, 3, 3, 3), normalised=False))


@architecture(size=224)
def vgg16_bn(net: Net, x: Tensor) -> Tensor:
    return _vgg_classifier(net, _vgg_features(net, x, (2, 2, 3, 3, 3), normalised=True))


@architecture(size=224)
def alexnet(net: Net, x: Tensor) -> Tensor:
    x = net.act(net.conv(x, net.scaled(64), 11, stride=4, pads=2, bias=True, name="features.0"), "relu")
    x = net.max_pool(x, 3, 2)
    x = net.max_pool(net.act(net.conv(x, net.scaled(192), 5, bias=True, name="features.3"), "relu"), 3, 2)
    for index, out in enumerate((384, 256, 256)):
        x = net.act(net.conv(x, net.scaled(out), 3, bias=True, name=f"features.{6 + 2 * index}"), "relu")
    return _vgg_classifier(net, net.max_pool(x, 3, 2))


@architecture(size=224)
def squeezenet(net: Net, x: Tensor) -> Tensor:
    """Build SqueezeNet 1.1: fire modules, a convolution as the classifier, Softmax."""
    def fire(x: Tensor, squeezed: int, expanded: int, index: int) -> Tensor:
        with net.scope(f"features.{index}"):
            s = net.act(net.conv(x, net.scaled(squeezed), 1, bias=True, name="squeeze"), "relu")
            return net.concat([net.act(net.conv(s, net.scaled(expanded), k, bias=True, name=f"expand{k}x{k}"), "relu")
                               for k in (1, 3)])

    x = net.act(net.conv(x, net.scaled(64), 3, stride=2, pads=0, bias=True, name="features.0"), "relu")
    for index, (squeezed, expanded, pooled) in enumerate((
            (16, 64, True), (16, 64, False), (32, 128, True), (32, 128, False), (48, 192, True), (48, 192, False),
            (64, 256, False), (64, 256, False))):
        if pooled and index < 5:
            x = net.max_pool(x, 3, 2, ceil_mode=True)
        x = fire(x, squeezed, expanded, index + 3)
    x = net.act(net.conv(net.dropout(x), net.classes, 1, bias=True, name="classifier.1"), "relu")
    return net.softmax(net.flatten(net.global_avg_pool(x)))
