"""Files that cannot be read are named and counted, and stop a build unless they are allowed."""
from pathlib import Path

import numpy as np
import pytest
from onnx import parser
from PIL import Image

from infer_server.calibration import Calibration
from infer_server.calibration.open_data import open_calibration_data
from infer_server.calibration.target.search import AccuracyTarget
from infer_server.engines import build_engine
from infer_server.engines.errors import CalibrationError
from infer_server.engines.plan.plan import IoTensor

X = IoTensor("x", "float32", ("batch", 3, 8, 8))
MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) '
    f"<float[4, 3, 1, 1] w = {{{', '.join(str(0.1 * (i % 7 - 3)) for i in range(12))}}}> {{ y = Conv(x, w) }}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of ten pictures, of which two are torn."""
    rng = np.random.default_rng(0)
    for i in range(10):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / f"{i}.png")
    for i in (3, 7):
        (tmp_path / f"{i}.png").write_bytes((tmp_path / f"{i}.png").read_bytes()[:80])
    return tmp_path


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Return a folder of six .npz files, of which two are torn."""
    rng = np.random.default_rng(0)
    for i in range(6):
        np.savez(tmp_path / f"{i}.npz", x=rng.standard_normal((1, 3, 8, 8)).astype(np.float32))
    values = bytearray((tmp_path / "2.npz").read_bytes())
    values[400:420] = bytes(20)
    (tmp_path / "2.npz").write_bytes(values)
    (tmp_path / "4.npz").write_bytes(b"none")
    return tmp_path


def test_the_first_corrupt_picture_stops_the_reading_and_all_are_counted(photos: Path) -> None:
    data = open_calibration_data(photos, [X])
    with pytest.raises(CalibrationError, match=r"2 of 10 files(?s:.)*--allow-corrupt:(?s:.)*3\.png(?s:.)*7\.png"):
        list(data)
    with pytest.raises(CalibrationError, match="2 of 10"):
        build_engine(MODEL, precision="int8", cache=False, timing=False, calibration=Calibration(photos, "minmax"))


def test_allowed_corrupt_pictures_are_left_out_and_told(photos: Path) -> None:
    data = open_calibration_data(photos, [X], allow_corrupt=True)
    assert data.corrupt.note == "" and len(list(data)) == 8
    assert data.corrupt.note.startswith("2 files of the calibration data could not be read (3.png, 7.png)")
    build = build_engine(MODEL, precision="int8", cache=False, timing=False,
                         calibration=Calibration(photos, "minmax", allow_corrupt=True))
    assert build.plan.metadata["calibration_items"] == 8
    assert any("(3.png, 7.png) and left out" in notice for notice in build.plan.metadata["notices"])


def test_corrupt_arrays_are_told_apart_from_those_of_another_model(arrays: Path) -> None:
    with pytest.raises(CalibrationError, match="2 of 6 files"):
        open_calibration_data(arrays, [X])
    data = open_calibration_data(arrays, [X], allow_corrupt=True)
    assert len(list(data)) == 4 and {file.name for file in data.corrupt.reasons} == {"2.npz", "4.npz"}
    np.savez(arrays / "9.npz", x=np.zeros((1, 3, 9, 9), np.float32))
    with pytest.raises(CalibrationError, match=r"9\.npz: 'x' has shape"):
        open_calibration_data(arrays, [X], allow_corrupt=True)


def test_evaluation_items_must_all_be_readable(photos: Path) -> None:
    feeds = [{"x": np.random.default_rng(i).standard_normal((1, 3, 8, 8)).astype(np.float32)} for i in range(8)]
    target = AccuracyTarget(0.5, "cosine", photos)
    with pytest.raises(CalibrationError, match="2 of 10 files"):
        build_engine(MODEL, precision="int8", cache=False, timing=False,
                     calibration=Calibration(feeds, "minmax", target=target, allow_corrupt=True))


def test_a_source_of_which_nothing_can_be_read_is_an_error(photos: Path) -> None:
    for file in photos.iterdir():
        file.write_bytes(b"none")
    with pytest.raises(CalibrationError, match="holds no items"):
        list(open_calibration_data(photos, [X], allow_corrupt=True))
