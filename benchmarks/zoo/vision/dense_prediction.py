"""Networks whose output is an image.

U-Net (Ronneberger et al. 2015), DeepLab v3 (Chen et al. 2017), ESPCN (Shi et al. 2016), an autoencoder.
"""
from __future__ import annotations

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor


@architecture(size=256)
def unet(net: Net, x: Tensor) -> Tensor:
    """Build U-Net: transposed convolutions, Concat with the encoder's features, and a Sigmoid mask per class."""
    def double(x: Tensor, out: int, name: str) -> Tensor:
        return net.conv_bn_act(net.conv_bn_act(x, out, 3, name=f"{name}.0"), out, 3, name=f"{name}.1")

    skips = []
    for level in range(4):
        skips.append(double(x, net.scaled(32 << level), f"down{level}"))
        x = net.max_pool(skips[-1], 2, 2)
    x = double(x, net.scaled(512), "middle")
    for level in reversed(range(4)):
        x = net.conv_transpose(x, skips[level].channels, 2, name=f"up{level}.transpose")
        x = double(net.concat([x, skips[level]]), skips[level].channels, f"up{level}")
    return net.act(net.conv(x, net.classes, 1, bias=True, name="mask"), "sigmoid")


@architecture(size=256)
def deeplab(net: Net, x: Tensor) -> Tensor:
    """Build DeepLab v3: dilated convolutions, an image-level branch broadcast to all pixels, linear Resize by 8."""
    for index, out in enumerate((32, 64, 128)):
        x = net.conv_bn_act(x, net.scaled(out), 3, stride=2, name=f"stem{index}")
    for index, dilation in enumerate((2, 4)):
        y = net.conv_bn(x, x.channels, 3, dilation=dilation, gain=0.5, name=f"dilated{index}")
        x = net.act(net.add(x, y), "relu")
    out = net.scaled(64)
    branches = [net.conv_bn_act(x, out, 1, name="aspp0")]
    branches += [net.conv_bn_act(x, out, 3, dilation=d, name=f"aspp{d}") for d in (3, 6)]
    pooled = net.act(net.conv(net.mean(x, keepdims=True), out, 1, bias=True, name="aspp_pool"), "relu")
    spread = net.op("Expand", pooled, net.integers(1, 1, *x.shape[1:]), shape=(out, *x.shape[1:]))
    x = net.conv_bn_act(net.concat([*branches, spread]), out, 1, name="project")
    return net.resize(net.conv(x, net.classes, 1, bias=True, name="classifier"), 8, "linear")


@architecture(size=64, channels=1)
def super_resolution(net: Net, x: Tensor, scale: int = 2) -> Tensor:
    """Build ESPCN, whose only upsampling is DepthToSpace."""
    for index, (out, kernel) in enumerate(((64, 5), (64, 3), (32, 3))):
        x = net.act(net.conv(x, net.scaled(out), kernel, bias=True, name=f"conv{index}"), "tanh" if index else "prelu")
    x = net.conv(x, scale * scale, 3, bias=True, name="conv3")
    shape = (1, x.shape[1] * scale, x.shape[2] * scale)
    mode = {"mode": "CRD"} if net.opset >= 11 else {}
    return net.op("DepthToSpace", x, shape=shape, blocksize=scale, **mode)


@architecture(size=64)
def decoder(net: Net, x: Tensor) -> Tensor:
    """Build an autoencoder: strided convolutions down, transposed ones up (4x4, and 3x3 with output padding)."""
    x = net.conv_bn_act(net.conv_bn_act(x, net.scaled(32), 3, stride=2, name="down0"), net.scaled(64), 3, stride=2,
                        name="down1")
    x = net.bn_act(net.conv_transpose(x, net.scaled(32), 4, pads=1, name="up0"), name="up0_bn")
    x = net.conv_transpose(x, 3, 3, pads=1, output_padding=1, name="up1")
    return net.act(x, "tanh")
