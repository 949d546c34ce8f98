"""3D U-Net (Cicek et al. 2016) as in MLPerf's kidney segmentation.

Instance norms, strided convolutions down, and transposed ones up.
"""
from __future__ import annotations

import math

import numpy as np

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor


@network
def unet3d(net: Net, size: int = 128, filters: tuple[int, ...] = (32, 64, 128, 256, 320)) -> Tensor:
    x, skips = net.feed("volume", 1, size, size, size), []
    for level, out in enumerate(map(net.scaled, filters)):
        x = _block(net, _block(net, x, out, 2 if level else 1, f"down{level}.0"), out, 1, f"down{level}.1")
        skips.append(x)
    for level in reversed(range(len(skips) - 1)):
        skip = skips[level]
        x = _up(net, x, skip.channels, f"up{level}.transpose")
        x = net.op("Concat", x, skip, shape=(2 * skip.channels, *skip.shape[1:]), axis=1)
        x = _block(net, _block(net, x, skip.channels, 1, f"up{level}.0"), skip.channels, 1, f"up{level}.1")
    return _conv(net, x, net.classes, 1, 1, "segments")


def _conv(net: Net, x: Tensor, out: int, kernel: int, stride: int, name: str) -> Tensor:
    with net.scope(name):
        fan_in = x.channels * kernel ** 3
        weight = net.draw(out, x.channels, *[kernel] * 3) * np.float32(math.sqrt(2 / fan_in))
        shape = (out, *((extent + 2 * (kernel // 2) - kernel) // stride + 1 for extent in x.shape[1:]))
        return net.op("Conv", x, net.constant(weight, "weight"), shape=shape, kernel_shape=[kernel] * 3,
                      pads=[kernel // 2] * 6, strides=[stride] * 3)


def _block(net: Net, x: Tensor, out: int, stride: int, name: str) -> Tensor:
    x = _conv(net, x, out, 3, stride, name)
    with net.scope(f"{name}.norm"):
        scale = net.constant(1 + net.draw(out) * 0.2, "weight")
        x = net.op("InstanceNormalization", x, scale, net.constant(0.5 + net.draw(out) * 0.2, "bias"), shape=x.shape)
    return net.act(x, "relu")


def _up(net: Net, x: Tensor, out: int, name: str) -> Tensor:
    with net.scope(name):
        weight = net.draw(x.channels, out, 2, 2, 2) / np.float32(math.sqrt(x.channels))
        return net.op("ConvTranspose", x, net.constant(weight, "weight"),
                      shape=(out, *(2 * extent for extent in x.shape[1:])), kernel_shape=[2] * 3, strides=[2] * 3)
