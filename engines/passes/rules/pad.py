"""Fold a Pad into the padding of the window operator after it.

    Conv(Pad(x, p, 0), pads=q) = Conv(x, pads=p + q)
    AveragePool(Pad(x, p, 0)) = AveragePool(x, pads=p, count_include_pad)
    MaxPool(Pad(x, p, v), pads=q) = MaxPool(x, pads=p + q)      if v exceeds no value of x
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from infer_server.engines.ir.graph import Graph
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.facts import moved_from, pads, spatial
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, No, P, Rule, Value

# Less than any value that a network computes: exporters write numbers such as -3.4e38 for minus infinity.
_MINUS_INFINITY = -1e30
_NEVER_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Abs", "Exp", "Sqrt", "Softplus", "Softmax")
_KEEP_SIGN = ("MaxPool", "AveragePool", "GlobalAveragePool")        # in addition to nodes that only move elements


def _image_pads(match: Match) -> tuple[int, ...] | No:
    """Return the pads of the spatial axes, begins then ends, or why the Pad cannot be folded."""
    widths = tuple(match["pad"].attrs["pads"])
    rank = len(widths) // 2
    if match["pad"].attrs.get("mode", "constant") != "constant":
        return No(f"pads by {match['pad'].attrs['mode']}")
    if any(widths[:2]) or any(widths[rank:rank + 2]):
        return No("pads the batch or the channels")
    if min(widths) < 0:
        return No("negative pads crop")
    return widths[2:rank] + widths[rank + 2:]


class _PadBefore(Rule):
    """Base of rules that add a Pad's widths to the padding of a window operator."""
    attrs: ClassVar[Mapping[str, int]] = {}         # attributes that the operator needs with these pads

    def check(self, match: Match) -> bool | No:
        added = _image_pads(match)
        return added if isinstance(added, No) else self.fits(match, added, float(match["pad"].attrs.get("value", 0)))

    def fits(self, match: Match, added: tuple[int, ...], value: float) -> bool | No:
        """Return True if the operator's own padding by `added` is equal to a Pad with `value`."""
        raise NotImplementedError

    def rewrite(self, match: Match, draft: Draft) -> None:
        added = _image_pads(match)
        assert not isinstance(added, No)
        own = pads(match.root, len(added) // 2)
        total = tuple(a + b for a, b in zip(added, own, strict=True))
        inputs = [match.value("x"), *match.root.inputs[1:]]
        draft.finish(match.root.op, inputs, {**match.root.attrs, "pads": total, **self.attrs})


class PadConv(_PadBefore):
    pattern = P("Conv", P("Pad", Value("x"), bind="pad"))

    def fits(self, match: Match, added: tuple[int, ...], value: float) -> bool | No:
        return value == 0 or No(f"pads with {value}, a convolution with 0")


class PadAveragePool(_PadBefore):
    pattern = P("AveragePool", P("Pad", Value("x"), bind="pad"))
    attrs: ClassVar[Mapping[str, int]] = {"count_include_pad": 1}

    def fits(self, match: Match, added: tuple[int, ...], value: float) -> bool | No:
        pool = match.root
        if value != 0:
            return No(f"pads with {value}, a pool with 0")
        if pool.attrs.get("ceil_mode"):
            return No("ceil_mode counts windows by the pool's own padding")
        if any(pads(pool, len(added) // 2)) and not pool.attrs.get("count_include_pad"):
            return No("the pool counts the Pad's zeros, but not its own")
        return True


class PadMaxPool(_PadBefore):
    pattern = P("MaxPool", P("Pad", Value("x"), bind="pad"))

    def fits(self, match: Match, added: tuple[int, ...], value: float) -> bool | No:
        pool, rank = match.root, len(added) // 2
        if pool.attrs.get("ceil_mode") or len(pool.outputs) > 1 or set(spatial(pool, rank, "dilations", 1)) != {1}:
            return No("ceil_mode, dilations or indices")
        total = [a + b for a, b in zip(added, pads(pool, rank), strict=True)]
        if any(pad >= kernel for pad, kernel in zip(total, (*pool.attrs["kernel_shape"],) * 2, strict=True)):
            return No("some windows would see nothing but padding")
        least = 0.0 if never_negative(match.graph, match.value("x")) else _MINUS_INFINITY
        return value <= least or No(f"pads with {value}, which may exceed the values beside it")


@dataflow
def never_negative(graph: Graph, name: str) -> Walk[bool]:
    """Return True if the nodes that compute the tensor rule out negative values."""
    node = graph.producer.get(name)
    if node is None:
        return False
    if node.op == "Clip":
        return float(node.attrs.get("min", -np.inf)) >= 0
    if sources := node.inputs if node.op in _KEEP_SIGN else moved_from(node):
        for source in sources:
            if not (yield source):
                return False
        return True
    return node.op in _NEVER_NEGATIVE
