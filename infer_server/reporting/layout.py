"""Layered layout of a directed acyclic graph, drawn from top to bottom (Sugiyama, Tagawa and Toda, 1981).

Nodes are put in layers by their longest path from a source. Long edges get a bend in each layer they cross. Sweeps by
the means of neighbours order each layer, and least squares with a minimum distance (pool adjacent violators) place its
nodes. Time is bounded: sweeps end at a deadline.
"""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, GAP_X, GAP_Y, BEND = 210.0, 52.0, 26.0, 34.0, 14.0      # BEND: width of a bend
LONGEST = 40            # layers that an edge with bends crosses; longer ones are one curve
SWEEPS, SECONDS = 8, 2.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Centres of nodes, ends of the edges' pieces from the source's bottom to the target's top, and the size.

    The pieces between two layers are at even places of an edge; those across a layer are vertical.
    """
    nodes: tuple[Point, ...]
    edges: Mapping[tuple[int, int], tuple[Point, ...]]
    width: float
    height: float


def layered(count: int, edges: Sequence[tuple[int, int]], seconds: float = SECONDS) -> Layout:
    """Return the layout of `count` nodes in topological order, with edges (source, target), source < target."""
    return _Layered(count, sorted({*edges}), time.monotonic() + seconds).layout()


class _Layered:
    def __init__(self, count: int, edges: Sequence[tuple[int, int]], deadline: float) -> None:
        self._count, self._edges, self._deadline = count, edges, deadline
        self._layer = self._layers_of()
        self._above: list[list[int]] = [[] for _ in range(count)]
        self._below: list[list[int]] = [[] for _ in range(count)]
        self._bends: dict[tuple[int, int], list[int]] = {}
        for source, target in edges:
            self._join(source, target)
        self._rows: list[list[int]] = [[] for _ in range(max(self._layer, default=0) + 1)]
        for node, layer in enumerate(self._layer):
            self._rows[layer].append(node)

    def _layers_of(self) -> list[int]:
        layer = [0] * self._count
        for source, target in self._edges:      # sorted by source: all edges into a source come first
            layer[target] = max(layer[target], layer[source] + 1)
        targets: list[list[int]] = [[] for _ in range(self._count)]
        fed = [False] * self._count
        for source, target in self._edges:
            targets[source].append(target)
            fed[target] = True
        for node in reversed(range(self._count)):       # inputs and constants stand just above what reads them
            if targets[node] and not fed[node]:
                layer[node] = min(layer[target] for target in targets[node]) - 1
        return layer

    def _join(self, source: int, target: int) -> None:
        """Connect two nodes, by a bend in each layer between them."""
        path, bends = source, []
        if self._layer[target] - self._layer[source] <= LONGEST:
            for layer in range(self._layer[source] + 1, self._layer[target]):
                bend = len(self._layer)
                self._layer.append(layer)
                self._above.append([path])
                self._below.append([])
                self._below[path].append(bend)
                bends.append(bend)
                path = bend
            self._below[path].append(target)
            self._above[target].append(path)
        self._bends[source, target] = bends

    def layout(self) -> Layout:
        x = [0.0] * len(self._layer)
        for row in self._rows:
            self._place_row(row, [0.0] * len(row), x)
        for sweep in range(SWEEPS):
            self._sweep(x, down=sweep % 2 == 0, ordering=sweep < SWEEPS - 2)
            if time.monotonic() > self._deadline:
                break
        left = min((x[node] - self._width(node) / 2 for node in range(len(x))), default=0.0)
        right = max((x[node] + self._width(node) / 2 for node in range(len(x))), default=0.0)
        x = [centre - left + GAP_X for centre in x]
        middles = [GAP_Y + HEIGHT / 2 + layer * (HEIGHT + GAP_Y) for layer in self._layer]
        edges = {}
        for (source, target), bends in self._bends.items():
            edges[source, target] = ((x[source], middles[source] + HEIGHT / 2),
                                     *((x[bend], middles[bend] + side * HEIGHT / 2) for bend in bends
                                       for side in (-1, 1)),
                                     (x[target], middles[target] - HEIGHT / 2))
        nodes = tuple(zip(x[:self._count], middles[:self._count], strict=True))
        return Layout(nodes, edges, right - left + 2 * GAP_X, len(self._rows) * (HEIGHT + GAP_Y) + GAP_Y)

    def _sweep(self, x: list[float], down: bool, ordering: bool) -> None:
        near = self._above if down else self._below
        for row in self._rows if down else reversed(self._rows):
            targets = {node: sum(x[other] for other in near[node]) / len(near[node]) if near[node] else x[node]
                       for node in row}
            if ordering:
                row.sort(key=targets.__getitem__)
            self._place_row(row, [targets[node] for node in row], x)

    def _width(self, node: int) -> float:
        return WIDTH if node < self._count else BEND

    def _place_row(self, row: Sequence[int], targets: Sequence[float], x: list[float]) -> None:
        """Place a row in its order as near as possible to the target positions, without overlaps."""
        offset, offsets = 0.0, []
        for index, node in enumerate(row):
            if index:
                offset += (self._width(row[index - 1]) + self._width(node)) / 2 + GAP_X
            offsets.append(offset)
        blocks: list[list[float]] = []          # sum and number of pooled positions
        for target, shift in zip(targets, offsets, strict=True):
            blocks.append([target - shift, 1.0])
            while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
                total, size = blocks.pop()
                blocks[-1][0] += total
                blocks[-1][1] += size
        means = [total / size for total, size in blocks for _ in range(int(size))]
        for node, mean, shift in zip(row, means, offsets, strict=True):
            x[node] = mean + shift
