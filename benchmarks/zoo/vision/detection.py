"""Detectors: YOLOv3-tiny, YOLOv5, NanoDet. Their outputs are the raw heads, reshaped to [batch, anchors, values]."""
from __future__ import annotations

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.vision.mobile import SHUFFLE_DEPTHS, shufflenet_unit
from benchmarks.zoo.vision.resnet import RESIDUAL_GAIN


def _rows_of_anchors(net: Net, x: Tensor) -> Tensor:
    """Reshape [values, rows, cols] to [rows * cols, values]."""
    return net.transpose(net.reshape(x, x.channels, x.shape[1] * x.shape[2]), 2, 1)


@architecture(size=416)
def yolo_tiny(net: Net, x: Tensor) -> dict[str, Tensor]:
    """Build YOLOv3-tiny: LeakyRelu, 2x2 max pooling of stride 1 padded on two sides only, nearest Resize."""
    def conv(x: Tensor, out: int, kernel: int, name: str) -> Tensor:
        return net.conv_bn_act(x, net.scaled(out), kernel, act="leaky", name=name)

    skip = x
    for index, out in enumerate((16, 32, 64, 128, 256, 512)):
        skip = conv(x, out, 3, f"conv{index}")
        x = net.max_pool(skip, 2, 2) if index < 5 else net.max_pool(skip, 2, 1, (0, 0, 1, 1))
        if index == 4:
            fine = skip
    coarse = conv(conv(x, 1024, 3, "conv6"), 256, 1, "conv7")
    up = net.resize(conv(coarse, 128, 1, "conv8"), 2)
    heads = {"coarse": conv(coarse, 512, 3, "head0"), "fine": conv(net.concat([up, fine]), 256, 3, "head1")}
    values = 3 * (5 + net.classes)
    return {name: _rows_of_anchors(net, net.conv(head, values, 1, bias=True, name=f"{name}_out"))
            for name, head in heads.items()}


def _bottleneck(net: Net, x: Tensor, joins: bool) -> Tensor:
    y = net.conv_bn_act(x, x.channels, 1, act="silu", name="cv1")
    y = net.act(net.conv_bn(y, x.channels, 3, gain=RESIDUAL_GAIN if joins else 1.0, name="cv2"), "silu")
    return net.add(x, y) if joins else y


def _csp(net: Net, x: Tensor, out: int, depth: int, name: str, *, joins: bool = True) -> Tensor:
    """Add a cross stage partial block (Wang et al. 2020): two 1x1 siblings, bottlenecks after one, Concat, 1x1."""
    with net.scope(name):
        y = net.conv_bn_act(x, out // 2, 1, act="silu", name="cv1")
        for index in range(depth):
            with net.scope(f"m.{index}"):
                y = _bottleneck(net, y, joins)
        y = net.concat([y, net.conv_bn_act(x, out // 2, 1, act="silu", name="cv2")])
        return net.conv_bn_act(y, out, 1, act="silu", name="cv3")


def _pyramid_pool(net: Net, x: Tensor, out: int, name: str, *, serial: bool) -> Tensor:
    """Concatenate 5x5, 9x9 and 13x13 max pools; serial: by repeated 5x5 pools (SPPF)."""
    with net.scope(name):
        x = net.conv_bn_act(x, x.channels // 2, 1, act="silu", name="cv1")
        pooled = [x]
        for kernel in (5, 9, 13):
            pooled.append(net.max_pool(pooled[-1], 5, 1, 2) if serial else net.max_pool(x, kernel, 1, kernel // 2))
        return net.conv_bn_act(net.concat(pooled), out, 1, act="silu", name="cv2")


@architecture(size=640)
def yolo_v5(net: Net, x: Tensor, focus: bool = True, depths: tuple[int, ...] = (1, 2, 3, 1)) -> dict[str, Tensor]:
    """Build YOLOv5n. focus: the stem slices pixels into channels (up to v5.0), else it is a 6x6 convolution."""
    widths = [net.scaled(c) for c in (16, 32, 64, 128, 256)]
    if focus:
        halves = [net.slice(x, 2, start, step=2) for start in (0, 1)]
        x = net.concat([net.slice(half, 3, start, step=2) for start in (0, 1) for half in halves])
        x = net.conv_bn_act(x, widths[0], 3, act="silu", name="focus")
    else:
        x = net.conv_bn_act(x, widths[0], 6, stride=2, pads=2, act="silu", name="stem")
    features = []
    for index, (out, depth) in enumerate(zip(widths[1:], depths, strict=True)):
        x = net.conv_bn_act(x, out, 3, stride=2, act="silu", name=f"down{index}")
        x = _csp(net, x, out, depth, f"csp{index}")
        features.append(x)
    middle, large, _ = features[1], features[2], features[3]
    x = _pyramid_pool(net, x, widths[4], "spp", serial=not focus)
    top = net.conv_bn_act(x, widths[3], 1, act="silu", name="lateral0")
    x = _csp(net, net.concat([net.resize(top, 2), large]), widths[3], 1, "up0", joins=False)
    side = net.conv_bn_act(x, widths[2], 1, act="silu", name="lateral1")
    small = _csp(net, net.concat([net.resize(side, 2), middle]), widths[2], 1, "up1", joins=False)
    x = net.conv_bn_act(small, widths[2], 3, stride=2, act="silu", name="pan0")
    medium = _csp(net, net.concat([x, side]), widths[3], 1, "out1", joins=False)
    x = net.conv_bn_act(medium, widths[3], 3, stride=2, act="silu", name="pan1")
    big = _csp(net, net.concat([x, top]), widths[4], 1, "out2", joins=False)
    outputs = {}
    for stride, head in ((8, small), (16, medium), (32, big)):
        raw = net.conv(head, 3 * (5 + net.classes), 1, bias=True, name=f"detect{stride}")
        _, rows, cols = raw.shape
        anchors = net.transpose(net.reshape(raw, 3, 5 + net.classes, rows, cols), 1, 3, 4, 2)
        outputs[f"stride{stride}"] = net.act(anchors, "sigmoid")
    return outputs


@architecture(size=416)
def nanodet(net: Net, x: Tensor, depths: tuple[int, ...] = SHUFFLE_DEPTHS) -> dict[str, Tensor]:
    """Build NanoDet: ShuffleNet v2 with LeakyRelu, a pyramid with bilinear Resize and Add, depthwise heads."""
    x = net.max_pool(net.conv_bn_act(x, net.scaled(24), 3, stride=2, act="leaky", name="conv1"), 3, 2, 1)
    features = []
    for stage, (out, depth) in enumerate(zip((116, 232, 464), depths, strict=True)):
        for block in range(depth):
            with net.scope(f"backbone.stage{stage + 2}.{block}"):
                x = shufflenet_unit(net, x, net.scaled(out), 1 if block else 2, act="leaky")
        features.append(x)
    channels = net.scaled(96)
    laterals = [net.conv(f, channels, 1, bias=True, name=f"fpn.lateral{i}") for i, f in enumerate(features)]
    for index in (1, 0):
        laterals[index] = net.add(laterals[index], net.resize(laterals[index + 1], 2, "linear"))
    for index in (1, 2):
        down = net.max_pool(laterals[index - 1], 2, 2)
        laterals[index] = net.add(laterals[index], down)
    outputs = {}
    for stride, x in zip((8, 16, 32), laterals, strict=True):
        for layer in range(2):
            with net.scope(f"head{stride}.{layer}"):
                x = net.conv_bn_act(x, channels, 3, groups=channels, act="leaky", name="depthwise")
                x = net.conv_bn_act(x, channels, 1, act="leaky", name="pointwise")
        classes = net.act(net.conv(x, net.classes, 1, bias=True, name=f"head{stride}.gfl_cls"), "sigmoid")
        outputs[f"cls_{stride}"] = _rows_of_anchors(net, classes)
        outputs[f"dis_{stride}"] = _rows_of_anchors(net, net.conv(x, 32, 1, bias=True, name=f"head{stride}.gfl_reg"))
    return outputs
