"""Recurrent layers of [batch, steps, features] as exporters write them: time comes first inside."""
from __future__ import annotations

import math
from typing import Any

from benchmarks.zoo.builder import Net, Tensor

GATES = {"LSTM": 4, "GRU": 3}


def recurrent(net: Net, kind: str, x: Tensor, hidden: int, *, name: str, both_ways: bool = False,
              states: tuple[Tensor, ...] = ()) -> tuple[Tensor, list[Tensor]]:
    """Add a recurrent layer; return its outputs at all steps and its last states, [1, batch, hidden] each.

    The outputs of a bidirectional layer are the sum of both directions.
    """
    steps, features = x.shape
    ways = 2 if both_ways else 1
    with net.scope(name):
        weights = [net.constant(net.draw(ways, GATES[kind] * hidden, rows) / math.sqrt(rows), key)
                   for rows, key in ((features, "weight_ih"), (hidden, "weight_hh"))]
        bias = net.constant(net.draw(ways, 2 * GATES[kind] * hidden) * 0.1, "bias")
        by_time = net.op("Transpose", x, shape=x.shape, perm=[1, 0, 2])
        extra: dict[str, Any] = {"direction": "bidirectional"} if both_ways else {}
        extra |= {"linear_before_reset": 1} if kind == "GRU" else {}
        optional: list[Tensor | str] = ["", *states] if states else []
        every, *last = net.ops(kind, by_time, *weights, bias, *optional,
                               shapes=[(steps, hidden)] * (3 if kind == "LSTM" else 2), hidden_size=hidden, **extra)
        axis = net.integers(1)
        hidden_states = (net.op("ReduceSum", every, axis, shape=(steps, hidden), keepdims=0) if both_ways else
                         net.op("Squeeze", every, axis, shape=(steps, hidden)))
        return net.op("Transpose", hidden_states, shape=(steps, hidden), perm=[1, 0, 2]), last
