"""Speech: Deep Speech 2 (Amodei et al. 2016), and one step of an RNN-T's decoder (Graves 2012) as MLPerf has it."""
from __future__ import annotations

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.sequences.recurrent import recurrent

LETTERS = 29
LOUDEST = 20.0          # upper limit of the convolutions' activations


@network
def deep_speech2(net: Net, steps: int = 300, bands: int = 161, hidden: int = 800, layers: int = 5) -> Tensor:
    """Map a spectrogram to letter probabilities at each second step, by convolutions and bidirectional GRUs."""
    x = net.feed("spectrogram", 1, bands, steps)
    for index, (kernel, stride, pads) in enumerate((((41, 11), (2, 2), (20, 5)), ((21, 11), (2, 1), (10, 5)))):
        x = _strided(net, x, net.scaled(32), kernel, stride, pads, f"conv{index}")
        x = net.clip(net.bn(x, shift=1.5, name=f"conv{index}_bn"), 0, LOUDEST)
    channels, rows, columns = x.shape
    x = net.transpose(net.reshape(x, channels * rows, columns), 2, 1)
    for layer in range(layers):
        if layer:
            swapped = net.transpose(x, 2, 1)
            x = net.transpose(net.bn(swapped, name=f"rnn{layer}_bn"), 2, 1)
        x, _ = recurrent(net, "GRU", x, hidden, name=f"rnn{layer}", both_ways=True)
    logits = dense(net, x, LETTERS, "letters")
    return net.op("Softmax", logits, shape=logits.shape, axis=2)


def _strided(net: Net, x: Tensor, out: int, kernel: tuple[int, int], stride: tuple[int, int], pads: tuple[int, int],
             name: str) -> Tensor:
    """Add a convolution with a stride for each axis."""
    with net.scope(name):
        fan_in = x.channels * kernel[0] * kernel[1]
        weight = net.constant(net.draw(out, x.channels, *kernel) * (2 / fan_in) ** 0.5, "weight")
        extents = ((extent + 2 * pad - k) // s + 1
                   for extent, pad, k, s in zip(x.shape[1:], pads, kernel, stride, strict=True))
        return net.op("Conv", x, weight, shape=(out, *extents), kernel_shape=list(kernel), strides=list(stride),
                      pads=[*pads, *pads])


def dense(net: Net, x: Tensor, out: int, name: str) -> Tensor:
    """Compute x W + b at each step."""
    with net.scope(name):
        weight = net.constant(net.draw(x.shape[-1], out) / x.shape[-1] ** 0.5, "weight")
        y = net.op("MatMul", x, weight, shape=(*x.shape[:-1], out))
        return net.add(y, net.constant(net.draw(out) * 0.1, "bias"))


@network
def rnnt_decoder(net: Net, features: int = 1024, hidden: int = 320, joint: int = 512) -> dict[str, Tensor]:
    """Map an encoder frame, the last letter and the states of two LSTMs to the next letter's logits and new states."""
    frame = net.feed("frame", 1, features)
    table = net.constant(net.draw(LETTERS, hidden) * 0.5, "embedding")
    x = net.op("Gather", table, net.feed("letter", 1, below=LETTERS), shape=(1, hidden), axis=0)
    outputs: dict[str, Tensor] = {}
    for layer in range(2):
        states = tuple(_before(net, net.feed(f"{kind}{layer}", hidden)) for kind in "hc")
        x, last = recurrent(net, "LSTM", x, hidden, name=f"prediction{layer}", states=states)
        outputs |= {f"next_{kind}{layer}": net.op("Squeeze", state, net.integers(0), shape=(hidden,))
                    for kind, state in zip("hc", last, strict=True)}
    both = net.op("Concat", frame, x, shape=(1, features + hidden), axis=2)
    letters = dense(net, net.act(dense(net, both, joint, "joint0"), "relu"), LETTERS, "joint1")
    return {"logits": letters, **outputs}


def _before(net: Net, state: Tensor) -> Tensor:
    """Reshape [batch, hidden] to [1, batch, hidden]."""
    return net.op("Unsqueeze", state, net.integers(0), shape=state.shape)
