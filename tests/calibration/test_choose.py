from dataclasses import replace

import numpy as np
import pytest

from calibration.choose import Errors, choose, compare, refine
from calibration.histogram import Histogram
from calibration.table import CalibrationTable, make_table
from engines.errors import CalibrationError

CALIBRATORS = ("entropy", "percentile", "minmax", "mse")


class TwoLayers:
    """y = relu(relu(x A) B), its hidden tensors and input storable in a byte: small enough to quantise here."""

    def __init__(self, outlier=0.0):
        rng = np.random.default_rng(0)
        self.a, self.b = rng.standard_normal((32, 64)) / 6, rng.standard_normal((64, 10)) / 8
        self.items = rng.standard_normal((48, 32))
        self.items[0, 0] = outlier or self.items[0, 0]

    def run(self, ranges=None):
        def stored(name, x):
            if ranges is None:
                return x
            low, high = ranges[name]
            scale = (high - low) / 255
            zero_point = np.rint(-low / scale)
            return (np.clip(np.rint(x / scale) + zero_point, 0, 255) - zero_point) * scale

        x = stored("x", self.items)
        hidden = stored("hidden", np.maximum(x @ self.a, 0))
        return {"x": self.items, "hidden": hidden, "y": np.maximum(hidden @ self.b, 0)}

    def tables(self):
        histograms = {}
        for name, values in self.run().items():
            histograms[name] = Histogram()
            histograms[name].observe(values)
        return {name: make_table(name, "", 48, histograms) for name in CALIBRATORS}

    def evaluate(self, table):
        return compare([{"y": self.run()["y"]}], [{"y": self.run(table.ranges)["y"]}])


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
    assert choice.errors[choice.name].peak_db > choice.errors["minmax"].peak_db + 3


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
    assert errors.sqnr_db == pytest.approx((100 + 10 * np.log10(14 / 2)) / 2)
    assert compare([{"map": reference[0]["map"]}], [{"map": reference[0]["map"]}]).top1 is None


def test_a_model_that_gives_only_integers_cannot_be_judged():
    with pytest.raises(CalibrationError, match="--calibrator"):
        compare([{"index": np.int64([2])}], [{"index": np.int64([1])}])


def test_a_clipped_peak_loses_to_noise_of_the_same_energy():
    """As a detector's scores: the SQNR is equal, but what is read from the output is gone."""
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


# ---- refine
def test_refining_takes_the_better_range_where_it_helps_and_reports_it():
    network = TwoLayers(outlier=300.0)
    tables = network.tables()
    refinement = refine(tables["minmax"], tables, network.evaluate)
    assert "x" in refinement.changes
    assert refinement.after.peak_db > refinement.before.peak_db + 3
    assert network.evaluate(refinement.table) == refinement.after
    assert refinement.table.calibrator == "minmax, refined"


def test_refining_never_makes_the_measured_error_worse_and_keeps_to_its_budget():
    network, calls = TwoLayers(), []
    tables = network.tables()

    def evaluate(table):
        calls.append(table)
        return network.evaluate(table)

    refinement = refine(tables["mse"], tables, evaluate, evaluations=2)
    assert len(calls) == refinement.evaluations == 2
    assert refinement.after.peak_db >= refinement.before.peak_db


def test_refining_begins_at_the_outputs_and_skips_ranges_that_are_nearly_the_same():
    base = CalibrationTable("base", "", 1, {"first": (0.0, 1.0), "last": (0.0, 1.0)})
    near = replace(base, ranges={"first": (0.0, 0.8), "last": (0.0, 0.995)})
    far = replace(base, ranges={"first": (0.0, 0.8), "last": (0.0, 0.5)})
    tried = []

    def evaluate(table):
        tried.append((table.ranges["first"][1], table.ranges["last"][1]))
        return Errors(20.0, 20.0, 1.0, None)

    refinement = refine(base, {"near": near, "far": far}, evaluate)
    assert tried == [(1.0, 1.0), (1.0, 0.5), (0.8, 1.0)]
    assert refinement.table == base and not refinement.changes
