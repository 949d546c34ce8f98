"""A Pad before a window operator becomes its own padding.

    Conv(Pad(x, p, 0), pads=q) = Conv(x, pads=p + q)
    AveragePool(Pad(x, p, 0)) = AveragePool(x, pads=p, count_include_pad)
    MaxPool(Pad(x, p, v), pads=q) = MaxPool(x, pads=p + q)      if v never exceeds what the window holds of x
"""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Graph
from engines.passes.rewriting.facts import moved_from, pads, spatial
from engines.passes.rewriting.rewrite import Draft, Match, No, P, Rule, Value

# Below any value that a network computes: exporters write numbers like -3.4e38 where they mean minus infinity.
_MINUS_INFINITY = -1e30
_NEVER_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Abs", "Exp", "Sqrt", "Softplus", "Softmax")
_KEEP_SIGN = ("MaxPool", "AveragePool", "GlobalAveragePool")        # beside what only moves elements


def _image_pads(match: Match) -> tuple[int, ...] | No:
    """What the Pad adds before each spatial axis, then after each."""
    widths = tuple(match["pad"].attrs["pads"])
    rank = len(widths) // 2
    if match["pad"].attrs.get("mode", "constant") != "constant":
        return No(f"pads by {match['pad'].attrs['mode']}")
    if any(widths[:2]) or any(widths[rank:rank + 2]):
        return No("pads the batch or the channels")
    if min(widths) < 0:
        return No("negative pads crop")
    return widths[2:rank] + widths[rank + 2:]


def _value(match: Match) -> float:
    return float(match["pad"].attrs.get("value", 0))


def _finish(match: Match, draft: Draft, **attrs: int) -> None:
    added = _image_pads(match)
    assert not isinstance(added, No)
    own = pads(match.root, len(added) // 2)
    total = tuple(a + b for a, b in zip(added, own, strict=True))
    inputs = [match.value("x"), *match.root.inputs[1:]]
    draft.finish(match.root.op, inputs, {**match.root.attrs, "pads": total, **attrs})


class PadConv(Rule):
    pattern = P("Conv", P("Pad", Value("x"), bind="pad"))

    def check(self, match: Match) -> bool | No:
        added = _image_pads(match)
        if isinstance(added, No):
            return added
        return True if _value(match) == 0 else No(f"pads with {_value(match)}, a convolution with 0")

    def rewrite(self, match: Match, draft: Draft) -> None:
        _finish(match, draft)


class PadAveragePool(Rule):
    pattern = P("AveragePool", P("Pad", Value("x"), bind="pad"))

    def check(self, match: Match) -> bool | No:
        added, pool = _image_pads(match), match.root
        if isinstance(added, No):
            return added
        if _value(match) != 0:
            return No(f"pads with {_value(match)}, a pool with 0")
        if pool.attrs.get("ceil_mode"):
            return No("ceil_mode counts windows by the pool's own padding")
        if any(pads(pool, len(added) // 2)) and not pool.attrs.get("count_include_pad"):
            return No("the pool counts the Pad's zeros, but not its own")
        return True

    def rewrite(self, match: Match, draft: Draft) -> None:
        _finish(match, draft, count_include_pad=1)


class PadMaxPool(Rule):
    pattern = P("MaxPool", P("Pad", Value("x"), bind="pad"))

    def check(self, match: Match) -> bool | No:
        added, pool = _image_pads(match), match.root
        if isinstance(added, No):
            return added
        rank = len(added) // 2
        if pool.attrs.get("ceil_mode") or len(pool.outputs) > 1 or set(spatial(pool, rank, "dilations", 1)) != {1}:
            return No("ceil_mode, dilations or indices")
        total = [a + b for a, b in zip(added, pads(pool, rank), strict=True)]
        if any(pad >= kernel for pad, kernel in zip(total, (*pool.attrs["kernel_shape"],) * 2, strict=True)):
            return No("some windows would see nothing but padding")
        least = 0.0 if never_negative(match.graph, match.value("x")) else _MINUS_INFINITY
        return _value(match) <= least or No(f"pads with {_value(match)}, which may exceed the values beside it")

    def rewrite(self, match: Match, draft: Draft) -> None:
        _finish(match, draft)


def never_negative(graph: Graph, name: str) -> bool:
    """Whether no value of the tensor can be below zero, by what makes it."""
    node = graph.producer.get(name)
    if node is None:
        return False
    if node.op == "Clip":
        return float(node.attrs.get("min", -np.inf)) >= 0
    if sources := node.inputs if node.op in _KEEP_SIGN else moved_from(node):
        return all(never_negative(graph, name) for name in sources)
    return node.op in _NEVER_NEGATIVE
