"""Record of a calibration: trials in their order, and histograms whose bins and clipped shares are right."""
from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from infer_server.calibration.accuracy.comparison import Errors
from infer_server.calibration.histogram import Histogram
from infer_server.calibration.record import BINS, MOST_HISTOGRAMS, MOST_TRIALS, SearchRecord, histograms_json


def histogram(values: np.ndarray) -> Histogram:
    found = Histogram()
    found.observe(values.astype(np.float32))
    return found


@pytest.mark.parametrize("range_, clipped", [((0.0, 8.0), 0.0), ((0.0, 4.0), 0.5), ((-1.0, 7.0), 0.125),
                                             ((0.0, 9.0), 0.0)])
def test_the_clipped_share_is_that_outside_of_the_range(range_: tuple[float, float], clipped: float) -> None:
    values = np.linspace(0.0, 8.0, 8001)
    (one,) = histograms_json({"x": histogram(values)}, {"x": range_}).values()
    assert one["clipped"] == pytest.approx(clipped, abs=1e-3) and one["range"] == list(range_)
    assert (one["low"], one["high"]) == (0.0, 8.0)


def test_bins_are_logarithmic_counts_from_the_least_to_the_largest_value() -> None:
    values = np.concatenate([np.zeros(1000), [-1.0], [3.0] * 30])
    (one,) = histograms_json({"x": histogram(values)}, {"x": (-1.0, 3.0)}).values()
    bins = np.frombuffer(base64.b64decode(one["bins"]), np.uint8)
    assert len(bins) == BINS and bins.argmax() == BINS // 4 and bins.max() == 255
    assert bins[0] == round(255 * np.log1p(1) / np.log1p(1000))
    assert bins[-1] == pytest.approx(255 * np.log1p(30) / np.log1p(1000), abs=2)


def test_a_constant_tensor_and_one_without_values_have_a_record_or_none() -> None:
    found = histograms_json({"zero": histogram(np.zeros(4)), "none": Histogram(), "other": histogram(np.ones(2))},
                            {"zero": (0.0, 0.0), "none": (0.0, 1.0)})
    assert found.keys() == {"zero"} and found["zero"]["clipped"] == 0.0


def test_the_record_is_bounded() -> None:
    record, one = SearchRecord(), histogram(np.arange(100.0))
    for number in range(2 * MOST_TRIALS):
        record.add("range", f"{'x' * 1000}{number}", Errors(20.0, 20.0, 0.9, 0.9))
    names = [f"tensor{number}" for number in range(2 * MOST_HISTOGRAMS)]
    found = histograms_json(dict.fromkeys(names, one), dict.fromkeys(names, (0.0, 50.0)))
    assert len(json.dumps(record.as_json())) < 50_000 and len(json.dumps(found)) < 120_000


def test_a_trial_is_recorded_once_and_may_be_kept() -> None:
    record = SearchRecord()
    for peak in (20.0, 30.0):
        record.add("calibrator", "mse", Errors(peak, 19.0, 0.99, None))
    record.keep("calibrator", "mse")
    record.keep("calibrator", "entropy")
    assert record.as_json() == [{"stage": "calibrator", "trial": "mse", "peak_db": 20.0, "sqnr_db": 19.0,
                                 "cosine": 0.99, "kept": True}]
