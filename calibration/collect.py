"""Collection of histograms of tensors while the float graph runs over the calibration data.

A tensor is observed in place as soon as it is complete: none is copied, and only live tensors take memory.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from infer_server.calibration.data.padding import Padding
from infer_server.calibration.growth import Growth
from infer_server.calibration.histogram import Histogram
from infer_server.calibration.open_data import CalibrationData, Feed
from infer_server.engines.backends.device import Show
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array

Run = Callable[[Feed, Show], None]      # runs a feed and calls Show with (at least) the tensors to be observed


def collect(run: Run, data: CalibrationData, tensors: Iterable[str], *, batch: int = 1,
            progress: Callable[[int, int], None] = lambda done, of: None,
            growth: Growth | None = None) -> dict[str, Histogram]:
    """Return a histogram of each tensor from one pass over the data.

    Parameters
    ----------
    run : callable
        Runs a feed and passes its tensors to a callback.
    data : CalibrationData
    tensors : iterable of str
        Names of the tensors.
    batch : int
        Maximum number of items of a batch; the histograms do not depend on it, provided that `run` does not.
    progress : callable
        Called with (done, of) in items; `of` is 0 if unknown.
    growth : Growth, optional
        Records the extremes of the tensors as items are added.

    Raises
    ------
    CalibrationError
        A tensor, which is named, was never passed or has values that are not finite.
    """
    histograms = {tensor: Histogram() for tensor in tensors}
    done = 0
    seen: set[str] = set()      # the graph of some shapes may lack some of the tensors

    def observe(tensor: str, values: Array) -> None:
        if (histogram := histograms.get(tensor)) is None:
            return
        seen.add(tensor)
        try:
            histogram.observe(values)
        except CalibrationError as error:
            raise CalibrationError(f"calibrating '{tensor}', item {done}: {error}; "
                                   "check the preprocessing and the model itself in fp32") from error

    for feed in data.batches(batch):
        run(feed, observe)
        done += data.items_in(feed)
        if growth:
            growth.record(done, histograms)
        progress(done, data.count or 0)
    if never := next((tensor for tensor in histograms if tensor not in seen), ""):
        raise CalibrationError(f"the float graph did not show '{never}', which is to be calibrated")
    return histograms


def histograms_of(run: Run, feeds: Iterable[Feed], tensors: Iterable[str]) -> dict[str, Histogram]:
    """Return a histogram of each tensor over these feeds, without padding; an empty one if it was never passed."""
    histograms = {tensor: Histogram() for tensor in tensors}
    for feed in feeds:
        padding = Padding(feed)

        def observe(tensor: str, values: Array, padding: Padding = padding) -> None:
            if tensor in histograms:
                histograms[tensor].observe(padding.without(values))

        run(feed, observe)
    return histograms
