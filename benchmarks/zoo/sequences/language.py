"""An LSTM language model (Zaremba et al. 2014), the large one: 1,500 units, 10,000 words, 35 steps, with state."""
from __future__ import annotations

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.sequences.recurrent import recurrent
from benchmarks.zoo.sequences.speech import dense


@network
def lstm_language_model(net: Net, vocabulary: int = 10_000, hidden: int = 1500, steps: int = 35,
                        layers: int = 2) -> dict[str, Tensor]:
    table = net.constant(net.draw(vocabulary, hidden) * 0.5, "embedding")
    x = net.op("Gather", table, net.feed("words", steps, below=vocabulary), shape=(steps, hidden), axis=0)
    outputs: dict[str, Tensor] = {}
    for layer in range(layers):
        states = tuple(net.op("Unsqueeze", net.feed(f"{kind}{layer}", hidden), net.integers(0), shape=(hidden,))
                       for kind in "hc")
        x, last = recurrent(net, "LSTM", x, hidden, name=f"rnn{layer}", states=states)
        outputs |= {f"next_{kind}{layer}": net.op("Squeeze", state, net.integers(0), shape=(hidden,))
                    for kind, state in zip("hc", last, strict=True)}
    return {"logits": dense(net, x, vocabulary, "decoder"), **outputs}
