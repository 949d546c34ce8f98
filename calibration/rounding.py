"""Rounding of int8 weights by the error of the layer's output instead of each weight's own error.

    minimise  |(W' - W) X|^2  =  trace((W' - W) H (W' - W)^T)       H = X X^T over the calibration data

Weights are rounded one input after the other; the error of each is taken back by the weights that are still float, as
far as their inputs are correlated (GPTQ: Frantar et al., "Accurate Post-Training Quantization for Generative
Pre-trained Transformers", ICLR 2023; the closed form of OBQ). The largest weight of a channel keeps its value, so that
the scale stays. If the bias takes back the mean error (bias_correction.py), H is the covariance.

Nothing is trained: the result follows from H, which is a sum over the first items.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

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
DEEPEST = 2304          # most inputs of an output channel: H grows with the square, its factorisation with the cube
LEAST_ROWS = 2          # least rows of X for each input: with fewer the rounding fits these rows alone
MOST_BYTES = 1 << 30    # bytes of all H: layers beyond are rounded to the nearest
DAMPING = 0.01          # share of H's mean diagonal that is added to it
LIMIT = 127             # largest int8 weight
BLOCK = 64              # inputs whose errors are applied to later blocks at once


class _Moments:
    """Sums over rows of what a contraction reads: of x x^T [groups, K, K], of x [groups, K], and their number.

    K is in the order [taps, channels] here, in which rows are contiguous in an image. Rows wait until there are enough
    for one matrix product.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self._anchor = node.anchor
        self._groups, self._channels, self._taps = _extents(graph, node)
        self._waiting: list[Array] = []
        self._waits = 0
        self._squares = np.zeros((self._groups, self.depth, self.depth))
        self._sums = np.zeros((self._groups, self.depth))
        self.rows = 0

    @property
    def depth(self) -> int:
        """Number of inputs of an output channel, K."""
        return self._channels * self._taps

    def add(self, item: Array) -> None:
        """Add at most ROWS rows of an item."""
        rows = _rows(self._anchor, item)
        self._waiting.append(rows)
        self._waits += len(rows)
        self.rows += len(rows)
        if self._waits >= _most_waiting(self.depth):
            self._multiply()

    def _multiply(self) -> None:
        if self._waiting:
            rows = np.concatenate(self._waiting).reshape(self._waits, self._taps, self._groups, self._channels)
            by_group = rows.transpose(2, 0, 1, 3).reshape(self._groups, self._waits, self.depth)
            self._squares += by_group.transpose(0, 2, 1) @ by_group
            self._sums += by_group.sum(axis=1)
            self._waiting, self._waits = [], 0

    def hessian(self, centred: bool) -> Floats | None:
        """Return the mean of x x^T, or the covariance, with K in the order [channels, taps] of weights.

        None if values are so large that their squares are not finite.
        """
        self._multiply()
        if not np.isfinite(self._squares).all():
            return None
        mean, squares = self._sums / self.rows, self._squares / self.rows
        if centred:
            squares -= mean[:, :, None] * mean[:, None, :]
        taps_first = squares.reshape(self._groups, self._taps, self._channels, self._taps, self._channels)
        return np.asarray(taps_first.transpose(0, 2, 1, 4, 3).reshape(squares.shape), np.float64)


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
                    known[key] = _Moments(graph, node)
                self._keys[node.outputs[0]] = tensor, key

    def observe(self, tensor: str, items: Iterable[Array]) -> None:
        """Add the values of a tensor, an array for each item with the batch axis first or without it."""
        if tensor in self._moments:
            for item in items:
                for moments in self._moments[tensor].values():
                    moments.add(item)

    def of(self, output: str, centred: bool) -> Floats | None:
        """Return H [groups, K, K] of the contraction that makes `output`; its covariance if `centred`.

        None if there are too few rows, or if values are so large that their squares are not finite.
        """
        tensor, key = self._keys.get(output, ("", ()))
        moments = self._moments.get(tensor, {}).get(key)
        if moments is None or moments.rows < LEAST_ROWS * moments.depth:
            return None
        return moments.hessian(centred)


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


def rounded(weight: Array, hessian: Floats) -> Array:
    """Round weights in units of their scales to integers of least output error; the largest of each row stays.

    With H = V V^T, V upper triangular, the error of an output is |(W' - W) V|^2. Its element i depends on weights up to
    i alone, and weight i brings it as near to 0 as an integer can (Babai's nearest plane, which equals GPTQ).

    Parameters
    ----------
    weight : array, [groups, outputs, K]
        The largest magnitude of a row is 127.
    hessian : array, float64 [groups, K, K]

    Returns
    -------
    array, float32 [groups, outputs, K]
    """
    depth = hessian.shape[-1]
    order = np.argsort(-np.diagonal(hessian, axis1=1, axis2=2), axis=1, kind="stable")      # [groups, K]
    sorted_rows = np.take_along_axis(weight, order[:, None, :], axis=2)
    largest = np.abs(sorted_rows).argmax(axis=2)
    exact = np.ascontiguousarray(sorted_rows.transpose(0, 2, 1), np.float32)        # [groups, K, outputs]
    hessian = np.take_along_axis(np.take_along_axis(hessian, order[:, :, None], axis=1), order[:, None, :], axis=2)
    shares = _shares(hessian)
    errors = np.zeros_like(exact)
    for start in range(0, depth, BLOCK):
        stop = min(start + BLOCK, depth)
        wanted = exact[:, start:stop] - shares[:, :start, start:stop].transpose(0, 2, 1) @ errors[:, :start]
        for i in range(start, stop):
            step = np.clip(np.rint(wanted[:, i - start]), -LIMIT, LIMIT)
            step = np.where(largest == i, np.rint(exact[:, i]), step)
            errors[:, i] = error = step - exact[:, i]
            wanted[:, i + 1 - start:] -= shares[:, i, i + 1:stop, None] * error[:, None, :]
    result = np.empty_like(sorted_rows, np.float32)
    np.put_along_axis(result, order[:, None, :] + np.zeros_like(largest)[:, :, None],
                      np.rint(exact + errors).transpose(0, 2, 1), axis=2)
    return result


def _shares(hessian: Floats) -> Array:
    """Return V[j, i] / V[i, i], float32 [groups, K, K], where H, damped, is V V^T and V is upper triangular."""
    depth = hessian.shape[-1]
    means = np.trace(hessian, axis1=1, axis2=2) / depth
    hessian[:, range(depth), range(depth)] += np.where(means > 0, DAMPING * means, 1)[:, None]
    upper = np.linalg.cholesky(hessian[:, ::-1, ::-1])[:, ::-1, ::-1]
    return np.asarray(upper / np.diagonal(upper, axis1=1, axis2=2)[:, None, :], np.float32)


# ---- rows of X
def _is_roundable(graph: Graph, node: Node) -> bool:
    """Return True for a contraction whose weights only it reads, of at most DEEPEST inputs."""
    anchor = node.anchor
    weight = graph.constants[anchor.inputs[1]]
    if anchor.op not in ("Conv", "Gemm", "MatMul") or anchor.attrs.get("transA"):
        return False
    return len(graph.consumers[anchor.inputs[1]]) == 1 and weight.size // weight.shape[output_axis(node)] <= DEEPEST


def _extents(graph: Graph, node: Node) -> tuple[int, int, int]:
    """Return (groups, input channels of a group, taps) of a contraction."""
    anchor, shape = node.anchor, graph.constants[node.anchor.inputs[1]].shape
    if anchor.op == "Conv":
        return anchor.attrs.get("group", 1), shape[1], math.prod(shape[2:])
    return 1, math.prod(shape) // shape[output_axis(node)], 1


def _most_waiting(depth: int) -> int:
    """Return the number of rows that wait for a matrix product."""
    return int(np.clip(depth, ROWS, 4 * ROWS))


def _bytes_of(graph: Graph, node: Node) -> int:
    """Return the bytes of H, float64 [groups, K, K], and of the rows that wait."""
    groups, channels, taps = _extents(graph, node)
    depth = channels * taps
    return groups * depth * (8 * depth + 4 * (_most_waiting(depth) + ROWS))


def _key(graph: Graph, node: Node) -> tuple[object, ...]:
    """Return what, beside the tensor, the rows of a contraction depend on."""
    anchor = node.anchor
    if anchor.op != "Conv":
        return ()
    rank = len(graph.shape(anchor.inputs[0])) - 2
    return Window.of(anchor, rank), anchor.attrs.get("group", 1)


def _rows(anchor: Node, item: Array) -> Array:
    """Return at most ROWS rows of what a contraction reads of an item, float32 [rows, taps, channels]."""
    if anchor.op != "Conv":
        rows = item.reshape(-1, item.shape[-1])
        return rows[_places(len(rows))][:, None, :].astype(np.float32, copy=False)
    rank = len(anchor.attrs["kernel_shape"])
    sizes = item.shape[-rank - 1:-1]
    index, outside = _pixels(Window.of(anchor, rank), sizes)
    pixels = item.reshape(-1, item.shape[-1])[index].astype(np.float32, copy=False)
    pixels[outside] = 0
    return pixels


@lru_cache(maxsize=128)
def _pixels(window: Window, sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the pixels that a window reads for at most ROWS outputs, and which are padding, [rows, taps]."""
    outputs = window.outputs(sizes)
    chosen = np.stack(np.unravel_index(_places(math.prod(outputs)), outputs))      # [axes, rows]
    taps = np.stack(np.unravel_index(np.arange(math.prod(window.kernel)), window.kernel))
    strides, dilations, before = (np.reshape(values, (-1, 1, 1)) for values in (
        window.strides, window.dilations, [pad for pad, _ in window.pads]))
    at = chosen[:, :, None] * strides + taps[:, None, :] * dilations - before
    limits = np.reshape(sizes, (-1, 1, 1))
    outside = ((at < 0) | (at >= limits)).any(axis=0)
    return np.ravel_multi_index(tuple(np.clip(at, 0, limits - 1)), sizes), outside


def _places(count: int) -> Array:
    """Return at most ROWS indices below `count`, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, ROWS)).astype(np.intp))
