"""Operators that run well on channels-first images, in which each channel of an item is a row of pixels.

    GlobalAveragePool(x [N, C, H, W])  =  the mean over the rows of [N, C, H * W]           GlobalMaxPool: the maximum
    SpaceToDepth, DepthToSpace         =  one Transpose, of rows and columns cut in two
    Resize that repeats every pixel    =  Expand(x [N, C, H, 1, W, 1])

Windows over each channel separately (pools, depthwise convolutions) load vectors from its rows if these are long and
the step is one column: two Transposes around such a node cost more than vectors of channels gain. GridSample reads
single pixels, which costs less than to transpose an image for it alone. InstanceNormalization is a norm of rows.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Dim, Graph, Node
from infer_server.engines.ir.symbolic import as_int, is_symbolic
from infer_server.engines.ops import op_of
from infer_server.engines.ops.window import Window

Step = tuple[str, Mapping[str, Any], tuple[Dim, ...]]       # operator of one input, attributes, shape of the result

LONG = 24           # least columns of a row
# Taps of a depthwise convolution that is worth two Transposes: with fewer there is less to gain, and with more the
# unrolled code of the channels-last kernel is too long.
MANY = range(25, 50)
_REDUCTIONS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}
# Perms of the images whose rows and columns, or whose channels, are split by the block size.
_TO_DEPTH = {"DCR": (0, 3, 5, 1, 2, 4), "CRD": (0, 1, 3, 5, 2, 4)}
_TO_SPACE = {"DCR": (0, 3, 4, 1, 5, 2), "CRD": (0, 1, 4, 2, 5, 3)}


def does_as_well(graph: Graph, node: Node) -> bool:
    """Return True if a layout-sensitive node runs as well on a channels-first image."""
    return bool(in_rows(node, graph.shape(node.inputs[0]))) or stays_the_same(graph, node)


def stays_the_same(graph: Graph, node: Node) -> bool:
    """Return True if the node needs no rewriting for a channels-first image."""
    return node.op in ("GridSample", "InstanceNormalization") or _slides_along_rows(graph, node)


def _slides_along_rows(graph: Graph, node: Node) -> bool:
    """Return True for a window over each channel separately with column stride 1, or an unpadded disjoint pool.

    Rows of symbolic length count as long, so that a symbolic plan holds for all lengths.
    """
    shape = graph.shape(node.inputs[0])
    if node.op not in ("MaxPool", "AveragePool", "Conv") or len(shape) != 4 or (
            not is_symbolic(shape[3]) and as_int(shape[3]) < LONG):
        return False
    window = Window.of(node, 2)
    if node.op == "Conv":
        weights = graph.constants.get(node.inputs[1])
        if weights is None or weights.shape[:2] != (node.attrs.get("group", 1), 1) or shape[1] != len(weights):
            return False
        maker = graph.producer.get(node.inputs[0])
        rounded = maker is not None and maker.op == "FakeQuantize"      # channels last is faster on bytes
        return window.strides[1] == 1 and not rounded and math.prod(window.kernel) not in MANY
    padded = any(map(any, window.pads))
    if node.op == "AveragePool" and padded:     # the divisor differs between pixels
        return False
    return window.strides[1] == 1 or window.strides == window.kernel and not padded


def in_rows(node: Node, shape: Sequence[Dim]) -> Sequence[Step]:
    """Return the steps that compute a node on a channels-first image of this shape; () if there are none.

    Parameters
    ----------
    node : Node
        A global pool, Resize, SpaceToDepth or DepthToSpace; others have no steps.
    shape : sequence of Dim
        Its input's shape [N, C, ...].
    """
    items, channels, *sizes = shape
    if node.op in _REDUCTIONS:
        pixels = math.prod(as_int(size) for size in sizes)
        return (_reshape(items, channels, pixels),
                (_REDUCTIONS[node.op], {"axes": (2,), "keepdims": 1}, (items, channels, 1)),
                _reshape(items, channels, *(1 for _ in sizes)))
    if node.op == "Resize" and len(sizes) == 2:
        return _repeated(node, items, channels, *map(as_int, sizes))
    if node.op not in ("SpaceToDepth", "DepthToSpace") or len(sizes) != 2:
        return ()
    block, depth, (height, width) = int(node.attrs["blocksize"]), as_int(channels), map(as_int, sizes)
    mode = node.attrs.get("mode", "DCR")
    if node.op == "SpaceToDepth":
        return (_reshape(items, depth, height // block, block, width // block, block),
                _transpose(_TO_DEPTH[mode], (items, depth, height // block, block, width // block, block)),
                _reshape(items, depth * block * block, height // block, width // block))
    depth //= block * block
    parts = (block, block, depth) if mode == "DCR" else (depth, block, block)
    return (_reshape(items, *parts, height, width), _transpose(_TO_SPACE[mode], (items, *parts, height, width)),
            _reshape(items, depth, height * block, width * block))


def _repeated(node: Node, items: Dim, channels: Dim, height: int, width: int) -> Sequence[Step]:
    """Return the steps of a nearest Resize that repeats each pixel a whole number of times, else ().

    Found by resizing numbered pixels, so that no coordinate mode needs a case of its own.
    """
    if node.attrs.get("mode", "nearest") != "nearest" or "sizes" in node.attrs or len(node.inputs) > 1:
        return ()
    if tuple(node.attrs["scales"][:2]) != (1, 1):
        return ()
    pixels = np.arange(height * width, dtype=np.float32).reshape(1, 1, height, width)
    made, = op_of(node.op).reference(node, pixels)
    down, right = made.shape[2] // height, made.shape[3] // width
    if not np.array_equal(made, pixels.repeat(down, 2).repeat(right, 3)):
        return ()
    repeated = (items, channels, height, down, width, right)
    return (_reshape(items, channels, height, 1, width, 1), ("Expand", {"shape": repeated}, repeated),
            _reshape(items, channels, height * down, width * right))


def _reshape(*shape: Dim) -> Step:
    return "Reshape", {"shape": shape}, shape


def _transpose(perm: Sequence[int], shape: Sequence[Dim]) -> Step:
    return "Transpose", {"perm": tuple(perm)}, tuple(shape[axis] for axis in perm)
