"""Taps of a convolution that read only the zero border around x: their products can be skipped.

If the zero point of a padded tensor is 0 (and in float), its border holds zeros. Taps in the border are 18 % of the
products of a 3x3 convolution of 7x7 pixels, and 9 % of one of 14x14.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from infer_server.engines.codegen.ir_builder import Value


@dataclass(frozen=True)
class TapAxis:
    """One axis of x and of the kernel that slides along it.

    `before`, `after`: the border at either end of x, in elements.
    """
    extent: int
    before: int
    after: int
    taps: int
    stride: int
    dilation: int

    def live(self, output: int) -> range:
        """Return the taps of an output that read more than the border."""
        first = -(-max(self.before - output * self.stride, 0) // self.dilation)
        stop = -(-max(self.extent - self.after - output * self.stride, 0) // self.dilation)
        return range(min(first, self.taps), min(stop, self.taps))

    def live_share(self, outputs: int) -> float:
        """Return the share of the taps of outputs 0..outputs - 1 that read more than the border."""
        at = np.arange(outputs) * self.stride
        first, stop = (np.minimum(-(-np.maximum(index - at, 0) // self.dilation), self.taps)
                       for index in (self.before, self.extent - self.after))
        return float(np.maximum(stop - first, 0).mean()) / self.taps

    def live_of_several(self, first: Value, count: int) -> tuple[Value, Value]:
        """Return (first tap, number of taps) that cover the live taps of several outputs, first..first + count - 1.

        The number is 0 if all of these outputs lie in the border, as those of a padded 1x1 convolution may.
        """
        def tap(index: int, output: Value) -> Value:
            """Return the first tap of the output that reads this index of x or a later one."""
            limit = output.like(index)
            behind = limit - (output * self.stride).at_most(limit)
            return (behind + (self.dilation - 1)).divided(self.dilation).at_most(self.taps)

        begin, end = tap(self.before, first + (count - 1)), tap(self.extent - self.after, first)
        return begin, end - begin.at_most(end)

    def runs(self, outputs: range) -> list[tuple[int, frozenset[int]]]:
        """Return all taps in order, as runs of (number of taps, outputs for which they are live)."""
        live = {output: self.live(output) for output in outputs}
        users = [frozenset(o for o in outputs if tap in live[o]) for tap in range(self.taps)]
        return [(len(list(members)), who) for who, members in groupby(users)]
