"""Run the float graph over the calibration data and gather a histogram of every watched tensor."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from calibration.histogram import Histogram
from calibration.open_data import CalibrationData, Feed
from engines.errors import CalibrationError
from engines.ir.graph import Array

Run = Callable[[Feed], Mapping[str, Array]]     # feeds -> values of (at least) the watched tensors


def collect(run: Run, data: CalibrationData, tensors: Iterable[str], *, batch: int = 1,
            progress: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Histogram]:
    """{tensor: histogram of all its values}, from one pass over `data` in batches of at most `batch` items.

    The histograms do not depend on `batch`, provided that `run` does not. progress(done, of) is called with numbers of
    items, `of` 0 if it is not known. Raises CalibrationError, naming the tensor, if `run` never returns it or if it
    has values that are not finite.
    """
    histograms = {tensor: Histogram() for tensor in tensors}
    done = 0
    seen: set[str] = set()
    for feed in data.batches(batch):
        values = run(feed)
        seen |= values.keys()
        for tensor, histogram in histograms.items():
            if tensor not in values:        # for other shapes the graph may be another
                continue
            try:
                histogram.observe(values[tensor])
            except CalibrationError as error:
                raise CalibrationError(f"calibrating '{tensor}', item {done}: {error}; "
                                       "check the preprocessing and the model itself in fp32") from error
        done += data.items_in(feed)
        progress(done, data.count or 0)
    if never := next((tensor for tensor in histograms if tensor not in seen), ""):
        raise CalibrationError(f"the float graph did not return '{never}', which is to be calibrated")
    return histograms
