from dataclasses import replace

from infer_server.calibration.accuracy.comparison import Errors
from infer_server.calibration.search import CANDIDATES, refine, search
from infer_server.calibration.table import CalibrationTable
from tests.calibration.network import TwoLayers


def test_refining_takes_the_better_range_where_it_helps_and_reports_it():
    network = TwoLayers(outlier=300.0)
    tables = network.tables()
    refinement = refine(tables["minmax"], tables, network.evaluate)
    assert "x" in refinement.changes
    assert refinement.after.sqnr_db > refinement.before.sqnr_db + 3
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


# ---- the whole search
def test_the_search_ends_no_worse_than_the_best_calibrator():
    network = TwoLayers(outlier=30.0)
    found = search(network.histograms(), "abc", len(network.items), network.evaluate, evaluations=8)
    assert found.choice.errors.keys() == set(CANDIDATES)
    assert network.evaluate(found.table).peak_db >= max(e.peak_db for e in found.choice.errors.values()) - 0.1
    assert (found.table.model_hash, found.table.items) == ("abc", 48)
    assert "refined: " in str(found)


def test_a_search_without_evaluations_only_chooses():
    network = TwoLayers()
    found = search(network.histograms(), "abc", 48, network.evaluate, evaluations=0)
    assert found.refinement is None and found.table == found.choice.table
