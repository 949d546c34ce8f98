import base64
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest

from infer_server.calibration.histogram import Histogram
from infer_server.calibration.table import (
    CalibrationTable,
    load_or_make,
    make_table,
    merged_table,
    read_table,
    write_table,
    write_tensorrt,
)
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.recipe import packed_steps, unpacked_steps

TABLE = CalibrationTable("mse", "abc123", 64, {"x": (-0.1, 2.5), "layer: 1/relu": (0.0, 6.0)})
ROUNDED = np.arange(-3, 3, dtype=np.int8).reshape(2, 3)


def test_our_cache_comes_back_equal(tmp_path):
    write_table(TABLE, tmp_path / "calib.json")
    assert read_table(tmp_path / "calib.json") == TABLE


def test_the_rounding_of_weights_comes_back_equal(tmp_path):
    rounded = replace(TABLE, rounding={"y": packed_steps(ROUNDED)}, unsmoothed={"x": (0.0, 2.0)})
    write_table(rounded, tmp_path / "c.json")
    table = read_table(tmp_path / "c.json")
    np.testing.assert_array_equal(unpacked_steps(table.rounding["y"], (2, 3)), ROUNDED)
    assert table.unsmoothed == {"x": (0.0, 2.0)}


def test_scaled_rows_come_back_equal_and_older_caches_have_none(tmp_path):
    cache = tmp_path / "c.json"
    write_table(replace(TABLE, scaled_rows=("n", "m")), cache)
    assert read_table(cache).scaled_rows == ("n", "m")
    document = json.loads(cache.read_text())
    del document["scaled_rows"]
    cache.write_text(json.dumps(document))
    assert read_table(cache) == TABLE


@pytest.mark.parametrize("text", ["", "?", "AAAA", packed_steps(np.zeros(1 << 20, np.int8))])
def test_a_damaged_rounding_is_ignored(text):
    assert unpacked_steps(text, (2, 3)) is None


def test_a_tensorrt_cache_gives_symmetric_ranges(tmp_path):
    cache = tmp_path / "calib.cache"
    cache.write_text("TRT-8510-EntropyCalibration2\nprob: 3c010a14\n(Unnamed Layer* 3) [Shuffle]: out: 4000890a\n")
    table = read_table(cache)
    assert table.calibrator == "TRT-8510-EntropyCalibration2"
    assert table.ranges["prob"] == pytest.approx((-2048.5 / 2048, 2048.5 / 2048), rel=1e-7)
    assert table.ranges["(Unnamed Layer* 3) [Shuffle]: out"][1] == pytest.approx(2048.5 * 255 / 2048, rel=1e-7)


def test_a_cache_for_tensorrt_has_its_version_and_the_bits_of_symmetric_scales(tmp_path):
    table = CalibrationTable("mse", "abc123", 64, {
        "a: b": (-2048.5 / 2048, 0.5), "zero": (0.0, 0.0), "relu": (0.0, 127.0), "smooth": (0.0, 1.0),
        "known": (0.0, 1.0)},
        smoothing={"smooth": (1.0, 2.0), "known": (1.0, 2.0)}, unsmoothed={"known": (0.0, 254.0)})
    assert write_tensorrt(table, tmp_path / "calib.cache", (8, 6, 1)) == ["zero", "smooth"]
    assert (tmp_path / "calib.cache").read_text() == "TRT-8601-EntropyCalibration2\na: b: 3c010a14\nrelu: 3f800000\n" \
        "known: 40000000\n"
    assert read_table(tmp_path / "calib.cache").ranges["relu"] == (-127, 127)
    write_tensorrt(table, tmp_path / "calib.cache", (10, 3, 0))
    assert (tmp_path / "calib.cache").read_text().startswith("TRT-100300-")
    with pytest.raises(CalibrationError, match="cannot write the calibration cache"):
        write_tensorrt(table, tmp_path, (10, 3, 0))


def test_entropy_of_a_uniform_tensor_is_the_range_that_tensorrt_has(tmp_path):
    histogram = Histogram()
    histogram.observe(np.linspace(0, 1, 100_001))
    (tmp_path / "calib.cache").write_text("TRT-8510-EntropyCalibration2\nprob: 3c010a14\n")
    tensorrt = read_table(tmp_path / "calib.cache").ranges["prob"]
    low, high = make_table("entropy", "", 1, {"prob": histogram}).ranges["prob"]
    assert np.float32(max(-low, high) / 127) == np.float32(tensorrt[1] / 127)


@pytest.mark.parametrize("text, complaint", [
    ("", "no calibration cache"),
    ("hello", "no calibration cache"),
    ("{", "not JSON"),
    ("{}", "format None"),
    ("TRT-8510-EntropyCalibration2\nx 3c010a14", "line 2"),
    ("TRT-8510-EntropyCalibration2\nx: 3c01", "line 2"),
    ("TRT-8510-EntropyCalibration2\nx: zzzzzzzz", "line 2"),
    ("TRT-8510-EntropyCalibration2\nx: 7fc00000", "finite"),
    ("TRT-8510-EntropyCalibration2\nx: bc010a14", "hold zero"),
])
def test_a_broken_cache_is_an_error_that_names_it(tmp_path, text, complaint):
    (tmp_path / "broken").write_text(text)
    with pytest.raises(CalibrationError, match=complaint) as caught:
        read_table(tmp_path / "broken")
    assert "broken" in str(caught.value)


@pytest.mark.parametrize("change, complaint", [
    ({"version": 4}, "version 4"), ({"extra": 1}, "fields"), ({"items": "many"}, "wrong type"),
    ({"ranges": {"x": [1]}}, "wrong type"), ({"ranges": [1]}, "wrong type"), ({"ranges": {"x": [1, 2]}}, "hold zero")])
def test_our_format_is_read_strictly(tmp_path, change, complaint):
    path = tmp_path / "calib.json"
    write_table(TABLE, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CalibrationError, match=complaint):
        read_table(path)


def test_a_missing_cache_is_made_and_then_read(tmp_path):
    path = tmp_path / "calib.json"
    assert load_or_make(path, "abc123", lambda: TABLE).table == TABLE
    again = load_or_make(path, "abc123", make=lambda: pytest.fail("calibrated again"))
    assert again.table == TABLE
    assert "64 items" in again.note


def test_a_cache_of_another_graph_or_calibrator_is_replaced(tmp_path):
    path = tmp_path / "calib.json"
    other = CalibrationTable("entropy", "def456", 64, {"x": (0.0, 1.0)})
    write_table(TABLE, path)
    assert "another model" in load_or_make(path, "def456", lambda: other).note
    assert read_table(path) == other
    assert "mse is requested" in load_or_make(path, "def456", lambda: TABLE, calibrator="mse").note


def test_a_cache_without_ranges_for_some_tensors_of_a_shape_is_made_again_and_keeps_what_it_had(tmp_path):
    path = tmp_path / "calib.cache"
    other = CalibrationTable(TABLE.calibrator, TABLE.model_hash, 64, {"of another shape": (0.0, 1.0)})
    write_table(TABLE, path)
    assert "taken" in load_or_make(path, TABLE.model_hash, lambda: other, tensors=list(TABLE.ranges)).note
    found = load_or_make(path, TABLE.model_hash, lambda: other, tensors=["of another shape"])
    assert "no ranges for 1 tensors" in found.note
    assert found.table.ranges == {**TABLE.ranges, **other.ranges} and read_table(path) == found.table


def test_a_tensorrt_cache_is_taken_for_any_graph(tmp_path):
    path = tmp_path / "calib.cache"
    path.write_text("TRT-8510-EntropyCalibration2\nlayer: 1/relu: 3d418306\n")
    found = load_or_make(path, "def456", make=lambda: pytest.fail("calibrated again"))
    assert found.table.ranges["layer: 1/relu"] == pytest.approx((-6.0, 6.0))


# ---- partial calibrations
def partial(path, values, calibrator="percentile", model_hash="abc123"):
    """Write the cache of a calibration on these values; return its histogram."""
    histogram = Histogram()
    histogram.observe(values)
    table = make_table(calibrator, model_hash, len(values), {"x": histogram})
    write_table(replace(table, histograms={"x": histogram}), path)
    return histogram


def test_partial_calibrations_give_the_ranges_of_the_whole(tmp_path):
    values = np.random.default_rng(0).standard_normal((300, 50)).astype(np.float32) * np.float32(3)
    values[200:] *= 40
    for name, part in {"a": values[:100], "b": values[100:200], "c": values[200:]}.items():
        partial(tmp_path / f"{name}.json", part)
    whole = Histogram()
    whole.observe(values)
    for names in ("abc", "cab"):
        merged = merged_table([tmp_path / f"{name}.json" for name in names], "abc123")
        assert merged == make_table("percentile", "abc123", 300, {"x": whole})
        np.testing.assert_array_equal(merged.histograms["x"].counts, whole.counts)
    assert merged_table([tmp_path / "a.json"], "abc123", "mse").calibrator == "mse"
    assert (tmp_path / "a.json").stat().st_size < 100_000


def test_partial_calibrations_that_do_not_fit_are_refused(tmp_path):
    partial(tmp_path / "a.json", np.ones((4, 2), np.float32))
    partial(tmp_path / "mse.json", np.ones((4, 2), np.float32), "mse")
    write_table(TABLE, tmp_path / "search.json")
    for files, model_hash, fault in ((("a", "mse"), "abc123", "of percentile and mse: name one"),
                                     (("a", "search"), "abc123", "search.json has no histograms"),
                                     (("a", "mse"), "def456", "a.json is of another model")):
        with pytest.raises(CalibrationError, match=fault):
            merged_table([tmp_path / f"{file}.json" for file in files], model_hash)


@pytest.mark.parametrize("damage", [
    {"counts": "!"}, {"counts": base64.b64encode(zlib.compress(bytes(1 << 24))).decode()}, {"exponent": 4000},
    {"extremes": [0.0]}, {"extremes": [-1e30, 1.0]}, {"counts": None}])
def test_damaged_histograms_are_refused(tmp_path, damage):
    partial(tmp_path / "a.json", np.ones((4, 2), np.float32))
    document = json.loads((tmp_path / "a.json").read_text())
    document["histograms"]["x"] |= damage
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match="histogram"):
        read_table(tmp_path / "a.json")
