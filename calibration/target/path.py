"""Order in which layers leave INT8: the one that removes most noise per microsecond lost moves first.

The noise of a set is the sum of its layers' (sensitivity.py). The time is that of all kernels, conversions included: a
layer next to a float one saves conversions, so runs of layers move. The first times of a move lack conversions, so the
move at the front is timed again with the layers that moved before it (lazy greedy: Minoux, 1978).
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from infer_server.calibration.target.sensitivity import Costs, cost_of
from infer_server.calibration.target.sets import FP32, INT8, Layer, Mix, Times

LEAST_US = 1.0          # cost of a layer that is as fast in float, so that ratios are finite
LEAST_SHARE = 2e-3      # share of the INT8 time up to which costs are equal: timings are no more exact than that
UNTIMED = -1            # number of moves before which an entry was timed, if it lacks conversions or other moves

Noises = Mapping[str, Mapping[Layer, float]]        # by precision and layer
Progress = Callable[[str, int, int, str], None]


class PrecisionPath:
    """Mixes of precisions from all layers in INT8 to all in float, made as far as needed.

    Attributes
    ----------
    precisions : tuple of str
        Float precisions that layers move to, the fastest first.
    """

    def __init__(self, times: Times, noises: Noises, costs: Costs, most_us: float, progress: Progress) -> None:
        """Begin a path.

        Parameters
        ----------
        times : Times
        noises : mapping of str to mapping
            Noise of each layer in INT8 and in the float precisions that it may move to, the fastest first; float32 may
            have none.
        costs : mapping of str to mapping
            Microseconds by precision and kernel, see `costs_of`.
        most_us : float
            Time that no mix exceeds.
        progress : callable
            Called with (stage, done, of, layer).
        """
        self._times, self._noises, self._costs, self._most_us = times, noises, costs, most_us
        self.precisions = tuple(name for name in noises if name != INT8)
        self._layers = times.layers
        self._mixes, self._progress = [Mix()], progress
        self._least_us = max(LEAST_US, LEAST_SHARE * times.us(Mix()))
        self._numbers = count()         # order of entries of equal efficiency
        self._heap: list[tuple[float, int, Layer, str, str, int]] = []      # see `_push`
        for layer in self._layers:
            self._push(layer)

    def upto(self, moves: int) -> Mix:
        """Return the mix after so many moves, or the last one if no more layers can move."""
        while len(self._mixes) <= moves and self._extend():
            pass
        return self._mixes[min(moves, len(self._mixes) - 1)]

    def last(self) -> Mix:
        """Return the mix after which no more layers can move."""
        while self._extend():
            pass
        return self._mixes[-1]

    def has(self, moves: int) -> bool:
        """Return True if so many moves can be made."""
        self.upto(moves)
        return moves < len(self._mixes)

    def noise(self, mix: Mix) -> float:
        """Return the noise of a mix, relative to that of all layers in INT8."""
        return sum(self._noise(layer, self.precision(mix, layer)) for layer in self._layers)

    def precision(self, mix: Mix, layer: Layer) -> str:
        """Return the precision of a layer in a mix."""
        if layer not in mix.kept:
            return INT8
        return FP32 if layer in mix.fp32 else self.precisions[0]

    def _lost_us(self, mix: Mix, layer: Layer, precision: str) -> float:
        """Return the time that a mix loses by moving a layer to a precision, conversions included; at least a little.

        Without timing all layers take as long.
        """
        if not (before := self._times.us(mix)):
            return LEAST_US
        return max(self._times.us(mix.moved(layer, precision)) - before, self._least_us)

    def _noise(self, layer: Layer, precision: str) -> float:
        return self._noises.get(precision, {}).get(layer, 0.0)

    def _extend(self) -> bool:
        """Make the next move; return False if there is none."""
        while self._heap:
            _, _, layer, origin, precision, timed = heapq.heappop(self._heap)
            mix, moves = self._mixes[-1], len(self._mixes)
            if self.precision(mix, layer) != origin:
                continue                # the layer has moved since
            if timed != moves:
                self._progress("growing", moves - 1, len(self._layers), layer.name)
                self._push(layer, precision, timed=moves)
                continue
            moved = mix.moved(layer, precision)
            if self._times.us(moved) > self._most_us:
                continue
            self._mixes.append(moved)
            for one in (layer, *self._neighbours(layer)):
                self._push(one)
            return True
        return False

    def _neighbours(self, layer: Layer) -> Iterator[Layer]:
        """Yield the layers next to one: beside it they save conversions, so that they may lose less time."""
        index = self._layers.index(layer)
        yield from (*self._layers[max(index - 1, 0):index], *self._layers[index + 1:index + 2])

    def _push(self, layer: Layer, precision: str = "", timed: int = UNTIMED) -> None:
        """Add an entry for each move of a layer to a more exact precision, or for one of them.

        Entries are (efficiency, negative; number; layer; its precision; the new one; moves before it was timed).
        """
        mix = self._mixes[-1]
        origin = self.precision(mix, layer)
        known = (INT8, *self.precisions)
        for finer in (precision,) if precision else known[known.index(origin) + 1:]:
            removed = self._noise(layer, origin) - self._noise(layer, finer)
            if timed == UNTIMED:
                lost = max(self._cost(layer, finer) - self._cost(layer, origin), self._least_us)
            else:
                lost = self._lost_us(mix, layer, finer)
            heapq.heappush(self._heap, (-removed / lost, next(self._numbers), layer, origin, finer, timed))

    def _cost(self, layer: Layer, precision: str) -> float:
        return cost_of(layer, self._costs.get(precision, {}))
