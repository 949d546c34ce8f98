"""Networks that concatenate: GoogLeNet (Szegedy et al. 2015), Inception v3 (2016), DenseNet (Huang et al. 2017)."""
from __future__ import annotations

from collections.abc import Iterable

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Kernel, Net, Tensor

# 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, pool projection: table 1 of the paper
INCEPTIONS = {"3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64), "4a": (192, 96, 208, 16, 48, 64),
              "4b": (160, 112, 224, 24, 64, 64), "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
              "4e": (256, 160, 320, 32, 128, 128), "5a": (256, 160, 320, 32, 128, 128),
              "5b": (384, 192, 384, 48, 128, 128)}


def _googlenet(net: Net, x: Tensor, normalised: bool, modules: Iterable[str]) -> Tensor:
    def conv(x: Tensor, out: int, kernel: int, name: str, stride: int = 1) -> Tensor:
        if normalised:
            return net.conv_bn_act(x, net.scaled(out), kernel, stride=stride, name=name)
        return net.act(net.conv(x, net.scaled(out), kernel, stride=stride, bias=True, name=name), "relu")

    def inception(x: Tensor, plan: tuple[int, ...]) -> Tensor:
        one, reduced3, three, reduced5, five, projected = plan
        return net.concat([
            conv(x, one, 1, "branch1"),
            conv(conv(x, reduced3, 1, "branch2.0"), three, 3, "branch2.1"),
            conv(conv(x, reduced5, 1, "branch3.0"), five, 3 if normalised else 5, "branch3.1"),
            conv(net.max_pool(x, 3, 1, 1), projected, 1, "branch4.1")])

    x = net.max_pool(conv(x, 64, 7, "conv1", stride=2), 3, 2, ceil_mode=True)
    x = x if normalised else net.lrn(x)
    x = conv(conv(x, 64, 1, "conv2"), 192, 3, "conv3")
    x = net.max_pool(x if normalised else net.lrn(x), 3, 2, ceil_mode=True)
    stage = "3"
    for name in modules:
        if name[0] != stage:
            stage = name[0]
            x = net.max_pool(x, *((3, 2) if stage == "4" else (2, 2)), ceil_mode=True)
        with net.scope(f"inception{name}"):
            x = inception(x, INCEPTIONS[name])
    x = net.linear(net.dropout(net.flatten(net.global_avg_pool(x))), net.classes, name="fc")
    return x if normalised else net.softmax(x)


@architecture(size=224)
def googlenet(net: Net, x: Tensor, modules: Iterable[str] = INCEPTIONS) -> Tensor:
    """Build GoogLeNet as in torchvision: batch normalisation, and 3x3 instead of the paper's 5x5."""
    return _googlenet(net, x, True, modules)


@architecture(size=224)
def googlenet_lrn(net: Net, x: Tensor, modules: Iterable[str] = INCEPTIONS) -> Tensor:
    """Build GoogLeNet as in the paper: biases, local response normalisation, 5x5, Softmax."""
    return _googlenet(net, x, False, modules)


@architecture(size=299)
def inception_v3(net: Net, x: Tensor) -> Tensor:
    """Build Inception v3 with one block of each kind of the paper, and two of kind B."""
    def conv(x: Tensor, out: int, kernel: Kernel, name: str, stride: int = 1, pads: int | None = None) -> Tensor:
        return net.conv_bn_act(x, net.scaled(out), kernel, stride=stride, pads=pads, name=name)

    def chain(x: Tensor, name: str, *layers: tuple[int, Kernel]) -> Tensor:
        for index, (out, kernel) in enumerate(layers):
            x = conv(x, out, kernel, f"{name}_{index}")
        return x

    def pooled(x: Tensor, out: int) -> Tensor:
        return conv(net.avg_pool(x, 3, 1, 1), out, 1, "branch_pool")

    x = conv(conv(conv(x, 32, 3, "stem1", 2, 0), 32, 3, "stem2", 1, 0), 64, 3, "stem3")
    x = conv(conv(net.max_pool(x, 3, 2), 80, 1, "stem4"), 192, 3, "stem5", 1, 0)
    x = net.max_pool(x, 3, 2, 1)
    with net.scope("Mixed_5b"):
        x = net.concat([conv(x, 64, 1, "branch1x1"), chain(x, "branch5x5", (48, 1), (64, 5)),
                        chain(x, "branch3x3dbl", (64, 1), (96, 3), (96, 3)), pooled(x, 32)])
    with net.scope("Mixed_6a"):
        x = net.concat([conv(x, 384, 3, "branch3x3", 2, 1),
                        conv(chain(x, "branch3x3dbl", (64, 1), (96, 3)), 96, 3, "branch3x3dbl_2", 2, 1),
                        net.max_pool(x, 3, 2, 1)])
    for block in ("Mixed_6b", "Mixed_6c"):
        with net.scope(block):
            x = net.concat([conv(x, 192, 1, "branch1x1"),
                            chain(x, "branch7x7", (128, 1), (128, (1, 7)), (192, (7, 1))),
                            chain(x, "branch7x7dbl", (128, 1), (128, (7, 1)), (128, (1, 7)), (128, (7, 1)),
                                  (192, (1, 7))),
                            pooled(x, 192)])
    with net.scope("Mixed_7b"):
        three = conv(x, 384, 1, "branch3x3_1")
        double = chain(x, "branch3x3dbl", (448, 1), (384, 3))
        x = net.concat([conv(x, 320, 1, "branch1x1"),
                        conv(three, 384, (1, 3), "branch3x3_2a"), conv(three, 384, (3, 1), "branch3x3_2b"),
                        conv(double, 384, (1, 3), "branch3x3dbl_3a"), conv(double, 384, (3, 1), "branch3x3dbl_3b"),
                        pooled(x, 192)])
    return net.classify(x)


@architecture(size=224)
def densenet(net: Net, x: Tensor, depths: tuple[int, ...] = (6, 12, 24, 16)) -> Tensor:
    """Build DenseNet-121: BN-ReLU-1x1-BN-ReLU-3x3, concatenated to all before; BN does not fold into Concat."""
    growth = net.scaled(32)
    x = net.max_pool(net.conv_bn_act(x, 2 * growth, 7, stride=2, name="conv0"), 3, 2, 1)
    for stage, depth in enumerate(depths):
        for layer in range(depth):
            with net.scope(f"denseblock{stage + 1}.denselayer{layer + 1}"):
                y = net.conv(net.bn_act(x, name="norm1"), 4 * growth, 1, name="conv1")
                y = net.conv(net.bn_act(y, name="norm2"), growth, 3, name="conv2")
            x = net.concat([x, y])
        if stage < len(depths) - 1:
            with net.scope(f"transition{stage + 1}"):
                x = net.conv(net.bn_act(x, name="norm"), x.channels // 2, 1, name="conv")
                x = net.avg_pool(x, 2, 2)
    return net.classify(net.bn_act(x, name="norm5"), name="classifier")
