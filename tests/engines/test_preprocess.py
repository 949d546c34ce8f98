import json

import numpy as np
import pytest
from PIL import Image

from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.preprocess import IMAGENET, PRESETS, USUAL_SIZE, Preprocess, load_preprocess, opened

NCHW = ("batch", 3, 32, 32)


@pytest.fixture
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (60, 100, 3), np.uint8)
    return Image.fromarray(pixels)


def test_imagenet_is_resize_crop_normalise(picture):
    """The expected values follow torchvision's evaluation transform: shorter side to 37, centre 32x32, mean and std."""
    resized = picture.resize((round(100 * 37 / 60), 37), Image.Resampling.BICUBIC)
    left, top = (resized.width - 32) // 2, (37 - 32) // 2
    pixels = np.asarray(resized.crop((left, top, left + 32, top + 32)), np.float32) / 255
    expected = (pixels - np.float32([.485, .456, .406])) / np.float32([.229, .224, .225])
    result = IMAGENET.apply(picture, NCHW)
    assert result.dtype == np.float32 and result.shape == (1, 3, 32, 32)
    np.testing.assert_allclose(result[0], expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset, black, white", [
    ("unit", [0, 0, 0], [1, 1, 1]), ("raw", [0, 0, 0], [255, 255, 255]), ("inception", [-1, -1, -1], [1, 1, 1]),
    ("caffe", [-103.939, -116.779, -123.68], [151.061, 138.221, 131.32]), ("gray", [0], [1])])
def test_each_preset_sends_black_and_white_where_its_models_expect_them(preset, black, white):
    shape = ("batch", len(black), 8, 8)
    for colour, expected in (("black", black), ("white", white)):
        result = PRESETS[preset].apply(Image.new("RGB", (20, 20), colour), shape)
        np.testing.assert_allclose(result[0, :, 4, 4], expected, atol=1e-4)


def test_bgr_swaps_the_channels():
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    assert Preprocess(color="BGR").apply(red, ("n", 3, 8, 8))[0, :, 0, 0].tolist() == [0, 0, 1]


def test_the_layout_is_the_models(picture):
    first = IMAGENET.apply(picture, NCHW)
    last = IMAGENET.apply(picture, ("batch", 32, 32, 3))
    np.testing.assert_array_equal(first.transpose(0, 2, 3, 1), last)
    assert IMAGENET.fit(("batch", 32, 32, 3)).layout == "NHWC"


def test_exact_stretches_and_shorter_side_crops():
    halves = Image.new("RGB", (40, 20))
    halves.paste((255, 255, 255), (30, 0, 40, 20))      # the right quarter is white
    assert Preprocess(resize="exact", crop=1.0).apply(halves, ("n", 3, 8, 8))[0, 0, 4, 7] == 1
    assert Preprocess(resize="shorter-side", crop=1.0, interpolation="box").apply(halves, ("n", 3, 8, 8)).max() == 0


def test_a_size_that_is_not_square_is_covered_by_the_picture(picture):
    assert IMAGENET.apply(picture, ("batch", 3, 48, 24)).shape == (1, 3, 48, 24)
    assert IMAGENET.apply(picture, ("batch", 3, 24, 320)).shape == (1, 3, 24, 320)


def test_pictures_of_any_mode_are_read(tmp_path):
    for mode in ("1", "L", "P", "RGBA", "CMYK"):
        path = tmp_path / f"{mode}.tiff"
        Image.new(mode, (9, 9)).save(path)
        assert IMAGENET.apply(path, NCHW).shape == (1, 3, 32, 32)


def test_a_gray_picture_of_16_bits_is_the_same_in_8(tmp_path):
    gray = np.arange(256, dtype=np.uint16).reshape(16, 16)
    for bits, values in ((8, gray.astype(np.uint8)), (16, gray * 257)):
        Image.fromarray(values).save(tmp_path / f"{bits}.png")
    assert np.array_equal(opened(tmp_path / "16.png"), opened(tmp_path / "8.png"))


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    Image.new("P", (9, 9)).save(tmp_path / "logo.png", transparency=b"\x00\x80")
    assert IMAGENET.apply(tmp_path / "logo.png", NCHW).shape == (1, 3, 32, 32)


def test_a_file_that_is_no_picture_is_named(tmp_path):
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 torn")
    with pytest.raises(CalibrationError, match="torn.jpg cannot be read as an image"):
        IMAGENET.apply(tmp_path / "torn.jpg", NCHW)


def test_without_resizing_a_picture_must_have_the_size(picture):
    with pytest.raises(CalibrationError, match="100x60 and the model takes 32x32"):
        Preprocess(resize="none").apply(picture, NCHW)


def test_an_input_of_any_height_and_width_gets_pictures_of_the_usual_size():
    assert IMAGENET.fit(("n", 3, "h", "w")).size == USUAL_SIZE


@pytest.mark.parametrize("shape, complaint", [
    (("n", 10), "don't fit"), (("n", 1, 8, 8), "don't fit")])
def test_an_input_that_takes_no_such_pictures_is_an_error(shape, complaint):
    with pytest.raises(ConfigError, match=complaint):
        IMAGENET.fit(shape)


def test_a_declared_size_serves_symbolic_extents_and_must_agree_with_fixed_ones():
    assert Preprocess(size=(24, 32)).fit(("n", 3, "h", "w")).size == (24, 32)
    with pytest.raises(ConfigError, match=r"size = \[24, 32\], but the input's shape is \[n, 3, 8, 8\]"):
        Preprocess(size=(24, 32)).fit(("n", 3, 8, 8))


def test_what_is_recorded_in_the_plan_gives_the_same_pictures(picture):
    settled = IMAGENET.fit(NCHW)
    recorded = json.loads(json.dumps(settled.to_json()))
    again = Preprocess(**{name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items()})
    assert again == settled
    np.testing.assert_array_equal(again.apply(picture, NCHW), IMAGENET.apply(picture, NCHW))


# ---- TOML
def test_a_toml_file_changes_what_its_preset_says(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "imagenet"\nresize = "exact"\nsize = [24, 32]\nmean = 0.5\n')
    expected = Preprocess(resize="exact", size=(24, 32), mean=(0.5,), std=IMAGENET.std)
    assert load_preprocess(path) == expected


@pytest.mark.parametrize("text, complaint", [
    ('colour = "BGR"', "unknown option 'colour'; did you mean 'color'"),
    ('resize = "shortest-side"', "did you mean 'shorter-side'"),
    ('preset = "imagnet"', "did you mean 'imagenet'"),
    ("crop = 1.5", "crop = 1.5"),
    ('crop = "all"', "must be a number"),
    ("crop = true", "must be a number"),
    ("mean = [1, 2]", "mean has 2 numbers"),
    ("mean = []", "list of numbers"),
    ("std = 0", "must not be zero"),
    ("size = 224", "HEIGHT, WIDTH"),
    ("size = [224]", "two positive numbers"),
    ("size = [224, ", "mine.toml"),
    ("layout = 3", "one of auto, NCHW, NHWC")])
def test_a_toml_file_with_a_mistake_is_refused(tmp_path, text, complaint):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_preprocess(path)
    assert "mine.toml" in str(caught.value)


def test_neither_a_file_nor_a_preset_names_the_nearest_preset():
    with pytest.raises(ConfigError, match="did you mean 'inception'"):
        load_preprocess("inceptoin")


def test_a_picture_is_never_resized_to_far_more_than_is_kept_of_it(picture, monkeypatch):
    settled, resized, largest = IMAGENET.fit(NCHW), Image.Image.resize, []

    def recorded(image, size, *how):
        largest.append(size[0] * size[1])
        return resized(image, size, *how)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    whole = settled.pixels_of(picture).astype(int)
    for size in ((60_000, 1), (1, 60_000)):
        row = Image.fromarray(np.arange(60_000).astype(np.uint8).reshape(size[::-1]))
        assert settled.pixels_of(row).shape == (32, 32, 3)
        assert max(largest) <= 1 << 24
    monkeypatch.setattr("infer_server.engines.preprocess._MOST_RESIZED", 0)
    assert np.abs(settled.pixels_of(picture) - whole).max() <= 1, "the same part is kept"
