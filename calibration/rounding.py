"""Rounding of int8 weights by the error of the layer's output instead of each weight's own error.

    minimise  |(W' - W) X|^2  =  trace((W' - W) H (W' - W)^T)       H = X X^T over the calibration data

Weights are rounded one input after the other; the error of each is taken back by the weights that are still float, as
far as their inputs are correlated (GPTQ: Frantar et al., "Accurate Post-Training Quantization for Generative
Pre-trained Transformers", ICLR 2023; the closed form of OBQ). The largest weight of a channel keeps its value, so that
the scale stays. If the bias takes back the mean error (bias_correction.py), H is the covariance.

Nothing is trained: the result follows from H, which is a sum over the first items.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.calibration.histogram import Floats
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.recipe import packed_steps
from infer_server.engines.ops.window import Window
from infer_server.engines.passes.quantization.bias_correction import is_correctable
from infer_server.engines.passes.quantization.quantize import contractions, nearest_steps, weight_params
from infer_server.engines.passes.rewriting.facts import output_axis

MOST_ITEMS = 64         # items that H is summed over
ROWS = 128              # rows of X taken of each item, evenly spaced
DEEPEST = 2304          # most inputs of an output channel: H and its inverse grow with the square and the cube
LEAST_ROWS = 8          # least rows of X for each input: with fewer the rounding fits these rows alone
MOST_BYTES = 1 << 30    # bytes of all H: layers beyond are rounded to the nearest
DAMPING = 0.01          # share of H's mean diagonal that is added to it
LIMIT = 127             # largest int8 weight
BLOCK = 64              # inputs whose errors are applied to later blocks at once


@dataclass
class _Moments:
    """Sums over rows: of x x^T [groups, K, K], of x [groups, K], and their number."""
    node: Node
    squares: Array | None = None
    sums: Array | None = None
    rows: int = 0

    def add(self, rows: Array) -> None:
        """Add rows, float32 [rows, groups, K]."""
        by_group = np.ascontiguousarray(rows.transpose(1, 0, 2))
        squares, sums = by_group.transpose(0, 2, 1) @ by_group, by_group.sum(axis=1, dtype=np.float64)
        self.squares = squares.astype(np.float64) if self.squares is None else self.squares + squares
        self.sums = sums if self.sums is None else self.sums + sums
        self.rows += len(rows)


class SecondMoments:
    """Collector of the second moments of what the contractions of a graph read."""

    def __init__(self, graph: Graph) -> None:
        self._moments: dict[str, dict[tuple[object, ...], _Moments]] = {}
        self._keys: dict[str, tuple[str, tuple[object, ...]]] = {}
        size = 0
        for node in contractions(graph, ()):
            if _is_roundable(graph, node):
                tensor, key = node.anchor.inputs[0], _key(graph, node)
                if key not in (known := self._moments.setdefault(tensor, {})):
                    if size + (needed := _bytes_of(graph, node)) > MOST_BYTES:
                        continue
                    size += needed
                    known[key] = _Moments(node.anchor)
                self._keys[node.outputs[0]] = tensor, key

    def observe(self, tensor: str, items: Iterable[Array]) -> None:
        """Add the values of a tensor, an array for each item with the batch axis first or without it."""
        if tensor in self._moments:
            for item in items:
                for moments in self._moments[tensor].values():
                    moments.add(_rows(moments.node, item))

    def of(self, output: str, centred: bool) -> Floats | None:
        """Return H [groups, K, K] of the contraction that makes `output`; its covariance if `centred`.

        None if there are too few rows, or if values are so large that their squares are not finite.
        """
        tensor, key = self._keys.get(output, ("", ()))
        moments = self._moments.get(tensor, {}).get(key)
        if moments is None or moments.squares is None or moments.sums is None:
            return None
        if moments.rows < LEAST_ROWS * moments.sums.shape[-1]:
            return None
        mean = moments.sums / moments.rows
        if not np.isfinite(moments.squares).all():
            return None
        squares = np.asarray(moments.squares / moments.rows, np.float64)
        return squares - mean[:, :, None] * mean[:, None, :] if centred else squares


def roundings(graph: Graph, moments: SecondMoments, factors: Mapping[str, Sequence[float]], centred: bool,
              progress: Callable[[int, int, str], None]) -> dict[str, str]:
    """Return by output of a contraction how far its int8 weights lie from the nearest ones, see `packed_steps`.

    Parameters
    ----------
    graph : Graph
        The optimised float graph, smoothed.
    moments : SecondMoments
        Of the graph without smoothing.
    factors : mapping of str to floats
        Factors of smoothing by tensor, [K].
    centred : bool
        Biases take back mean errors where they can.
    progress : callable
        Called with (done, of, node).
    """
    nodes = [node for node in contractions(graph, ()) if _is_roundable(graph, node)]
    found: dict[str, str] = {}
    for number, node in enumerate(nodes):
        progress(number, len(nodes), node.name)
        hessian = moments.of(node.outputs[0], centred and is_correctable(graph, node.anchor))
        if hessian is None:
            continue
        if (factor := factors.get(node.anchor.inputs[0])) is not None:
            share = np.repeat(np.reshape(factor, (len(hessian), -1)), hessian.shape[1] * len(hessian) // len(factor),
                              axis=1)       # [groups, K]: a factor for all taps of its channel
            hessian = hessian / (share[:, :, None] * share[:, None, :])
        weight, axis = graph.constants[node.anchor.inputs[1]], output_axis(node)
        quant = weight_params(weight, axis)
        rows = np.moveaxis(weight, axis, 0)
        scales = np.array(quant.scale, np.float64).reshape(-1, *[1] * (rows.ndim - 1))
        steps = rounded((rows / scales).reshape(len(hessian), -1, hessian.shape[-1]), hessian)
        whole = np.moveaxis(steps.reshape(rows.shape), 0, axis)
        found[node.outputs[0]] = packed_steps((whole - nearest_steps(weight, quant)).astype(np.int8))
    return found


def rounded(weight: Array, hessian: Floats) -> Floats:
    """Round weights in units of their scales to integers of least output error; the largest of each row stays.

    weight: [groups, outputs, K], the largest magnitude of a row 127. hessian: float64 [groups, K, K].
    """
    depth = hessian.shape[-1]
    order = np.argsort(-np.diagonal(hessian, axis1=1, axis2=2), axis=1, kind="stable")      # [groups, K]
    left = np.take_along_axis(np.asarray(weight, np.float64), order[:, None, :], axis=2)
    largest = np.abs(left).argmax(axis=2)
    kept = np.rint(np.take_along_axis(left, largest[:, :, None], axis=2))[:, :, 0]
    matrix = np.take_along_axis(np.take_along_axis(hessian, order[:, :, None], axis=1), order[:, None, :], axis=2)
    means = np.trace(matrix, axis1=1, axis2=2) / depth
    matrix[:, range(depth), range(depth)] += np.where(means > 0, DAMPING * means, 1)[:, None]
    factor = np.linalg.cholesky(np.linalg.inv(matrix)).transpose(0, 2, 1)       # U^T U is the inverse
    result = np.empty_like(left)
    for start in range(0, depth, BLOCK):
        stop = min(start + BLOCK, depth)
        errors = np.empty((*left.shape[:2], stop - start))
        for i in range(start, stop):
            step = np.clip(np.rint(left[:, :, i]), -LIMIT, LIMIT)
            result[:, :, i] = step = np.where(largest == i, kept, step)
            errors[:, :, i - start] = error = (left[:, :, i] - step) / factor[:, i, i, None]
            left[:, :, i + 1:stop] -= error[:, :, None] * factor[:, i, None, i + 1:stop]
        left[:, :, stop:] -= errors @ factor[:, start:stop, stop:]
    np.put_along_axis(left, order[:, None, :] + np.zeros_like(largest)[:, :, None], result, axis=2)
    return left


# ---- rows of X
def _is_roundable(graph: Graph, node: Node) -> bool:
    """Return True for a contraction whose weights only it reads, of at most DEEPEST inputs."""
    anchor = node.anchor
    weight = graph.constants[anchor.inputs[1]]
    if anchor.op not in ("Conv", "Gemm", "MatMul") or anchor.attrs.get("transA"):
        return False
    return len(graph.consumers[anchor.inputs[1]]) == 1 and weight.size // weight.shape[output_axis(node)] <= DEEPEST


def _bytes_of(graph: Graph, node: Node) -> int:
    """Return the bytes of H, float64 [groups, K, K]."""
    weight, groups = graph.constants[node.anchor.inputs[1]], node.anchor.attrs.get("group", 1)
    depth = weight.size // weight.shape[output_axis(node)]
    return int(groups * depth ** 2 * 8)


def _key(graph: Graph, node: Node) -> tuple[object, ...]:
    """Return what, beside the tensor, the rows of a contraction depend on."""
    anchor = node.anchor
    if anchor.op != "Conv":
        return ()
    rank = len(graph.shape(anchor.inputs[0])) - 2
    return Window.of(anchor, rank), anchor.attrs.get("group", 1)


def _rows(anchor: Node, item: Array) -> Array:
    """Return at most ROWS rows of what a contraction reads of an item, float32 [rows, groups, K]."""
    if anchor.op != "Conv":
        rows = item.reshape(-1, item.shape[-1])
        return rows[_places(len(rows))][:, None, :].astype(np.float32)
    image = item.reshape(-1, *item.shape[-len(anchor.attrs["kernel_shape"]) - 1:])[0]      # without the batch axis
    image = image if anchor.attrs.get("channels_last") else np.moveaxis(image, 0, -1)
    window, group = Window.of(anchor, image.ndim - 1), anchor.attrs.get("group", 1)
    sizes = image.shape[:-1]
    outputs = window.outputs(sizes)
    chosen = np.unravel_index(_places(int(np.prod(outputs))), outputs)
    taps = []
    for tap in np.ndindex(*window.kernel):
        at = [place * stride + t * dilation - before for place, stride, t, dilation, (before, _) in zip(
            chosen, window.strides, tap, window.dilations, window.pads, strict=True)]
        inside = np.all([(a >= 0) & (a < size) for a, size in zip(at, sizes, strict=True)], axis=0)
        values = image[tuple(np.clip(a, 0, size - 1) for a, size in zip(at, sizes, strict=True))]
        taps.append(np.where(inside[:, None], values, 0))
    rows = np.stack(taps, axis=-1)          # [rows, C, taps]
    return rows.reshape(len(rows), group, -1).astype(np.float32)


def _places(count: int) -> Array:
    """Return at most ROWS indices below `count`, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, ROWS)).astype(np.intp))
