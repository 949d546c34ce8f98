"""Pictures of all modes are read as Pillow's users expect."""
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infer_server.calibration.open_data import open_calibration_data
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor

X = IoTensor("x", "uint8", ("batch", 8, 8, 3))
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)


def read(path: Path) -> Array:
    item, = open_calibration_data(path.parent, [X])
    return item["x"][0]


def opaque(mode: str) -> Image.Image:
    picture = Image.fromarray(PIXELS).convert(mode.rstrip("a"))
    if mode.endswith("a"):
        picture.putalpha(Image.fromarray(PIXELS[..., 0]))
    return picture


@pytest.mark.parametrize("mode, suffix", [
    ("RGB", "png"), ("L", "png"), ("La", "png"), ("RGBa", "png"), ("1", "png"), ("P", "png"), ("CMYK", "tiff"),
    ("CMYK", "jpg"), ("YCbCr", "jpg"), ("L", "jpg")])
def test_a_mode_is_read_as_by_pillow(tmp_path: Path, mode: str, suffix: str) -> None:
    opaque(mode).save(tmp_path / f"x.{suffix}")
    expected = Image.open(tmp_path / f"x.{suffix}").convert("RGB")
    np.testing.assert_array_equal(read(tmp_path / f"x.{suffix}"), np.asarray(expected))


def test_a_palette_with_a_transparent_colour_keeps_its_colours(tmp_path: Path) -> None:
    picture = Image.fromarray(PIXELS).quantize(16)
    picture.save(tmp_path / "x.png", transparency=3)
    np.testing.assert_array_equal(read(tmp_path / "x.png"), np.asarray(picture.convert("RGB")))


def test_16_bits_are_divided_by_256_where_pillow_clips_them(tmp_path: Path) -> None:
    Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257).save(tmp_path / "x.png")
    np.testing.assert_array_equal(read(tmp_path / "x.png"), np.repeat(PIXELS[..., :1], 3, axis=2))


@pytest.mark.parametrize("suffix, orientation, told", [("jpg", 6, True), ("png", 3, True), ("jpg", 1, False)])
def test_an_exif_orientation_is_told_and_not_applied(tmp_path: Path, suffix: str, orientation: int, told: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(PIXELS).save(tmp_path / f"x.{suffix}", exif=exif)
    found = open_calibration_data(tmp_path, [X]).warnings
    assert any("EXIF orientation (x." in doubt for doubt in found) is told
    np.testing.assert_array_equal(read(tmp_path / f"x.{suffix}"), np.asarray(Image.open(tmp_path / f"x.{suffix}")))
