"""Errors by a prepared reference equal those by the measures, for each part of each item."""
import numpy as np
import pytest

from infer_server.calibration.accuracy.comparison import CHUNK, Reference
from infer_server.calibration.accuracy.measures import cosine, fault_of_int8, powers, typical, zeroed
from infer_server.calibration.accuracy.parts import TensorParts

SHAPE = (2, CHUNK // 16 + 3, 24)        # more than a chunk an item, and no multiple of one
BOXES = np.arange(24) < 4
PARTS = {"y": TensorParts(("boxes", "scores"), ((~BOXES).astype(np.int32).reshape(1, 1, 24),) * 2)}


def runs():
    """Return outputs of two runs: boxes in pixels, scores below 1 and one infinite element."""
    random = np.random.default_rng(0)
    arrays = [(random.random(SHAPE) * np.where(BOXES, 300, 1)).astype(np.float32) for _ in range(2)]
    arrays[0][0, 0, 5] = -np.inf
    return [{"y": array} for array in arrays]


def noisy(reference, scale):
    random = np.random.default_rng(1)
    return [{"y": (np.where(np.isfinite(run["y"]), run["y"], 0) + scale * random.standard_normal(SHAPE)).astype(
        np.float32)} for run in reference]


def pairs(reference, outputs, where):
    return [(right[:, where], came[:, where]) for run, other in zip(reference, outputs, strict=True)
            for right, came in zip(run["y"], other["y"], strict=True)]


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_each_part_is_measured_as_by_the_measures(scale):
    reference = runs()
    outputs = noisy(reference, scale)
    errors = Reference(reference, PARTS).errors(outputs)
    by_part = {name: pairs(reference, outputs, where) for name, where in (("boxes", BOXES), ("scores", ~BOXES))}
    mean = {name: typical([powers(*pair) for pair in each]) for name, each in by_part.items()}
    assert errors.peak_db == pytest.approx(min(one.peak_snr_db for one in mean.values()))
    assert errors.sqnr_db == pytest.approx(min(one.sqnr_db for one in mean.values()))
    assert errors.cosine == pytest.approx(min(np.mean([cosine(*pair) for pair in each]) for each in by_part.values()))
    assert errors.part == ("y: boxes" if scale == 0.0 else "y: scores")
    assert errors.top1 is None


def test_a_reference_serves_any_number_of_comparisons():
    reference = runs()
    prepared = Reference(reference, PARTS)
    near, far = noisy(reference, 0.01), noisy(reference, 1.0)
    first = prepared.errors(near)
    assert prepared.errors(far).peak_db < first.peak_db - 30
    assert prepared.errors(near) == first


def test_values_that_became_0_are_a_fault():
    reference = runs()
    lost = [{"y": np.where(~BOXES & (run["y"] < 0.8), np.float32(0), run["y"])} for run in reference]
    errors = Reference(reference, PARTS).errors(lost)
    scores = pairs(reference, lost, ~BOXES)
    wanted = fault_of_int8(errors.sqnr_db, float(np.mean([zeroed(*pair) for pair in scores])))
    assert wanted and errors.fault == f"'y: scores': {wanted}"


def test_an_output_that_is_not_a_number_is_as_bad_as_can_be():
    reference = runs()
    outputs = noisy(reference, 0.01)
    outputs[1]["y"][0, 0, 0] = np.nan
    assert Reference(reference, PARTS).errors(outputs).peak_db == -np.inf


def test_zeros_are_equal_to_zeros_and_to_nothing_else():
    zeros, ones = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    reference = Reference([{"a": ones, "b": zeros}])
    assert reference.errors([{"a": ones, "b": zeros}]).cosine == 1.0
    assert reference.errors([{"a": -ones, "b": zeros}]).cosine == -1.0
