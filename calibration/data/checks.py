"""Find calibration data that cannot be right: zeros, or pictures that were read wrongly.

    check = DataCheck(inputs, preprocess)
    check.observe(feed)             # each feed of one pass over the data
    check.warnings()                # a sentence each; () if nothing is wrong
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from infer_server.engines.ir.dtypes import BITS
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import PIXEL, Preprocess

FEWEST_ITEMS = 8
MOST_DIGESTS = 1 << 16  # items of which is known whether they are equal to another one
UNIFORM = 0.5           # share of unlike items below which the data are uniform
DEAD = 0.5              # share of a tensor's channels that may be zero in all items; trained networks have some
LEAST_SPAN = 0.1        # least share of the declared range that images should cover
BEYOND = 0.05           # share of the declared range by which images may exceed it


@dataclass
class _Input:
    """Statistics of one input."""
    low: float = np.inf
    high: float = -np.inf
    varies: bool = False        # within an item
    most: int = 0               # elements of an item
    rank: int = 0


@dataclass
class DataCheck:
    """Statistics of calibration items.

    preprocess  what was declared of pictures, for the input that takes them; None: nothing
    """
    inputs: Sequence[IoTensor]
    preprocess: Preprocess | None = None
    items: int = 0
    _seen: dict[str, _Input] = field(default_factory=dict)
    _digests: set[bytes] = field(default_factory=set)

    def observe(self, feed: Mapping[str, Array]) -> None:
        """Look at a feed of one or more items."""
        items = next((len(feed[io.name]) for io in self.inputs if io.batched and io.name in feed), 1)
        self.items += items
        for io in self.inputs:
            array = feed.get(io.name)
            if array is None or not array.size or array.dtype.kind not in "fiu" or io.dtype in BITS:
                continue
            seen = self._seen.setdefault(io.name, _Input())
            rows = array.reshape(items if io.batched else 1, -1)
            lows, highs = rows.min(axis=1), rows.max(axis=1)
            seen.low, seen.high = min(seen.low, float(lows.min())), max(seen.high, float(highs.max()))
            seen.varies |= bool((lows < highs).any())
            seen.most, seen.rank = max(seen.most, rows.shape[1]), array.ndim
        for item in range(items):
            if len(self._digests) < MOST_DIGESTS:
                self._digests.add(_digest(self.inputs, feed, item))

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about implausible data, a sentence each."""
        few = (f"there are {self.items} calibration items: ranges of fewer than {FEWEST_ITEMS} are hardly those of "
               "other data; give some hundred that are typical")
        return (*[few][:self.items < FEWEST_ITEMS], *self.faults())

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the items themselves, however many they are."""
        floats = {io.name: self._seen[io.name] for io in self.inputs if io.name in self._seen
                  and self._seen[io.name].most > 1 and (np.dtype(io.dtype).kind == "f" or io.dtype == "uint8")}
        some_vary = any(seen.varies for seen in floats.values())
        for name, seen in floats.items():
            if seen.low == seen.high and not (some_vary and seen.rank < 4):     # a state or mask may be constant
                yield (f"calibration input '{name}' is {seen.low:g} everywhere in all items, so the ranges mean "
                       "nothing; check how the data are loaded")
            elif not seen.varies and not some_vary:
                yield f"calibration input '{name}' is constant within each item; check how the data are loaded"
        if self.items > 1 and len(self._digests) == 1 and some_vary:
            yield f"all {self.items} calibration items are equal; check how the data are loaded"
        elif self.items < MOST_DIGESTS and len(self._digests) < UNIFORM * self.items and some_vary:
            yield (f"only {len(self._digests)} of {self.items} calibration items are different; give more that are, or "
                   "check how the data are loaded")
        yield from self._contradictions(floats)

    def _contradictions(self, floats: Mapping[str, _Input]) -> Iterator[str]:
        """Compare the values of a picture input with what the declared preprocessing makes of pixels."""
        if self.preprocess is None:
            return
        yield from _of_another_scale(self.preprocess)
        low, high = self.preprocess.range
        for name, seen in floats.items():
            if seen.rank != 4 or seen.low == seen.high:
                continue
            mismatch = (f"calibration input '{name}' holds {seen.low:.4g} to {seen.high:.4g}, and the declared "
                    f"preprocessing makes {low:.4g} to {high:.4g} of pixels")
            if seen.high - seen.low < LEAST_SPAN * (high - low):
                yield f"{mismatch}: the pictures use little of the range of 0 to 255; check how they were stored"
            elif seen.low < low - BEYOND * (high - low) or seen.high > high + BEYOND * (high - low):
                yield f"{mismatch}: the items do not come from it; check --preprocess, and how the items were made"


def _of_another_scale(declared: Preprocess) -> Iterator[str]:
    """Yield a warning if the mean and std of a preprocessing are those of pixels in another scale."""
    most, mean, std = PIXEL * declared.scale, max(map(abs, declared.mean)), max(map(abs, declared.std))
    if most > 100.0 and 0.0 < mean <= 1.0 and std <= 1.0:
        meant = "0 to 1: set scale to 1/255"
    elif most <= 1.0 and mean > 1.0:
        meant = "0 to 255: set scale to 1, or divide mean and std by 255"
    else:
        return
    yield (f"the declared preprocessing scales pixels to 0 to {most:g}, and its mean, up to {mean:g}, is one of pixels "
           f"of {meant}")


def dead_channels(means: Mapping[str, Array]) -> str:
    """Return a warning if most channels of a tensor are zero in all items, else "".

    Parameters
    ----------
    means : mapping of str to array
        Mean of each channel, float [C], of the tensors that convolutions and products read.
    """
    dead = {name: int(np.count_nonzero(values == 0.0)) for name, values in means.items()}
    most = max((name for name in dead if dead[name] > DEAD * len(means[name])),
               key=lambda name: dead[name] / len(means[name]), default=None)
    if most is None:
        return ""
    return (f"{dead[most]} of {len(means[most])} channels of '{most}' are zero in all calibration items: their ranges "
            "mean nothing for items in which they are not; give items that look like production")


def _digest(inputs: Sequence[IoTensor], feed: Mapping[str, Array], item: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for io in inputs:
        if (array := feed.get(io.name)) is not None and not array.dtype.hasobject:
            hasher.update(np.ascontiguousarray(array[item:item + 1] if io.batched else array).tobytes())
    return hasher.digest()
