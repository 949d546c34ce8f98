"""Packed constants of a plan. Equal arrays are stored once."""
from __future__ import annotations

import hashlib

import numpy as np

from infer_server.engines.ir.graph import Graph
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.plan.plan import Operand

ALIGNMENT = 256         # alignment of each array in bytes; no access needs more


class Constants:
    """Collector of packed constants, in the order of execution."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parts: list[Array] = []
        self._size = 0
        self._known: dict[bytes, Operand] = {}
        self.weight_offsets: dict[str, int] = {}    # offsets of graph constants that kernels read unpacked

    def add(self, array: Array) -> tuple[Operand, int]:
        """Add an array and return its operand and its size in bytes."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest = hashlib.blake2b(flat.data, digest_size=16).digest()
        if digest not in self._known:
            self._known[digest] = Operand(None, self._size)
            self._parts.append(flat)
            self._size += -(-len(flat) // ALIGNMENT) * ALIGNMENT
        return self._known[digest], len(flat)

    def tensor(self, name: str) -> Operand:
        """Add a graph constant in its own layout and return its operand."""
        operand, _ = self.add(self._graph.constants[name])
        self.weight_offsets[name] = operand.offset
        return operand

    def data(self) -> bytes:
        """Return all constants as one block, each padded to ALIGNMENT."""
        return b"".join(part for flat in self._parts for part in (flat.data, bytes(-len(flat) % ALIGNMENT)))
