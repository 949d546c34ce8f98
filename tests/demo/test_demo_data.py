"""The demo's model and images are what scripts/demo_data/README.md says."""
from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

from infer_server.engines.preprocess import load_preprocess

DATA = Path(__file__).resolve().parents[2] / "scripts" / "demo_data"


def images(folder: str) -> dict[str, NDArray[np.uint8]]:
    """File name without its ending -> pixels [28, 28]; an image of another shape or kind fails here."""
    actual = {}
    for path in sorted((DATA / folder).glob("*.png")):
        with Image.open(path) as image:
            assert (image.mode, image.size) == ("L", (28, 28)), path
            actual[path.stem] = np.asarray(image)
    return actual


def test_the_images_are_small_grey_and_labelled_by_their_names() -> None:
    for folder, count in (("calibration", 128), ("test", 500)):
        actual = images(folder)
        assert len(actual) == count
        labels = Counter(name.split("-")[0] for name in actual)
        assert set(labels) == set("0123456789")
        assert min(labels.values()) > count / 20, "each digit occurs at least half as often as an even share"


def test_no_image_is_both_calibrated_with_and_tested_with() -> None:
    pixels = [image.tobytes() for folder in ("calibration", "test") for image in images(folder).values()]
    assert len(set(pixels)) == len(pixels)


def test_the_model_keeps_its_batch_norms_and_has_a_symbolic_batch() -> None:
    model = onnx.load(DATA / "model.onnx")
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["BatchNormalization"] == operators["Conv"] == 15
    assert operators["Add"] == 6
    batch = [value.type.tensor_type.shape.dim[0] for value in (*model.graph.input, *model.graph.output)]
    assert [dim.dim_param for dim in batch] == ["N", "N"]
    assert [entry.version for entry in model.opset_import] == [17]


def test_the_model_reads_the_test_digits_as_well_as_promised() -> None:
    paths = sorted((DATA / "test").glob("*.png"))
    labels = np.array([int(path.name.split("-")[0]) for path in paths])
    preprocess = load_preprocess(DATA / "preprocess.toml")
    pixels = np.concatenate([preprocess.apply(path, ["N", 1, 28, 28]) for path in paths])
    session = onnxruntime.InferenceSession(DATA / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": pixels})
    assert (logits.argmax(1) == labels).mean() == pytest.approx(0.99, abs=0.002)
