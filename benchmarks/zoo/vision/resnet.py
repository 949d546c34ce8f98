"""Residual networks: He et al. 2016, ResNeXt (Xie et al. 2017), RegNet (Radosavovic et al. 2020)."""
from __future__ import annotations

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor

RESIDUAL_GAIN = 0.5


def _shortcut(net: Net, x: Tensor, out: int, stride: int, pooled: bool) -> Tensor:
    if x.channels == out and stride == 1:
        return x
    if pooled and stride > 1:
        x, stride = net.avg_pool(x, 2, 2, ceil_mode=True, count_include_pad=False), 1
    return net.conv_bn(x, out, 1, stride=stride, name="downsample")


def basic_block(net: Net, x: Tensor, out: int, stride: int) -> Tensor:
    """Add relu(shortcut(x) + 3x3(relu(3x3(x))))."""
    y = net.conv_bn_act(x, out, 3, stride=stride, name="conv1")
    y = net.conv_bn(y, out, 3, gain=RESIDUAL_GAIN, name="conv2")
    return net.act(net.add(y, _shortcut(net, x, out, stride, pooled=False)), "relu")


def bottleneck(net: Net, x: Tensor, middle: int, out: int, stride: int, *, groups: int = 1,
               excite: int = 0, pooled_shortcut: bool = False) -> Tensor:
    """Add relu(shortcut(x) + 1x1(relu(3x3(relu(1x1(x)))))), with `excite` by squeeze-and-excite."""
    y = net.conv_bn_act(x, middle, 1, name="conv1")
    y = net.conv_bn_act(y, middle, 3, stride=stride, groups=groups, name="conv2")
    if excite:
        y = net.squeeze_excite(y, excite, name="se")
    y = net.conv_bn(y, out, 1, gain=RESIDUAL_GAIN, name="conv3")
    return net.act(net.add(y, _shortcut(net, x, out, stride, pooled_shortcut)), "relu")


def stem(net: Net, x: Tensor) -> Tensor:
    return net.max_pool(net.conv_bn_act(x, net.scaled(64), 7, stride=2, name="conv1"), 3, 2, 1)


def _basic(net: Net, x: Tensor, depths: tuple[int, ...]) -> Tensor:
    x = stem(net, x)
    for stage, depth in enumerate(depths):
        for block in range(depth):
            with net.scope(f"layer{stage + 1}.{block}"):
                x = basic_block(net, x, net.scaled(64 << stage), 2 if stage and not block else 1)
    return net.classify(x)


def pyramid_base(net: Net, x: Tensor, depths: tuple[int, ...]) -> list[Tensor]:
    """Return the last features of each stage of bottlenecks."""
    x, stages = stem(net, x), []
    for stage, depth in enumerate(depths):
        for block in range(depth):
            with net.scope(f"layer{stage + 1}.{block}"):
                x = bottleneck(net, x, net.scaled(64 << stage), net.scaled(256 << stage),
                               2 if stage and not block else 1)
        stages.append(x)
    return stages


def _bottlenecks(net: Net, x: Tensor, depths: tuple[int, ...], *, base: int = 64, groups: int = 1,
                 pooled_shortcut: bool = False) -> Tensor:
    x = stem(net, x)
    for stage, depth in enumerate(depths):
        for block in range(depth):
            with net.scope(f"layer{stage + 1}.{block}"):
                x = bottleneck(net, x, net.scaled(base << stage, max(4, groups)), net.scaled(256 << stage),
                               2 if stage and not block else 1, groups=groups,
                               pooled_shortcut=pooled_shortcut)
    return net.classify(x)


@architecture(size=224)
def resnet18(net: Net, x: Tensor) -> Tensor:
    return _basic(net, x, (2, 2, 2, 2))


@architecture(size=224)
def resnet34(net: Net, x: Tensor, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Tensor:
    return _basic(net, x, depths)


@architecture(size=224)
def resnet50(net: Net, x: Tensor, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Tensor:
    """Build ResNet-50 v1.5 as in PyTorch: the 3x3 convolution has the stride."""
    return _bottlenecks(net, x, depths)


@architecture(size=224)
def resnet50_d(net: Net, x: Tensor, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Tensor:
    """Build ResNet-50-D (He et al. 2019): the shortcut averages 2x2 pixels before its 1x1."""
    return _bottlenecks(net, x, depths, pooled_shortcut=True)


@architecture(size=224)
def resnext50(net: Net, x: Tensor, depths: tuple[int, ...] = (3, 4, 6, 3), groups: int = 32) -> Tensor:
    return _bottlenecks(net, x, depths, base=128, groups=groups)


@architecture(size=224)
def preact_resnet18(net: Net, x: Tensor, depths: tuple[int, ...] = (2, 2, 2, 2)) -> Tensor:
    """Build a pre-activation ResNet-18 (He et al. 2016b), where BN and ReLU precede each convolution."""
    x = net.conv(x, net.scaled(64), 3, stride=2, name="conv1")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            with net.scope(f"layer{stage + 1}.{block}"):
                out, stride = net.scaled(64 << stage), 2 if stage and not block else 1
                y = net.bn_act(x, name="bn1")
                if x.channels != out or stride > 1:
                    x = net.conv(y, out, 1, stride=stride, name="downsample")
                y = net.conv(y, out, 3, stride=stride, name="conv1")
                y = net.conv(net.act(net.bn(y, gain=RESIDUAL_GAIN, name="bn2"), "relu"), out, 3, name="conv2")
                x = net.add(y, x)
    return net.classify(net.bn_act(x, name="bn"))


@architecture(size=224)
def regnet_y(net: Net, x: Tensor, depths: tuple[int, ...] = (1, 3, 6, 2)) -> Tensor:
    """Build RegNetY with groups of 8 channels and squeeze-and-excite."""
    group = 8
    x = net.conv_bn_act(x, net.scaled(32), 3, stride=2, name="stem")
    for stage, (out, depth) in enumerate(zip((48, 104, 208, 440), depths, strict=True)):
        for block in range(depth):
            with net.scope(f"trunk.{stage}.{block}"):
                channels = net.scaled(out, group)
                x = bottleneck(net, x, channels, channels, 1 if block else 2, groups=channels // group,
                               excite=max(4, x.channels // 4))
    return net.classify(x)
