"""Generator of a DCGAN (Radford et al. 2016): transposed convolutions from 100 numbers to a picture."""
from __future__ import annotations

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor


@network
def dcgan(net: Net, latent: int = 100) -> Tensor:
    x = net.feed("latent", latent, 1, 1)
    for index, out in enumerate((1024, 512, 256, 128)):
        x = net.conv_transpose(x, net.scaled(out), 4, stride=2 if index else 1, pads=1 if index else 0,
                               name=f"up{index}")
        x = net.bn_act(x, name=f"up{index}_bn")
    return net.act(net.conv_transpose(x, 3, 4, pads=1, name="picture"), "tanh")
