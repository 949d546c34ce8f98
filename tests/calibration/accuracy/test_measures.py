import math

import numpy as np
import pytest

from infer_server.calibration.accuracy.measures import cosine, powers, sqnr_db, top1_agreement, typical

X = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)


def test_a_tenth_of_the_amplitude_as_noise_is_20_db():
    assert sqnr_db(X, X * 1.1) == pytest.approx(20, abs=1e-3)
    assert sqnr_db(X, X) == math.inf
    assert sqnr_db(X, X * np.nan) == -math.inf
    assert sqnr_db(X * 0, X) == -math.inf


def test_errors_at_the_peaks_weigh_more_in_the_4_norm():
    assert powers(X, X * 1.1).peak_snr_db == pytest.approx(20, abs=1e-3)
    peak = np.unravel_index(np.abs(X).argmax(), X.shape)
    off_peak = X.copy()
    off_peak[peak] *= 0.5
    assert powers(X, off_peak).peak_snr_db < sqnr_db(X, off_peak) - 3
    assert powers(X, X).peak_snr_db == math.inf


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


def test_scores_that_are_masked_with_infinity_are_left_out():
    masked = np.where(X > 1, -np.inf, X)
    assert sqnr_db(masked, masked * 1.1) == pytest.approx(20, abs=1e-3)
    assert cosine(masked, masked) == pytest.approx(1)


def test_top1_counts_rows_with_the_same_largest_element():
    other = X.copy()
    other[0] = -other[0]
    assert top1_agreement(X, other) == 0.75


def test_neither_a_loud_item_nor_a_silent_one_decides():
    """To three items with errors of 10 %, a loud exact item or a silent noisy one changes little."""
    ordinary = [powers(row, row * 1.1) for row in X[:3]]
    loud, silent = powers(X[3] * 100, X[3] * 100), powers(X[3] * 0, X[3] * 0.1)
    assert typical(ordinary).peak_snr_db == pytest.approx(20, abs=1)
    assert typical([*ordinary, loud]).peak_snr_db == pytest.approx(20, abs=1.5)
    assert typical([*ordinary, silent]).peak_snr_db == pytest.approx(20, abs=1.5)
    assert typical([silent]) is None
    assert typical([powers(X[0] * 0, X[0])] * 3 + ordinary[:1]).peak_snr_db < 0     # most are silent: the mean serves
