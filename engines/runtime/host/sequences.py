"""Operators on sequences, which are lists, and optionals, which are a value or None. They never modify inputs."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array

Attrs = Mapping[str, Any]
Sequence = list[Array]


def _at(sequence: Sequence, position: Array) -> int:
    index = int(position.reshape(-1)[0])
    if not -len(sequence) <= index < len(sequence):
        raise IndexError(f"position {index} of {len(sequence)}")
    return index % len(sequence)


def _sequence_at(attrs: Attrs, sequence: Sequence, position: Array) -> tuple[Any, ...]:
    return (sequence[_at(sequence, position)],)


def _insert(attrs: Attrs, sequence: Sequence, tensor: Array, position: Array | None = None) -> tuple[Any, ...]:
    index = len(sequence) if position is None else int(position.reshape(-1)[0])
    if not -len(sequence) <= index <= len(sequence):
        raise IndexError(f"position {index} of {len(sequence)}")
    index += len(sequence) if index < 0 else 0
    return ([*sequence[:index], tensor, *sequence[index:]],)


def _erase(attrs: Attrs, sequence: Sequence, position: Array | None = None) -> tuple[Any, ...]:
    index = _at(sequence, np.array(-1) if position is None else position)
    return ([*sequence[:index], *sequence[index + 1:]],)


def _concatenated(attrs: Attrs, sequence: Sequence) -> tuple[Any, ...]:
    join = np.stack if attrs.get("new_axis", 0) else np.concatenate
    return (join(sequence, axis=attrs["axis"]),)


def _split(attrs: Attrs, x: Array, split: Array | None = None) -> tuple[Any, ...]:
    axis = attrs.get("axis", 0)
    extent = x.shape[axis]
    if split is None:
        parts = np.split(x, extent, axis)
        return (parts if attrs.get("keepdims", 1) else [part.squeeze(axis) for part in parts],)
    ends = np.cumsum(split)[:-1].tolist() if split.ndim else list(range(int(split), extent, int(split)))
    return (np.split(x, ends, axis),)


def _length(attrs: Attrs, sequence: Sequence) -> tuple[Any, ...]:
    return (np.array(len(sequence), np.int64),)


def _get(attrs: Attrs, value: Any = None) -> tuple[Any, ...]:
    if value is None:
        raise ValueError("the optional is empty")
    return (value,)


OPERATORS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "ConcatFromSequence": _concatenated,
    "Optional": lambda attrs, value=None: (value,),
    "OptionalGetElement": _get,
    "OptionalHasElement": lambda attrs, value=None: (np.array(value is not None),),
    "SequenceAt": _sequence_at,
    "SequenceConstruct": lambda attrs, *tensors: (list(tensors),),
    "SequenceEmpty": lambda attrs: ([],),
    "SequenceErase": _erase, "SequenceInsert": _insert, "SequenceLength": _length, "SplitToSequence": _split}
