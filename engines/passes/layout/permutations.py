"""Permuted tensors, and the effect of a Reshape on a tensor whose axes are stored in another order.

A *form* of a tensor is a perm, as Transpose has it: axis i of the form is axis perm[i] of the tensor.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from infer_server.engines.ir.graph import Array, Dim
from infer_server.engines.ir.symbolic import as_int

Perm = tuple[int, ...]


def identity(rank: int) -> Perm:
    return tuple(range(rank))


def channels_last(rank: int) -> Perm:
    """Return the perm from [N, C, ...] to [N, ..., C]."""
    return (0, *range(2, rank), 1)


def permuted(shape: Sequence[Dim], perm: Perm) -> tuple[Dim, ...]:
    return tuple(shape[axis] for axis in perm)


def step(source: Perm, target: Perm) -> Perm:
    """Return the perm of the Transpose from form `source` to form `target`."""
    return tuple(source.index(axis) for axis in target)


def without(perm: Perm, axes: Sequence[int]) -> Perm:
    """Return the form that remains when the tensor loses `axes`."""
    left = sorted(set(perm) - set(axes))
    return tuple(left.index(axis) for axis in perm if axis not in axes)


def reshaped(perm: Perm, before: Sequence[Dim], after: Sequence[Dim]) -> Perm | None:
    """Return the form of a Reshape's result with the element order of the input's form `perm`; None if there is none.

    A Reshape maps groups of adjacent axes to groups of adjacent axes: [N, C, H, W] -> [N, C, H * W] is N -> N, C -> C,
    HW -> HW. If `perm` keeps the axes of each group adjacent and in order, whole groups move: [N, H, W, C] ->
    [N, HW, C].
    """
    groups = axis_groups(before, after)
    if groups is None:
        return None
    place = {axis: i for i, axis in enumerate(axis for axis in perm if before[axis] != 1)}
    first: list[int] = []
    for axes, _ in groups:
        places = [place[axis] for axis in axes if axis in place]
        if places != list(range(places[0], places[0] + len(places)) if places else ()):
            return None
        first.append(places[0] if places else -1)
    ordered = sorted(range(len(groups)), key=first.__getitem__)
    return tuple(axis for group in ordered for axis in groups[group][1])


def axis_groups(before: Sequence[Dim], after: Sequence[Dim]) -> list[tuple[list[int], list[int]]] | None:
    """Return the smallest groups of adjacent axes with equal products of extents on both sides.

    An extent of 1 joins the group on its left. Returns None if symbolic extents leave it open, as 2 * batch and batch.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = list(range(i, min(i + 1, len(before)))), list(range(j, min(j + 1, len(after))))
        while (small := _smaller(_size(before, left), _size(after, right))) is not None:
            side, shape = ((left, before), (right, after))[small]
            start = (i, j)[small]
            if start + len(side) == len(shape):
                return None
            side.append(start + len(side))
        i, j = i + len(left), j + len(right)
        while i < len(before) and before[i] == 1:
            left.append(i)
            i += 1
        while j < len(after) and after[j] == 1:
            right.append(j)
            j += 1
        groups.append((left, right))
    return groups


def _smaller(left: tuple[int, list[str]], right: tuple[int, list[str]]) -> int | None:
    """Return the side that must take another axis, 0 or 1; None if both are equal."""
    if left == right:
        return None
    if len(left[1]) != len(right[1]):
        return int(len(left[1]) > len(right[1]))
    return int(left[0] > right[0])


def _count(shape: Sequence[Dim], axes: Sequence[int]) -> int:
    return math.prod(as_int(extent) for axis in axes if not isinstance(extent := shape[axis], str))


def _size(shape: Sequence[Dim], axes: Sequence[int]) -> tuple[int, list[str]]:
    """Return the number of elements as (product of the known extents, sorted symbolic ones)."""
    return _count(shape, axes), sorted(str(shape[axis]) for axis in axes if isinstance(shape[axis], str))


def order_of_elements(shape: Sequence[Dim], perm: Perm) -> Array:
    """Return the index in ONNX's order of each element of an item in the form's order, int64. shape[0] is the batch."""
    extents = [as_int(extent) for extent in shape[1:]]
    numbers = np.arange(math.prod(extents), dtype=np.int64).reshape(extents)
    return numbers.transpose([axis - 1 for axis in perm[1:]]).ravel()
