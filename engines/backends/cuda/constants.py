"""The constants of a plan as they are packed for its kernels, equal ones once."""
from __future__ import annotations

import hashlib

import numpy as np

from engines.ir.graph import Graph
from engines.lowering.problems.problem import Array
from engines.plan.plan import Operand

ALIGNMENT = 256         # of each: more than any access wants


class Constants:
    """Collects them, in order of execution."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parts: list[Array] = []
        self._size = 0
        self._known: dict[bytes, Operand] = {}
        self.weight_offsets: dict[str, int] = {}    # of the graph's constants that are read as they are

    def add(self, array: Array) -> tuple[Operand, int]:
        """(where, bytes)"""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest = hashlib.blake2b(flat.data, digest_size=16).digest()
        if digest not in self._known:
            self._known[digest] = Operand(None, self._size)
            self._parts.append(flat)
            self._size += -(-len(flat) // ALIGNMENT) * ALIGNMENT
        return self._known[digest], len(flat)

    def tensor(self, name: str) -> Operand:
        """A constant of the graph, as it is."""
        operand, _ = self.add(self._graph.constants[name])
        self.weight_offsets[name] = operand.offset
        return operand

    def data(self) -> bytes:
        """All of them."""
        return b"".join(part for flat in self._parts for part in (flat.data, bytes(-len(flat) % ALIGNMENT)))
