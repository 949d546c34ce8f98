"""Selection of the layers to keep in float: the shortest way along a path that meets the target, closed and pruned.

1. Growing: layers leave INT8 by noise removed per microsecond lost (path.py). A bisection finds the first mix that
   meets the target.
2. Closing: INT8 layers between kept ones are kept too if that takes no more time, as it saves two conversions.
3. Pruning: layers return to a faster precision, the most time saved for the least noise first, if the target holds
   without them and the noise stays within MOST_NOISE. Of many sets some meet a target by chance: MobileNetV2 with 21
   layers, chosen by the metric alone, agreed on 98.4 % of the 127 photos that it was chosen on and on 93.8 % of 64
   others; with 37 layers, 7 dB less noise, on 97.6 and 98.4 %.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from infer_server.calibration.target.path import PrecisionPath, Progress
from infer_server.calibration.target.sets import INT8, Layer, Mix, Times

MOST_PRUNING = 24       # moves back that are tried
MOST_NOISE = 1.26       # noise power after pruning relative to that before: 1 dB
MOST_CLOSING = 16       # timings of mixes with further layers
LONGEST_GAP = 4         # INT8 layers between two kept ones that are tried in float together


class Scored(Times, Protocol):
    """Interface of measured times and drops of mixes: ScoredSets."""

    def drop(self, mix: Mix) -> float:
        """Return by how much the metric falls below the float model's."""


class Selection:
    """One selection along a path. All layers in INT8 miss the target."""

    def __init__(self, sets: Scored, path: PrecisionPath, most_drop: float, progress: Progress) -> None:
        self._sets, self._path, self._most_drop, self._progress = sets, path, most_drop, progress

    def chosen(self) -> Mix:
        """Return the precision of each layer; the last of the path, which has least noise, if none meets the target."""
        grown = self._grown()
        return self._pruned(self._closed(grown)) if self._meets(grown) else grown

    def _meets(self, mix: Mix) -> bool:
        return self._sets.drop(mix) <= self._most_drop

    # ---- growing
    def _grown(self) -> Mix:
        path = self._path
        low, high = 0, 1        # the mix after `low` moves misses the target
        while path.has(high) and not self._meets(path.upto(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if not path.has(middle) or self._meets(path.upto(middle)) else (middle, high)
        return path.upto(high)

    # ---- closing
    def _closed(self, mix: Mix) -> Mix:
        sets, closed = self._sets, mix
        gaps = sorted(self._gaps(mix), key=len)[:MOST_CLOSING]
        for number, gap in enumerate(gaps):
            self._progress("closing", number, len(gaps), gap[0].name)
            filled = closed
            for layer in gap:
                filled = filled.moved(layer, self._path.precisions[0])
            if 0.0 < sets.us(filled) <= sets.us(closed):
                closed = filled
        return closed if closed == mix or self._meets(closed) else mix

    def _gaps(self, mix: Mix) -> Iterator[Sequence[Layer]]:
        """Yield the runs of at most LONGEST_GAP layers that are not kept between two that are."""
        layers = self._sets.layers
        indices = [index for index, layer in enumerate(layers) if layer in mix.kept]
        for before, after in pairwise(indices):
            if 1 < after - before <= LONGEST_GAP + 1:
                yield layers[before + 1:after]

    # ---- pruning
    def _pruned(self, mix: Mix) -> Mix:
        sets, path = self._sets, self._path
        most, tried = MOST_NOISE * path.noise(mix), []
        for layer, precision in self._moves_back(mix):
            less = mix.moved(layer, precision)
            saved = sets.us(mix) - sets.us(less) if sets.us(mix) else 1.0
            if saved > 0.0:
                tried.append(((path.noise(less) - path.noise(mix)) / saved, saved, layer, precision))
        tried = sorted(sorted(tried, key=lambda move: -move[1])[:MOST_PRUNING], key=lambda move: move[0])
        for number, (_, _, layer, precision) in enumerate(tried):
            self._progress("pruning", number, len(tried), layer.name)
            less = mix.moved(layer, precision)
            saves = sets.us(less) < sets.us(mix) or not sets.us(mix)
            if less != mix and saves and path.noise(less) <= most and self._meets(less):
                mix = less
        return mix

    def _moves_back(self, mix: Mix) -> Iterator[tuple[Layer, str]]:
        """Yield the moves of kept layers to faster precisions."""
        known = (INT8, *self._path.precisions)
        for layer in self._sets.layers:
            for precision in known[:known.index(self._path.precision(mix, layer))]:
                yield layer, precision
