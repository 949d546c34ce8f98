"""Small networks, each with one construct that is hard for compilers."""
from __future__ import annotations

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor

ACTIVATIONS = ("relu", "relu6", "leaky", "prelu", "sigmoid", "tanh", "elu", "silu", "hardsigmoid",
               "hardswish_by_hardsigmoid", "hardswish_by_clip", "softplus", "mish", "gelu")


@architecture(size=64)
def explicit_pads(net: Net, x: Tensor) -> Tensor:
    """Build TensorFlow's "SAME" at stride 2: an asymmetric Pad before convolutions and pools without pads."""
    x = net.conv_bn_act(net.pad(x, (0, 0, 1, 1)), net.scaled(32), 3, stride=2, pads=0, act="relu6", name="conv0")
    x = net.conv_bn_act(net.pad(x, (0, 0, 1, 1)), x.channels, 3, stride=2, pads=0, groups=x.channels, act="relu6",
                        name="depthwise")
    x = net.max_pool(net.pad(x, (0, 0, 1, 1)), 3, 2)                        # zeros are neutral: x >= 0
    x = net.conv_bn_act(net.pad(x, 1, value=0.5), net.scaled(64), 3, pads=0, name="conv1")    # a Conv pads with zeros
    x = net.conv_bn_act(net.pad(x, 1), net.scaled(64), 3, pads=1, name="conv2")               # pads twice
    return net.classify(x)


@architecture(size=32)
def odd_channels(net: Net, x: Tensor) -> Tensor:
    """Build layers with odd channel counts; `width` does not apply."""
    for index, (out, kernel, stride) in enumerate(((7, 3, 1), (13, 5, 2), (33, 1, 1), (17, 3, 2), (65, 3, 1))):
        x = net.conv_bn_act(x, out, kernel, stride=stride, name=f"conv{index}")
    x = net.conv_bn_act(x, 130, 3, groups=13, name="grouped") if x.channels % 13 == 0 else x
    x = net.conv_bn_act(x, 2 * x.channels, 3, groups=x.channels, name="depth_multiplier_2")
    return net.classify(x)


@architecture(size=32)
def activations(net: Net, x: Tensor, kinds: tuple[str, ...] = ACTIVATIONS) -> Tensor:
    """Build a chain of convolutions, each followed by another kind of activation."""
    for kind in kinds:
        x = net.conv_bn_act(x, net.scaled(16), 3, act=kind, name=kind)
    return net.classify(x)


@architecture(size=32)
def pointwise(net: Net, x: Tensor) -> Tensor:
    """Build scales and shifts by constants of several shapes, in both operand orders, with shared values."""
    x = net.conv(x, net.scaled(16), 3, bias=True, name="conv0")
    per_channel = net.constant(net.draw(x.channels, 1, 1), "scale")
    scaled = net.add(net.mul(x, per_channel), net.scalar(0.5))
    halved = net.op("Div", net.op("Sub", scaled, net.scalar(0.25), shape=x.shape), net.scalar(2.0), shape=x.shape)
    flipped = net.op("Sub", net.scalar(1.0), halved, shape=x.shape)         # 1 - x: not x - 1
    powers = net.op("Sqrt", net.add(net.op("Abs", flipped, shape=x.shape), net.scalar(1.0)), shape=x.shape)
    least = net.op("Min", powers, scaled, shape=x.shape)
    most = net.op("Max", least, net.op("Neg", halved, shape=x.shape), shape=x.shape)
    gate = net.act(net.global_avg_pool(most), "sigmoid")                    # broadcast over the pixels
    x = net.add(net.mul(most, gate), net.op("Exp", net.clip(flipped, -2, 1), shape=x.shape))
    return net.classify(net.conv_bn_act(x, net.scaled(32), 3, stride=2, name="conv1"))


@architecture(size=32)
def shared_readers(net: Net, x: Tensor) -> dict[str, Tensor]:
    """Build siblings that may and may not be merged, an inner tensor that is an output, a duplicate, and no-ops."""
    x = net.conv_bn_act(x, net.scaled(32), 3, stride=2, name="stem")
    siblings = [net.conv_bn_act(x, net.scaled(out), 1, act=act, name=f"sibling{index}")
                for index, (out, act) in enumerate(((32, "relu"), (16, "relu6"), (64, None)))]
    strided = net.conv_bn_act(x, net.scaled(32), 1, stride=2, name="strided")
    wide = net.conv_bn_act(x, net.scaled(32), 3, name="wide")
    twins = [net.act(wide, "sigmoid") for _ in range(2)]
    same = net.op("Identity", net.dropout(net.mul(*twins)), shape=wide.shape)
    y = net.conv_bn_act(net.concat([*siblings, same]), net.scaled(32), 3, stride=2, name="join")
    y = net.act(net.add(net.add(y, strided), y), "relu")
    return {"inner": siblings[0], "logits": net.classify(y)}


@architecture(size=32)
def views(net: Net, x: Tensor) -> Tensor:
    """Build Concat of a tensor with itself and with shared tensors, Slice of a slice, Split, nested Concat."""
    x = net.conv_bn_act(x, net.scaled(32, 8), 3, name="stem")
    a, b = net.split(net.conv_bn_act(x, x.channels, 1, name="conv0"), 2)
    inner = net.slice(net.slice(x, 1, 4), 1, 0, x.channels // 2)
    cropped = net.slice(net.slice(inner, 2, 1, -1), 3, 2, step=2) if net.opset >= 10 else None
    y = net.concat([a, net.concat([b, inner]), a])
    y = net.conv_bn_act(y, net.scaled(32), 3, stride=2, name="conv1")
    if cropped is not None:
        z = net.conv_bn_act(cropped, y.channels, 3, name="conv2")
        y = net.concat([net.global_avg_pool(y), net.global_avg_pool(z)])
        return net.linear(net.flatten(y), net.classes, name="fc")
    return net.classify(y)


@architecture(size=32)
def layout_traps(net: Net, x: Tensor) -> Tensor:
    """Build a layout-dependent Flatten before Gemm, MatMul and Add as a layer, LRN and Softmax."""
    x = net.max_pool(net.lrn(net.conv_bn_act(x, net.scaled(16), 5, stride=2, name="conv0")), 3, 2, 1)
    x = net.conv_bn_act(x, net.scaled(24), 3, stride=2, name="conv1")
    x = net.act(net.linear(net.flatten_by_shape(x), net.scaled(64), name="fc0"), "relu")
    weight = net.constant(net.draw(x.channels, net.classes) / 8, "fc1.weight")
    x = net.op("MatMul", x, weight, shape=(net.classes,))
    return net.softmax(net.op("Add", net.constant(net.draw(net.classes), "fc1.bias"), x, shape=x.shape))
