"""Selection of the layers to keep in float: grown by measured noise, closed over conversions, and pruned.

1. Growing: layers are added by noise removed per microsecond lost. Noise does not add up, so the most promising layers
   are measured again together with those added before (lazy greedy: Minoux, 1978), until the target is met. The time is
   that of the whole set: a layer next to a float one saves conversions, so runs of layers grow.
2. Bisection: the shortest beginning of that order that meets the target.
3. Narrowing: the same layers move to a faster float precision if the target holds and the noise stays within
   MOST_NOISE. All layers in bf16 may miss a target that a few of them meet, as their noise is small beside INT8's.
   If no precision serves all of them, as many as possible move, the most time saved for the least noise first, and the
   others stay in float32.
4. Closing: INT8 layers between kept ones are kept too if that takes no more time, as it saves two conversions.
5. Pruning: kept layers return to INT8, the most time saved for the least noise first, if the target holds without them
   and the noise stays within MOST_NOISE. Of many sets some meet a target by chance: MobileNetV2 with 21 layers, chosen
   by the metric alone, agreed on 98.4 % of the 127 photos that it was chosen on and on 93.8 % of 64 others; with 37
   layers, 7 dB less noise, on 97.6 and 98.4 %.
6. Widening: if some layers stay in float32, the opposite way is tried, too. All layers begin in the faster precision,
   and move to float32 by noise removed per microsecond lost, until the target is met. The faster set is taken.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from infer_server.calibration.target.sensitivity import LEAST_US, Layer, Sensitivity
from infer_server.calibration.target.sets import Kept, LayerSets
from infer_server.calibration.trials.judge import Judge

MOST_GROWING = 64       # trials of sets of layers while the greedy order grows
MOST_PRUNING = 24       # layers that are tried in INT8 again
MOST_NOISE = 1.26       # noise power after narrowing or pruning relative to that before: 1 dB
MOST_CLOSING = 16       # timings of sets with further layers
LONGEST_GAP = 4         # INT8 layers between two kept ones that are tried in float together
LEAST_SHARE = 2e-3      # share of the INT8 time up to which costs are equal: timings are no more exact than that
UNTIMED = -1            # size of the set of an entry whose noise or time is of another set

Progress = Callable[[str, int, int, str], None]


class Selection:
    """One selection. All layers in float must meet the target, and none in float miss it."""

    def __init__(self, sets: LayerSets, judge: Judge, ranked: Sequence[Sensitivity], most_drop: float,
                 progress: Progress, faster: Sequence[str] = ()) -> None:
        """Prepare a selection.

        ranked: the layers by efficiency, each measured alone. faster: faster float precisions, the fastest first.
        """
        self._sets, self._judge, self._most_drop, self._progress = sets, judge, most_drop, progress
        self._ranked, self._faster = ranked, faster
        self._positions = {one.layer: position for position, one in enumerate(ranked)}
        self._noise = noise = sets.noise(judge, frozenset())
        self._least_us = max(LEAST_US, LEAST_SHARE * sets.us(frozenset()))
        self._us = {one.layer: max(one.us, self._least_us) for one in ranked}
        self._removed = {one.layer: one.noise * noise for one in ranked}        # noise power, as measured last
        # (efficiency, position, size of the set to which it was added when measured, noise of that set with it); the
        # times of the first entries lack conversions, so that their efficiencies are upper bounds
        self._heap = [(-self._removed[one.layer] / self._us[one.layer], position, UNTIMED,
                       noise - self._removed[one.layer]) for position, one in enumerate(ranked)]
        heapq.heapify(self._heap)
        self._order: list[Layer] = []
        self._trials = 0

    def kept(self) -> Kept:
        """Return the layers to keep in float."""
        sets, grown = self._sets, self._grown()
        self._narrow(grown)
        kept = self._pruned(self._closed(grown))
        if not self._faster or sets.float_type in self._faster and not sets.fp32:
            return kept         # no layer is in float32 that another precision could serve
        if not (us := sets.us(kept)):
            return kept
        state = sets.float_type, sets.fp32
        every = self._widened(self._faster[0])
        if sets.us(every) < us:
            return self._pruned(every)
        sets.float_type, sets.fp32 = state
        return kept

    def _meets(self, kept: Kept) -> bool:
        return self._sets.drop(kept) <= self._most_drop

    def _lost_us(self, kept: Kept, layer: Layer) -> float:
        """Return the time that a set loses with a further layer, conversions included."""
        if not (before := self._sets.us(kept)):
            return self._us[layer]
        return max(self._sets.us(kept | {layer}) - before, self._least_us)

    # ---- growing
    def _beginning(self, count: int) -> Kept:
        """Return the first layers of the greedy order, which is continued as far as needed."""
        while len(self._order) < count:
            _, position, size, noise = heapq.heappop(self._heap)
            layer, added = self._ranked[position].layer, len(self._order)
            if layer in self._order:        # entry of an earlier measurement
                continue
            if size == added or self._trials >= MOST_GROWING:
                self._noise = noise if size == added else self._noise
                self._order.append(layer)
                self._push_neighbours(layer)
                continue
            if added:
                self._progress("growing", self._trials, MOST_GROWING, layer.name)
                self._trials += 1
                noise = self._sets.noise(self._judge, frozenset((*self._order, layer)))
                self._removed[layer] = self._noise - noise
            self._push(layer, added, noise)
        return frozenset(self._order[:count])

    def _push(self, layer: Layer, size: int, noise: float) -> None:
        """Add an entry with the time that the layers so far lose with a further one."""
        lost_us = self._lost_us(frozenset(self._order), layer)
        heapq.heappush(self._heap, (-self._removed[layer] / lost_us, self._positions[layer], size, noise))

    def _push_neighbours(self, layer: Layer) -> None:
        """Add entries of a layer's neighbours: next to it, conversions are saved, so that they may lose less time."""
        layers = self._sets.layers
        index = layers.index(layer)
        for neighbour in (*layers[max(index - 1, 0):index], *layers[index + 1:index + 2]):
            if neighbour not in self._order and neighbour in self._positions:
                self._push(neighbour, UNTIMED, 0.0)

    def _grown(self) -> Kept:
        low, high = 0, 1        # the first `low` layers miss the target
        while high < len(self._ranked) and not self._meets(self._beginning(high)):
            low, high = high, min(2 * high, len(self._ranked))
        self._progress("growing", MOST_GROWING, MOST_GROWING, "")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._meets(self._beginning(middle)) else (middle, high)
        return self._beginning(high)

    # ---- narrowing
    def _narrow(self, kept: Kept) -> None:
        """Set the fastest precision in which a set meets the target and is hardly noisier."""
        if not self._faster:
            return
        sets, judge = self._sets, self._judge
        float_type, most = sets.float_type, MOST_NOISE * sets.noise(judge, kept)
        for precision in self._faster:
            sets.float_type = precision
            if sets.noise(judge, kept) <= most and self._meets(kept):
                return
        if float_type != "fp32" or not self._narrow_some(kept, self._faster[0], most):
            sets.float_type = float_type

    def _narrow_some(self, kept: Kept, precision: str, most: float) -> bool:
        """Move as many layers of a float32 set as possible to a precision; return False if none can move.

        most: the noise power that the set may have.
        """
        sets, judge = self._sets, self._judge
        sets.float_type, sets.fp32 = precision, kept
        us, noise = sets.us(kept), sets.noise(judge, kept)
        costs: dict[Layer, float] = {}      # noise added per microsecond saved
        for number, layer in enumerate(sets.in_order(kept)):
            self._progress("narrowing", number, len(kept), layer.name)
            sets.fp32 = kept - {layer}
            saved = us - sets.us(kept)
            if saved > 0.0 or not us:
                costs[layer] = max(sets.noise(judge, kept) - noise, 0.0) / max(saved, self._least_us)
        order = sorted(costs, key=lambda layer: costs[layer])
        low, high = 0, len(order) + 1       # the first `low` layers may move, the first `high` may not
        while high - low > 1:
            middle = (low + high) // 2
            sets.fp32 = kept.difference(order[:middle])
            if sets.noise(judge, kept) <= most and self._meets(kept):
                low = middle
            else:
                high = middle
        sets.fp32 = kept.difference(order[:low]) if low else Kept()
        return low > 0

    # ---- widening
    def _widened(self, precision: str) -> Kept:
        """Return all layers; as few as possible stay in float32, and the others compute in a faster precision."""
        sets, judge = self._sets, self._judge
        every = frozenset(sets.layers)
        sets.float_type, sets.fp32 = precision, Kept()
        us, noise = sets.us(every), sets.noise(judge, every)
        efficiency: dict[Layer, float] = {}
        for number, layer in enumerate(sets.layers):
            self._progress("widening", number, len(every), layer.name)
            sets.fp32 = frozenset([layer])
            efficiency[layer] = (noise - sets.noise(judge, every)) / max(sets.us(every) - us, self._least_us)
        order = sorted(sets.layers, key=lambda layer: -efficiency[layer])
        low, high = 0, len(order)           # the first `low` layers miss the target, the first `high` meet it
        while high - low > 1:
            middle = (low + high) // 2
            sets.fp32 = frozenset(order[:middle])
            low, high = (low, middle) if self._meets(every) else (middle, high)
        sets.fp32 = frozenset(order[:high])
        return every

    # ---- closing
    def _closed(self, kept: Kept) -> Kept:
        sets, closed = self._sets, kept
        gaps = sorted(self._gaps(kept), key=len)[:MOST_CLOSING]
        for number, gap in enumerate(gaps):
            self._progress("closing", number, len(gaps), gap[0].name)
            if 0.0 < sets.us(closed.union(gap)) <= sets.us(closed):
                closed = closed.union(gap)
        return closed if closed == kept or self._meets(closed) else kept

    def _gaps(self, kept: Kept) -> Iterator[Sequence[Layer]]:
        """Yield the runs of at most LONGEST_GAP layers that are not kept between two that are."""
        layers = self._sets.layers
        indices = [index for index, layer in enumerate(layers) if layer in kept]
        for before, after in pairwise(indices):
            if 1 < after - before <= LONGEST_GAP + 1:
                yield layers[before + 1:after]

    # ---- pruning
    def _pruned(self, kept: Kept) -> Kept:
        sets, judge = self._sets, self._judge
        noise, us = sets.noise(judge, kept), sets.us(kept)
        saved = {layer: max(us - sets.us(kept - {layer}), self._least_us) if us else self._us[layer] for layer in kept}
        waiting = sorted(sets.in_order(kept), key=lambda layer: -saved[layer])[:MOST_PRUNING]
        added = {}
        for number, layer in enumerate(waiting):
            self._progress("pruning", number, 2 * len(waiting), layer.name)
            added[layer] = sets.noise(judge, kept - {layer}) - noise
        for number, layer in enumerate(sorted(waiting, key=lambda layer: added[layer] / saved[layer])):
            self._progress("pruning", len(waiting) + number, 2 * len(waiting), layer.name)
            less = kept - {layer}
            saves = sets.us(less) < sets.us(kept) or not sets.us(kept)
            if saves and sets.noise(judge, less) <= MOST_NOISE * noise and self._meets(less):
                kept = less
        return kept
