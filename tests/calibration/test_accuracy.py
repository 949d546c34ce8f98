import math

import numpy as np
import pytest

from calibration.accuracy import SqnrMeter, cosine, layer_report, mean_db, peak_snr_db, sqnr_db, top1_agreement

X = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)


def test_a_tenth_of_the_amplitude_as_noise_is_20_db():
    assert sqnr_db(X, X * 1.1) == pytest.approx(20, abs=1e-3)
    assert sqnr_db(X, X) == math.inf
    assert sqnr_db(X, X * np.nan) == -math.inf
    assert sqnr_db(X * 0, X) == -math.inf


def test_errors_at_the_peaks_weigh_more_in_the_4_norm():
    assert peak_snr_db(X, X * 1.1) == pytest.approx(20, abs=1e-3)
    peak = np.unravel_index(np.abs(X).argmax(), X.shape)
    off_peak = X.copy()
    off_peak[peak] *= 0.5
    assert peak_snr_db(X, off_peak) < sqnr_db(X, off_peak) - 3
    assert peak_snr_db(X, X) == math.inf


def test_eight_bits_of_a_uniform_signal_are_48_db():
    """255 steps, uniform: 20 log10(255 * sqrt(12) / sqrt(12)) = 48.1 dB around zero mean."""
    signal = np.random.default_rng(1).uniform(-1, 1, 100_000)
    step = 2 / 255
    assert sqnr_db(signal, np.rint(signal / step) * step) == pytest.approx(48.1, abs=0.1)


def test_cosine_does_not_see_scale():
    assert cosine(X, 3 * X) == pytest.approx(1)
    assert cosine(X, -X) == pytest.approx(-1)
    assert cosine(X * 0, X) == 0
    assert cosine(X * 0, X * 0) == 1


def test_top1_counts_rows_with_the_same_largest_element():
    other = X.copy()
    other[0] = -other[0]
    assert top1_agreement(X, other) == 0.75


def test_one_item_without_error_or_signal_does_not_decide_the_mean():
    assert mean_db([math.inf, 20.0]) == 60.0
    assert mean_db([-math.inf, 20.0]) == 0.0


def test_the_meter_sums_energies_over_runs_and_lists_the_worst_first():
    meter = SqnrMeter()
    for row in X:
        meter.add({"good": row, "bad": row, "only float": row}, {"good": row * 1.01, "bad": row * 1.1})
    result = meter.result()
    assert list(result) == ["bad", "good"]
    assert result == pytest.approx({"bad": sqnr_db(X, X * 1.1), "good": sqnr_db(X, X * 1.01)})
    assert layer_report(result, limit=1).splitlines() == ["tensor  SQNR dB", "bad        20.0"]
