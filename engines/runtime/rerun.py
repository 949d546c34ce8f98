"""A run like the one before: its inputs go where those went, and nothing is found out again.

A network of a few small nodes takes less time than to find out where its tensors lie.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engines.ir.graph import Array

Place = tuple[str, tuple[int, ...], np.dtype[Any], Array | None]


@dataclass(frozen=True, slots=True)
class Rerun:
    """The runs of one context on as many items.

    inputs      name, shape, dtype and slots of each; None: its values are not read
    outputs     where each lies
    execute     runs the network
    """
    inputs: Sequence[Place]
    outputs: Sequence[tuple[str, Array]]
    execute: Callable[[], None]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array] | None:
        """The outputs; None: the feeds are others, and nothing has run."""
        if len(feeds) != len(self.inputs):
            return None
        for name, shape, dtype, place in self.inputs:
            array = feeds.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return None
            if place is not None:
                place[...] = array
        self.execute()
        return {name: place.copy() for name, place in self.outputs}


class Reruns(Protocol):
    """engines.runtime.engine.Engine."""

    def rerun(self, feeds: Mapping[str, Any]) -> dict[str, Array] | None: ...


@dataclass(frozen=True, slots=True)
class LastRun:
    """The specialisation that ran last, for inputs whose deciding values are equal.

    decided     name, dtype, shape and bytes of each deciding input
    """
    engine: Reruns
    decided: Sequence[tuple[str, np.dtype[Any], tuple[int, ...], bytes]]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array] | None:
        """Return the outputs; None if the feeds are others, and nothing has run."""
        if not self.decided:
            return self.engine.rerun(feeds)
        others = dict(feeds)
        for name, dtype, shape, values in self.decided:
            array = others.pop(name, None)
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape \
                    or array.tobytes() != values:
                return None
        return self.engine.rerun(others)
