import numpy as np
import pytest
from onnx import parser
from PIL import Image

from infer_server.calibration import Calibration
from infer_server.calibration.collect import collect
from infer_server.calibration.open_data import open_calibration_data
from infer_server.engines import build_engine
from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import IMAGENET, PRESETS, Preprocess

X = IoTensor("x", "float32", ("batch", 3, 8, 8))
MASK = IoTensor("mask", "int64", ("batch", "length"))


@pytest.fixture
def photos(tmp_path):
    """Five pictures in nested folders, and files that are none."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for i in range(5):
        path = folder / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 20, 3), np.uint8)).save(path)
    (folder / "labels.json").write_text("{}")
    (folder / ".DS_Store").write_bytes(b"\0")
    return folder


def arrays_of(data, name="x"):
    return np.concatenate([item[name] for item in data])


# ---- images
def test_a_folder_of_images_is_counted_streamed_and_read_again(photos):
    data = open_calibration_data(str(photos), [X])
    assert data.count == 5
    first = arrays_of(data)
    assert first.shape == (5, 3, 8, 8) and first.dtype == np.float32
    np.testing.assert_array_equal(arrays_of(data), first)
    np.testing.assert_array_equal(first[0], IMAGENET.apply(photos / "class0" / "0.png", X.shape)[0])


def test_without_preprocessing_three_channels_get_imagenet_and_the_note_says_so(photos):
    data = open_calibration_data(photos, [X])
    assert data.preprocess == IMAGENET.fit(X.shape)
    assert "'imagenet' preset" in data.note
    assert open_calibration_data(photos, [X], IMAGENET).note == ""


def test_one_channel_gets_gray(photos):
    data = open_calibration_data(photos, [IoTensor("x", "float32", ("batch", 1, 8, 8))])
    assert "'gray' preset" in data.note
    assert arrays_of(data).shape == (5, 1, 8, 8)


def test_an_integer_input_gets_whole_bytes(photos):
    values = arrays_of(open_calibration_data(photos, [IoTensor("x", "uint8", ("batch", 8, 8, 3))]))
    assert values.dtype == np.uint8 and values.max() > 150


def test_images_for_a_model_that_takes_none_are_an_error(photos):
    with pytest.raises(ConfigError, match="neither 3 channels nor 1"):
        open_calibration_data(photos, [IoTensor("x", "float32", ("batch", 16))])
    with pytest.raises(CalibrationError, match="the model has 2 inputs"):
        open_calibration_data(photos, [X, MASK])
    with pytest.raises(CalibrationError, match="does not take them one by one"):
        open_calibration_data(photos, [IoTensor("x", "float32", (4, 3, 8, 8))])
    with pytest.raises(ConfigError, match="GRAY pictures"):
        open_calibration_data(photos, [X], PRESETS["gray"])


def test_a_torn_image_is_named(photos):
    (photos / "class1" / "torn.jpg").write_bytes(b"no picture")
    data = open_calibration_data(photos, [X])
    with pytest.raises(CalibrationError, match="torn.jpg"):
        list(data)


# ---- arrays
def test_one_npz_holds_items_on_the_leading_axis(tmp_path):
    x = np.random.default_rng(1).standard_normal((6, 3, 8, 8))
    mask = np.arange(24).reshape(6, 4)
    np.savez(tmp_path / "data.npz", x=x, mask=mask)
    data = open_calibration_data(tmp_path / "data.npz", [X, MASK])
    assert data.count == 6
    np.testing.assert_array_equal(arrays_of(data), x.astype(np.float32))
    np.testing.assert_array_equal(arrays_of(data, "mask"), mask)


def test_a_folder_of_npz_files_may_hold_items_with_and_without_the_batch_axis(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 8, 8), np.float32))
    np.savez_compressed(tmp_path / "b.npz", x=np.ones((1, 3, 8, 8), np.float32))
    np.savez(tmp_path / "c.npz", x=np.full((2, 3, 8, 8), 2, np.float32))
    data = open_calibration_data(tmp_path, [X])
    assert data.count == 4
    assert arrays_of(data)[:, 0, 0, 0].tolist() == [0, 1, 2, 2]


def test_npy_files_serve_a_model_of_one_input(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 3, 8, 8), np.float32))
    assert open_calibration_data(tmp_path, [X]).count == 2
    with pytest.raises(CalibrationError, match="an .npy file has no names"):
        open_calibration_data(tmp_path, [X, MASK])


def test_a_model_with_a_fixed_batch_takes_whole_inputs(tmp_path):
    fixed = IoTensor("x", "float32", (4, 3, 8, 8))
    np.save(tmp_path / "a.npy", np.ones((4, 3, 8, 8), np.float32))
    data = open_calibration_data(tmp_path, [fixed])
    assert data.count == 1
    assert [feed["x"].shape for feed in data.batches(8)] == [(4, 3, 8, 8)]


@pytest.mark.parametrize("arrays, complaint", [
    ({"y": np.zeros((1, 3, 8, 8), np.float32)}, r"holds \['y'\]; the model's inputs are \['x'\]"),
    ({"x": np.zeros((1, 3, 8, 9), np.float32)}, r"shape \[1, 3, 8, 9\]; the model takes \[batch, 3, 8, 8\]"),
    ({"x": np.zeros((8, 8), np.float32)}, "shape"),
    ({"x": np.zeros((1, 3, 8, 8), np.uint8)}, "is uint8; the model takes float32"),
    ({"x": np.array([None])}, "is object")])
def test_arrays_that_are_not_the_models_are_refused_when_opened(tmp_path, arrays, complaint):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(CalibrationError, match=complaint) as caught:
        open_calibration_data(tmp_path / "data.npz", [X])
    assert "data.npz" in str(caught.value)


def test_inputs_with_different_numbers_of_items_are_refused(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 3, 8, 8), np.float32), mask=np.zeros((3, 4), np.int64))
    with pytest.raises(CalibrationError, match="different numbers of items"):
        open_calibration_data(tmp_path / "data.npz", [X, MASK])


@pytest.mark.parametrize("name, content", [("a.npz", b"PK torn"), ("a.npy", b"\x93NUMPY\x01\x00torn"), ("a.npy", b"")])
def test_a_torn_array_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=f"{name} cannot be read"):
        open_calibration_data(tmp_path, [X])


def test_what_is_not_there_or_holds_nothing_is_an_error(tmp_path, photos):
    with pytest.raises(CalibrationError, match="does not exist"):
        open_calibration_data(tmp_path / "nowhere", [X])
    with pytest.raises(CalibrationError, match="neither images nor"):
        (tmp_path / "empty").mkdir()
        open_calibration_data(tmp_path / "empty", [X])
    with pytest.raises(CalibrationError, match="neither a folder nor"):
        open_calibration_data(photos / "labels.json", [X])
    with pytest.raises(CalibrationError, match="both images"):
        np.save(photos / "a.npy", np.zeros((3, 8, 8), np.float32))
        open_calibration_data(photos, [X])


# ---- scripts
def script(tmp_path, body):
    path = tmp_path / "feeds.py"
    path.write_text(f"import numpy as np\n{body}\n")
    return path


def test_a_function_yields_feeds_on_every_pass(tmp_path):
    path = script(tmp_path, "def feeds():\n for i in range(3): yield {'x': np.full((2, 3, 8, 8), i, np.float32)}")
    data = open_calibration_data(f"{path}:feeds", [X])
    assert data.count is None
    for _ in range(2):
        assert arrays_of(data)[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert len(list(data.limit(4))) == 4


@pytest.mark.parametrize("body, complaint", [
    ("def feeds():\n return iter(())", "holds no items"),
    ("def feeds():\n yield np.zeros(3)", "feed 0 is a ndarray; give dicts"),
    ("def feeds():\n yield {'y': np.zeros(3)}", "feed 0 holds"),
    ("def feeds():\n yield {}['z']", "KeyError"),
    ("def others():\n pass", "has no function 'feeds'"),
    ("1 / 0", "ZeroDivisionError")])
def test_what_goes_wrong_in_a_script_is_told_as_its_fault(tmp_path, body, complaint):
    path = script(tmp_path, body)
    with pytest.raises(CalibrationError, match=complaint) as caught:
        list(open_calibration_data(f"{path}:feeds", [X]))
    assert "feeds.py" in str(caught.value)


def test_a_script_needs_to_exist_and_its_function_to_be_named(tmp_path):
    with pytest.raises(CalibrationError, match="missing.py does not exist"):
        open_calibration_data(f"{tmp_path}/missing.py:feeds", [X])
    with pytest.raises(CalibrationError, match="say which function"):
        open_calibration_data(script(tmp_path, ""), [X])


# ---- batches
def test_batches_hold_all_items_in_order(photos):
    data = open_calibration_data(photos, [X])
    sizes = [data.items_in(feed) for feed in data.batches(2)]
    assert sizes == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in data.batches(2)]), arrays_of(data))


def test_items_of_unlike_shapes_never_share_a_batch(tmp_path):
    for i, length in enumerate((4, 4, 6, 4)):
        np.savez(tmp_path / f"{i}.npz", mask=np.ones((1, length), np.int64))
    data = open_calibration_data(tmp_path, [MASK])
    assert [feed["mask"].shape for feed in data.batches(8)] == [(2, 4), (1, 6), (1, 4)]


def test_limit_and_every_pick_items_and_keep_count(photos):
    data = open_calibration_data(photos, [X])
    everything = arrays_of(data)
    assert data.limit(3).count == 3 and data.limit(99).count == 5
    halves = data.every(2), data.every(2, start=1)
    assert [half.count for half in halves] == [3, 2]
    np.testing.assert_array_equal(arrays_of(halves[1]), everything[1::2])
    np.testing.assert_array_equal(arrays_of(data.every(2).limit(2)), everything[:3:2])


# ---- collecting
def test_collected_histograms_do_not_depend_on_the_batch_size(photos):
    data = open_calibration_data(photos, [X])

    def run(feed, show):
        for name, values in {"x": feed["x"], "relu": np.maximum(feed["x"], 0), "unwatched": feed["x"]}.items():
            show(name, values)

    one, three = (collect(run, data, ["x", "relu"], batch=batch) for batch in (1, 3))
    assert one.keys() == {"x", "relu"}
    for tensor in one:
        np.testing.assert_array_equal(one[tensor].counts, three[tensor].counts)
    assert one["relu"].low == 0.0 and one["relu"].count == 5 * 3 * 8 * 8


def test_a_tensor_that_is_missing_or_not_finite_is_named(photos):
    data = open_calibration_data(photos, [X])
    with pytest.raises(CalibrationError, match="did not show 'y'"):
        collect(lambda feed, show: show("x", feed["x"]), data, ["y"])
    with pytest.raises(CalibrationError, match="calibrating 'x', item 0: 192 of 192 values are not finite"):
        collect(lambda feed, show: show("x", feed["x"] * np.float32(np.nan)), data, ["x"])


def test_progress_is_told_in_items(photos):
    told = []
    collect(lambda feed, show: show("x", feed["x"]), open_calibration_data(photos, [X]), ["x"], batch=3,
            progress=lambda done, of: told.append((done, of)))
    assert told == [(3, 5), (5, 5)]


def test_images_for_any_height_and_width_get_the_size_that_the_model_is_built_for(photos):
    inputs = [IoTensor("x", "float32", ("batch", 3, "h", "w"))]

    def opened(usual, preprocess=None):
        data = open_calibration_data(photos, inputs, preprocess, usual)
        return next(data.batches(1))["x"].shape, data.note

    assert opened({"h": 12, "w": 20})[0] == (1, 3, 12, 20)
    assert "resized to 12x20; give --opt-shapes" in opened({"h": 12, "w": 20})[1]
    assert opened({})[0] == (1, 3, 224, 224)
    assert opened({"h": 12, "w": 20}, Preprocess(size=(8, 8))) == ((1, 3, 8, 8), "")


def test_a_build_calibrates_at_the_size_of_its_profile(photos):
    weights = ", ".join(str(0.01 * (i % 17 - 8)) for i in range(108))
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[n, 3, h, w] x) => '
                               f"(float[n, 4, a, b] y) <float[4, 3, 3, 3] k = {{{weights}}}> {{ y = Conv(x, k) }}")
    profile = {"x": ((1, 3, 12, 20),) * 3}
    build = build_engine(model, precision="int8", profiles=(profile,), timing=False, cache=False,
                         calibration=Calibration(photos, calibrator="minmax"))
    assert any("resized to 12x20" in notice for notice in build.notices)
