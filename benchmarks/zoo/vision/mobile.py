"""Depthwise-separable networks.

MobileNet v1-v3 (Howard et al. 2017, 2019; Sandler et al. 2018), EfficientNet (Tan and Le 2019), ShuffleNet v1 and v2
(Zhang et al. 2018; Ma et al. 2018).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor

RESIDUAL_GAIN = 0.5


def inverted_residual(net: Net, x: Tensor, out: int, *, kernel: int = 3, stride: int = 1, expanded: int, act: str,
                      squeezed: int = 0, gate: str = "sigmoid", inner_act: str = "relu") -> Tensor:
    """Add an inverted residual block, x + project(excite(depthwise(expand(x))))."""
    y = x
    if expanded != x.channels:
        y = net.conv_bn_act(y, expanded, 1, act=act, name="expand")
    y = net.conv_bn_act(y, expanded, kernel, stride=stride, groups=expanded, act=act, name="depthwise")
    if squeezed:
        y = net.squeeze_excite(y, squeezed, act=inner_act, gate=gate, name="se")
    joins = stride == 1 and x.channels == out
    y = net.conv_bn(y, out, 1, gain=RESIDUAL_GAIN if joins else 1.0, name="project")
    return net.add(x, y) if joins else y


BLOCKS = (64, 128, 128, 256, 256, *[512] * 6, 1024, 1024)     # output features of each block of MobileNet v1


def depthwise_separable(net: Net, x: Tensor, blocks: Sequence[int] = BLOCKS) -> Iterator[Tensor]:
    """Yield the output of each block of MobileNet v1."""
    x = net.conv_bn_act(x, net.scaled(32), 3, stride=2, name="conv0")
    strided = {1, 3, 5, 11}
    for index, out in enumerate(blocks):
        with net.scope(f"features.{index}"):
            x = net.conv_bn_act(x, x.channels, 3, stride=1 + (index in strided), groups=x.channels, name="depthwise")
            x = net.conv_bn_act(x, net.scaled(out), 1, name="pointwise")
        yield x


@architecture(size=224)
def mobilenet_v1(net: Net, x: Tensor) -> Tensor:
    *_, x = depthwise_separable(net, x)
    return net.classify(x)


@architecture(size=224)
def mobilenet_v2(net: Net, x: Tensor, depths: tuple[int, ...] = (1, 2, 3, 4, 3, 3, 1)) -> Tensor:
    """Build MobileNetV2 with ReLU6 as Clip, and flattened by a chain of shape operators as in old exports."""
    x = net.conv_bn_act(x, net.scaled(32), 3, stride=2, act="relu6", name="features.0")
    index = 1
    stages = ((1, 16, 1), (6, 24, 2), (6, 32, 2), (6, 64, 2), (6, 96, 1), (6, 160, 2), (6, 320, 1))
    for (expansion, out, stride), depth in zip(stages, depths, strict=True):
        for block in range(depth):
            with net.scope(f"features.{index}"):
                x = inverted_residual(net, x, net.scaled(out), stride=1 if block else stride,
                                      expanded=expansion * x.channels, act="relu6")
            index += 1
    x = net.conv_bn_act(x, net.scaled(1280), 1, act="relu6", name=f"features.{index}")
    x = net.flatten_by_shape(net.global_avg_pool(x))
    return net.linear(net.dropout(x), net.classes, name="classifier.1")


@architecture(size=224)
def mobilenet_v3(net: Net, x: Tensor, hardswish: str = "hardswish_by_hardsigmoid",
                 hardsigmoid: str = "hardsigmoid", blocks: Sequence[int] = range(11)) -> Tensor:
    """Build MobileNetV3-Small.

    hardswish, hardsigmoid: the forms of these activations (Net.act). blocks: numbers of the blocks to build.
    """
    x = net.conv_bn_act(x, net.scaled(16), 3, stride=2, act=hardswish, name="features.0")
    table = ((3, 16, 16, True, "relu", 2), (3, 72, 24, False, "relu", 2), (3, 88, 24, False, "relu", 1),
             (5, 96, 40, True, hardswish, 2), (5, 240, 40, True, hardswish, 1), (5, 240, 40, True, hardswish, 1),
             (5, 120, 48, True, hardswish, 1), (5, 144, 48, True, hardswish, 1), (5, 288, 96, True, hardswish, 2),
             (5, 576, 96, True, hardswish, 1), (5, 576, 96, True, hardswish, 1))
    for index in blocks:
        kernel, expanded, out, excited, act, stride = table[index]
        with net.scope(f"features.{index + 1}"):
            x = inverted_residual(net, x, net.scaled(out), kernel=kernel, stride=stride, expanded=net.scaled(expanded),
                                  act=act, squeezed=net.scaled(expanded // 4) if excited else 0, gate=hardsigmoid)
    x = net.conv_bn_act(x, net.scaled(576), 1, act=hardswish, name="features.12")
    x = net.act(net.linear(net.flatten(net.global_avg_pool(x)), net.scaled(1024), name="classifier.0"), hardswish)
    return net.linear(net.dropout(x), net.classes, name="classifier.3")


EFFICIENT = ((1, 16, 1, 3), (6, 24, 2, 3), (6, 40, 2, 5), (6, 80, 2, 3), (6, 112, 1, 5), (6, 192, 2, 5),
             (6, 320, 1, 3))        # expansion, channels, stride, kernel
EFFICIENT_DEPTHS = (1, 2, 2, 3, 3, 4, 1)


def _efficientnet(net: Net, x: Tensor, depths: tuple[int, ...], act: str, excited: bool) -> Tensor:
    x = net.conv_bn_act(x, net.scaled(32), 3, stride=2, act=act, name="features.0")
    for stage, ((expansion, out, stride, kernel), depth) in enumerate(zip(EFFICIENT, depths, strict=True)):
        for block in range(depth):
            with net.scope(f"features.{stage + 1}.{block}"):
                x = inverted_residual(net, x, net.scaled(out), kernel=kernel, stride=1 if block else stride,
                                      expanded=expansion * x.channels, act=act, inner_act=act,
                                      squeezed=max(4, x.channels // 4) if excited else 0)
    x = net.conv_bn_act(x, net.scaled(1280), 1, act=act, name="features.8")
    return net.linear(net.dropout(net.flatten(net.global_avg_pool(x))), net.classes, name="classifier.1")


@architecture(size=224)
def efficientnet_b0(net: Net, x: Tensor, depths: tuple[int, ...] = EFFICIENT_DEPTHS) -> Tensor:
    """Build EfficientNet-B0: SiLU and squeeze-and-excite."""
    return _efficientnet(net, x, depths, "silu", excited=True)


@architecture(size=224)
def efficientnet_lite0(net: Net, x: Tensor, depths: tuple[int, ...] = EFFICIENT_DEPTHS) -> Tensor:
    """Build EfficientNet-Lite0, made for integers: ReLU6, no squeeze-and-excite."""
    return _efficientnet(net, x, depths, "relu6", excited=False)


@architecture(size=224)
def efficientnet_v2(net: Net, x: Tensor) -> Tensor:
    """Build a short EfficientNetV2 (Tan and Le 2021): fused blocks before depthwise ones, pooled by ReduceMean."""
    x = net.conv_bn_act(x, net.scaled(24), 3, stride=2, act="silu", name="features.0")
    for index, (out, stride) in enumerate(((48, 2), (48, 1), (64, 2), (64, 1))):
        with net.scope(f"features.{index + 1}"):
            y = net.conv_bn_act(x, 4 * x.channels, 3, stride=stride, act="silu", name="fused")
            y = net.conv_bn(y, net.scaled(out), 1, gain=RESIDUAL_GAIN, name="project")
            x = net.add(x, y) if stride == 1 else y
    for index, (out, stride) in enumerate(((128, 2), (128, 1), (160, 1), (256, 2), (256, 1))):
        with net.scope(f"features.{index + 5}"):
            x = inverted_residual(net, x, net.scaled(out), stride=stride, expanded=4 * x.channels, act="silu",
                                  inner_act="silu", squeezed=max(4, x.channels // 4))
    x = net.mean(net.conv_bn_act(x, net.scaled(1280), 1, act="silu", name="features.10"), keepdims=False)
    return net.linear(x, net.classes, name="classifier.1")


SHUFFLE_DEPTHS = (4, 8, 4)


@architecture(size=224)
def shufflenet_v1(net: Net, x: Tensor, groups: int = 4, depths: tuple[int, ...] = SHUFFLE_DEPTHS) -> Tensor:
    """Build ShuffleNet v1: grouped 1x1 convolutions around a channel shuffle; strided units append an average pool."""
    def unit(x: Tensor, out: int, stride: int, first: bool) -> Tensor:
        middle = out // 4
        produced = out - x.channels if stride == 2 else out
        y = net.conv_bn_act(x, middle, 1, groups=1 if first else groups, name="compress")
        y = y if first else net.channel_shuffle(y, groups)
        y = net.conv_bn(y, middle, 3, stride=stride, groups=middle, name="depthwise")
        y = net.conv_bn(y, produced, 1, groups=groups, gain=RESIDUAL_GAIN, name="expand")
        joined = net.concat([net.avg_pool(x, 3, 2, 1), y]) if stride == 2 else net.add(x, y)
        return net.act(joined, "relu")

    x = net.max_pool(net.conv_bn_act(x, net.scaled(24), 3, stride=2, name="conv1"), 3, 2, 1)
    for stage, (out, depth) in enumerate(zip((272, 544, 1088), depths, strict=True)):
        for block in range(depth):
            with net.scope(f"stage{stage + 2}.{block}"):
                x = unit(x, net.scaled(out, 4 * groups), 1 if block else 2, first=stage == 0 and block == 0)
    return net.classify(x)


def shufflenet_unit(net: Net, x: Tensor, out: int, stride: int, act: str = "relu", by_slices: bool = False) -> Tensor:
    """Add a ShuffleNet v2 unit: half of the channels bypass it; Concat and a shuffle mix the halves."""
    half = out // 2
    if stride == 1:
        passed, y = ((net.slice(x, 1, 0, half), net.slice(x, 1, half)) if by_slices else net.split(x, 2))
    else:
        passed = net.conv_bn(x, x.channels, 3, stride=2, groups=x.channels, name="branch1.0")
        passed, y = net.conv_bn_act(passed, half, 1, act=act, name="branch1.2"), x
    y = net.conv_bn_act(y, half, 1, act=act, name="branch2.0")
    y = net.conv_bn(y, half, 3, stride=stride, groups=half, name="branch2.3")
    y = net.conv_bn_act(y, half, 1, act=act, name="branch2.5")
    return net.channel_shuffle(net.concat([passed, y]), 2)


@architecture(size=224)
def shufflenet_v2(net: Net, x: Tensor, by_slices: bool = False, depths: tuple[int, ...] = SHUFFLE_DEPTHS) -> Tensor:
    """Build ShuffleNet v2. by_slices: halves are taken by Slice instead of Split."""
    x = net.max_pool(net.conv_bn_act(x, net.scaled(24), 3, stride=2, name="conv1"), 3, 2, 1)
    for stage, (out, depth) in enumerate(zip((116, 232, 464), depths, strict=True)):
        for block in range(depth):
            with net.scope(f"stage{stage + 2}.{block}"):
                x = shufflenet_unit(net, x, net.scaled(out), 1 if block else 2, by_slices=by_slices)
    x = net.conv_bn_act(x, net.scaled(1024), 1, name="conv5")
    return net.linear(net.mean(x, keepdims=False), net.classes, name="fc")
