"""Selection of the layers to keep in float: grown by measured noise, closed over conversions, and pruned.

1. Growing: layers are added by noise removed per microsecond lost. Noise does not add up, so the most promising layers
   are measured again together with those added before (lazy greedy: Minoux, 1978), until the target is met.
2. Bisection: the shortest beginning of that order that meets the target.
3. Closing: an INT8 layer between two kept ones is kept too if that takes no more time, as it saves two conversions.
4. Pruning: kept layers return to INT8, the most time saved for the least noise first, if the target holds without them
   and the noise stays within MOST_NOISE. Of many sets some meet a target by chance: MobileNetV2 with 21 layers, chosen
   by the metric alone, agreed on 98.4 % of the 127 photos that it was chosen on and on 93.8 % of 64 others; with 37
   layers, 7 dB less noise, on 97.6 and 98.4 %.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from infer_server.calibration.target.sensitivity import LEAST_US, Sensitivity
from infer_server.calibration.target.sets import Kept, LayerSets
from infer_server.calibration.trials.judge import Judge

MOST_GROWING = 64       # trials of sets of layers while the greedy order grows
MOST_PRUNING = 24       # layers that are tried in INT8 again
MOST_NOISE = 1.26       # noise power after pruning relative to that before: 1 dB
MOST_CLOSING = 16       # timings of sets with a further layer
LEAST_SHARE = 2e-3      # share of the INT8 time up to which costs are equal: timings are no more exact than that

Progress = Callable[[str, int, int, str], None]


class Selection:
    """One selection. All layers in float must meet the target, and none in float miss it."""

    def __init__(self, sets: LayerSets, judge: Judge, ranked: Sequence[Sensitivity], most_drop: float,
                 progress: Progress) -> None:
        """ranked: the layers by efficiency, each measured alone."""
        self._sets, self._judge, self._most_drop, self._progress = sets, judge, most_drop, progress
        self._ranked = ranked
        self._noise = noise = sets.noise(judge, frozenset())
        self._least_us = max(LEAST_US, LEAST_SHARE * sets.us(frozenset()))
        self._us = {one.layer: max(one.us, self._least_us) for one in ranked}
        # (efficiency, position, size of the set to which it was added when measured, noise of that set with it)
        self._heap = [(-one.noise * noise / self._us[one.layer], position, 0, noise * (1.0 - one.noise))
                      for position, one in enumerate(ranked)]
        heapq.heapify(self._heap)
        self._order: list[Sensitivity] = []
        self._trials = 0

    def kept(self) -> Kept:
        """Return the layers to keep in float."""
        return self._pruned(self._closed(self._grown()))

    def _meets(self, kept: Kept) -> bool:
        return self._sets.drop(kept) <= self._most_drop

    def _beginning(self, count: int) -> Kept:
        """Return the first layers of the greedy order, which is continued as far as needed."""
        while len(self._order) < count:
            _, position, size, noise = heapq.heappop(self._heap)
            one = self._ranked[position]
            if size == len(self._order) or self._trials >= MOST_GROWING:
                self._order.append(one)
                self._noise = noise if size == len(self._order) - 1 else self._noise
                continue
            self._progress("growing", self._trials, MOST_GROWING, one.layer.name)
            self._trials += 1
            kept = frozenset(known.layer for known in self._order)
            noise = self._sets.noise(self._judge, kept | {one.layer})
            heapq.heappush(self._heap, (-(self._noise - noise) / self._us[one.layer], position, len(kept), noise))
        return frozenset(one.layer for one in self._order[:count])

    def _grown(self) -> Kept:
        low, high = 0, 1        # the first `low` layers miss the target
        while high < len(self._ranked) and not self._meets(self._beginning(high)):
            low, high = high, min(2 * high, len(self._ranked))
        self._progress("growing", MOST_GROWING, MOST_GROWING, "")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._meets(self._beginning(middle)) else (middle, high)
        return self._beginning(high)

    def _closed(self, kept: Kept) -> Kept:
        layers, sets = self._sets.layers, self._sets
        between = [layers[i] for i in range(1, len(layers) - 1)
                   if layers[i] not in kept and layers[i - 1] in kept and layers[i + 1] in kept]
        closed = kept
        for number, layer in enumerate(between[:MOST_CLOSING]):
            self._progress("closing", number, min(len(between), MOST_CLOSING), layer.name)
            if 0.0 < sets.us(closed | {layer}) <= sets.us(closed):
                closed |= {layer}
        return closed if closed == kept or self._meets(closed) else kept

    def _pruned(self, kept: Kept) -> Kept:
        sets, judge = self._sets, self._judge
        noise = sets.noise(judge, kept)
        waiting = sorted(sets.in_order(kept), key=lambda layer: -self._us[layer])[:MOST_PRUNING]
        added = {}
        for number, layer in enumerate(waiting):
            self._progress("pruning", number, 2 * len(waiting), layer.name)
            added[layer] = sets.noise(judge, kept - {layer}) - noise
        for number, layer in enumerate(sorted(waiting, key=lambda layer: added[layer] / self._us[layer])):
            self._progress("pruning", len(waiting) + number, 2 * len(waiting), layer.name)
            less = kept - {layer}
            saves = sets.us(less) < sets.us(kept) or not sets.us(kept)
            if saves and sets.noise(judge, less) <= MOST_NOISE * noise and self._meets(less):
                kept = less
        return kept
