"""Run the float graph over the calibration data and gather a histogram of every watched tensor.

A tensor is looked at when it is whole and where it lies: none is copied, and only those alive at once take memory.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from calibration.histogram import Histogram
from calibration.open_data import CalibrationData, Feed
from engines.backends.device import Show
from engines.errors import CalibrationError
from engines.ir.graph import Array

Run = Callable[[Feed, Show], None]      # shows (at least) the watched tensors that a feed gives


def collect(run: Run, data: CalibrationData, tensors: Iterable[str], *, batch: int = 1,
            progress: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Histogram]:
    """{tensor: histogram of all its values}, from one pass over `data` in batches of at most `batch` items.

    The histograms do not depend on `batch`, provided that `run` does not. progress(done, of) is called with numbers of
    items, `of` 0 if it is not known. Raises CalibrationError, naming the tensor, if `run` never shows it or if it
    has values that are not finite.
    """
    histograms = {tensor: Histogram() for tensor in tensors}
    done = 0
    seen: set[str] = set()      # for other shapes the graph may be another, without some of them

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
        progress(done, data.count or 0)
    if never := next((tensor for tensor in histograms if tensor not in seen), ""):
        raise CalibrationError(f"the float graph did not show '{never}', which is to be calibrated")
    return histograms
