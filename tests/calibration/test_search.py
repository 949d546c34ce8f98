import numpy as np
import pytest

from infer_server.calibration.accuracy.comparison import Errors, compare
from infer_server.calibration.search import choose
from infer_server.calibration.table import CalibrationTable
from infer_server.engines.errors import CalibrationError
from tests.calibration.network import TwoLayers


def test_the_chosen_calibrator_has_the_least_measured_error():
    network = TwoLayers()
    choice = choose(network.tables(), network.evaluate)
    measured = {name: network.evaluate(table).peak_db for name, table in network.tables().items()}
    assert choice.errors[choice.name].peak_db >= max(measured.values()) - 0.1
    assert list(choice.errors) == sorted(measured, key=measured.get, reverse=True)
    assert choice.table == network.tables()[choice.name]


def test_min_max_loses_where_one_value_is_far_out():
    network = TwoLayers(outlier=300.0)
    choice = choose(network.tables(), network.evaluate)
    assert choice.name != "minmax"
    assert choice.errors[choice.name].sqnr_db > choice.errors["minmax"].sqnr_db + 3


def table(name):
    return CalibrationTable(name, "", 1, {"x": (0.0, 1.0)})


def chosen(**errors):
    return choose({name: table(name) for name in errors}, lambda table: errors[table.calibrator]).name


def test_ties_go_to_agreement_and_then_to_the_first_candidate():
    assert chosen(a=Errors(20.0, 0, 1, 0.9), b=Errors(20.05, 0, 1, 0.8)) == "a"
    assert chosen(a=Errors(20.0, 0, 1, 0.8), b=Errors(20.05, 0, 1, 0.9)) == "b"
    assert chosen(a=Errors(20.0, 0, 1, None), b=Errors(20.05, 0, 1, None)) == "a"
    assert chosen(a=Errors(20.0, 0, 1, 0.99), b=Errors(21.0, 0, 1, 0.5)) == "b"


def test_the_report_marks_the_choice():
    choice = choose({name: table(name) for name in ("entropy", "mse")},
                    lambda table: Errors(12.5 if table.calibrator == "entropy" else 17.25, 18.0, 0.98765, 0.875))
    assert str(choice).splitlines() == [
        "  calibrator    peak SNR        SQNR  cosine     top-1",
        "* mse           17.25 dB    18.00 dB  0.98765   87.5 %",
        "  entropy       12.50 dB    18.00 dB  0.98765   87.5 %"]


def test_only_floating_outputs_are_compared_and_agreement_needs_a_classifier():
    reference = [{"scores": np.float32([[1, 2, 3]]), "index": np.int64([2]), "map": np.ones((1, 2, 4, 4), np.float32)}]
    found = [{**reference[0], "scores": np.float32([[1, 3, 2]]), "index": np.int64([1])}]
    errors = compare(reference, found)
    assert errors.top1 == 0.0
    assert errors.sqnr_db == pytest.approx(10 * np.log10(14 / 2))       # the error of "scores"; "map" is exact
    assert compare([{"map": reference[0]["map"]}], [{"map": reference[0]["map"]}]).top1 is None


def test_the_worst_output_counts():
    good, bad = np.full((1, 2), 1.01, np.float32), np.full((1, 2), 1.1, np.float32)
    ones = np.ones((1, 2), np.float32)
    assert compare([{"a": ones, "b": ones}], [{"a": good, "b": bad}]).peak_db == pytest.approx(20, abs=1e-3)


def test_a_model_that_gives_only_integers_cannot_be_judged():
    with pytest.raises(CalibrationError, match="--calibrator"):
        compare([{"index": np.int64([2])}], [{"index": np.int64([1])}])


def test_a_clipped_peak_loses_to_noise_of_the_same_energy():
    """A clipped detector score can have the same SQNR as noise, but changes which boxes are found."""
    scores = np.full((1, 1000), 0.01, np.float32)
    scores[0, 0] = 0.8
    clipped, noisy = scores.copy(), scores + np.float32(0.4 / 1000 ** 0.5)
    clipped[0, 0] = 0.4
    peak, noise = (compare([{"y": scores}], [{"y": array}]) for array in (clipped, noisy))
    assert peak.sqnr_db == pytest.approx(noise.sqnr_db, abs=0.01)
    assert peak.peak_db < noise.peak_db - 10


def test_items_of_a_batch_count_each():
    reference = {"y": np.float32([[1, 2, 3], [1, 2, 3]])}
    found = {"y": np.float32([[1, 2, 3], [3, 2, 1]])}
    assert compare([reference], [found]).top1 == 0.5
