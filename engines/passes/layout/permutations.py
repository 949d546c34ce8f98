"""Permuted tensors: what a Reshape does to a tensor whose axes are stored in another order.

A *form* of a tensor is a perm, as Transpose has it: axis i of the form is axis perm[i] of the tensor.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engines.ir.counted import as_int
from engines.ir.graph import Array, Dim

Perm = tuple[int, ...]


def identity(rank: int) -> Perm:
    return tuple(range(rank))


def channels_last(rank: int) -> Perm:
    """[N, C, ...] -> [N, ..., C]"""
    return (0, *range(2, rank), 1)


def permuted(shape: Sequence[Dim], perm: Perm) -> tuple[Dim, ...]:
    return tuple(shape[axis] for axis in perm)


def step(source: Perm, target: Perm) -> Perm:
    """The Transpose that makes form `target` of form `source`."""
    return tuple(source.index(axis) for axis in target)


def without(perm: Perm, axes: Sequence[int]) -> Perm:
    """The form that is left when the tensor loses `axes`."""
    left = sorted(set(perm) - set(axes))
    return tuple(left.index(axis) for axis in perm if axis not in axes)


def reshaped(perm: Perm, before: Sequence[Dim], after: Sequence[Dim]) -> Perm | None:
    """The form of a Reshape's result whose elements lie in the order of the input's form `perm`, if there is one.

    A Reshape maps groups of neighbouring axes to groups of neighbouring axes: [N, C, H, W] -> [N, C, H * W] is N -> N,
    C -> C, HW -> HW. As long as no group is torn apart by `perm`, whole groups move: [N, H, W, C] -> [N, HW, C].
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
    """The smallest groups of axes of equal size on both sides; an extent of 1 goes with its left neighbour.

    None where that cannot be told, as between 2 * batch and batch.
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
    """Which side must grow, 0 or 1; None if they are equal."""
    if left == right:
        return None
    if len(left[1]) != len(right[1]):
        return int(len(left[1]) > len(right[1]))
    return int(left[0] > right[0])


def _count(shape: Sequence[Dim], axes: Sequence[int]) -> int:
    return math.prod(as_int(extent) for axis in axes if not isinstance(extent := shape[axis], str))


def _size(shape: Sequence[Dim], axes: Sequence[int]) -> tuple[int, list[str]]:
    """How many elements: the known factors, and the symbolic ones."""
    return _count(shape, axes), sorted(str(shape[axis]) for axis in axes if isinstance(shape[axis], str))


def order_of_elements(shape: Sequence[Dim], perm: Perm) -> Array:
    """For each element of an item in the form's order, its index in the item's own order. shape[0] is the batch."""
    extents = [as_int(extent) for extent in shape[1:]]
    numbers = np.arange(math.prod(extents), dtype=np.int64).reshape(extents)
    return numbers.transpose([axis - 1 for axis in perm[1:]]).ravel()
