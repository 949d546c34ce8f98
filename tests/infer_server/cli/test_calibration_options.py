"""Tests of --calib with each kind of argument, and of --calib-cache."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.calibration.table import read_table
from tests.infer_server.cli.commands import UNTIMED, Workshop
from tests.zoo import images_for

OPTIONS = ("--int8", "--calibrator", "minmax", *UNTIMED)
SCRIPT = """
import numpy as np

def feeds():
    random = np.random.default_rng(0)
    for _ in range(2):
        yield {"input": random.standard_normal((4, 3, SIZE, SIZE), np.float32)}
"""


def folder_of_images(workshop: Workshop) -> str:
    folder = workshop.folder / "photos"
    folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(4):
        Image.fromarray(random.integers(0, 256, (40, 50, 3), np.uint8)).save(folder / f"{index}.png")
    return str(folder)


def folder_of_arrays(workshop: Workshop) -> str:
    (workshop.folder / "arrays").mkdir()
    for index, item in enumerate(images_for(workshop.model, 4, seed=100)):
        np.savez(workshop.folder / "arrays" / f"{index}.npz", input=item)
    return workshop.path("arrays")


def one_archive(workshop: Workshop) -> str:
    return workshop.calibration()


def script(workshop: Workshop) -> str:
    size = workshop.feeds(1)["input"].shape[-1]
    Path(workshop.path("data.py")).write_text(SCRIPT.replace("SIZE", str(size)))
    return workshop.path("data.py:feeds")


@pytest.mark.parametrize("form", [folder_of_images, folder_of_arrays, one_archive, script])
def test_calibration_data_may_be(form, workshop: Workshop) -> None:
    engine = workshop.built("--calib", form(workshop), *OPTIONS)
    assert engine.plan.metadata["calibrator"] == "minmax"
    assert sqnr_db(workshop.expected(), engine.run(workshop.feeds())["output"]) > 6


def test_data_that_is_not_there_is_named_with_what_it_may_be(workshop: Workshop) -> None:
    assert workshop.build("--calib", workshop.path("nothing"), *OPTIONS) == 2
    assert "nothing does not exist" in workshop.said and "script.py:function" in workshop.said


def test_data_of_other_names_than_the_inputs_is_refused(workshop: Workshop) -> None:
    np.savez(workshop.path("other.npz"), pixels=workshop.feeds()["input"])
    assert workshop.build("--calib", workshop.path("other.npz"), *OPTIONS) == 2
    assert "pixels" in workshop.said and "input" in workshop.said


def test_calibration_data_for_a_float_build_is_refused(workshop: Workshop) -> None:
    assert workshop.build("--calib", workshop.calibration()) == 2
    assert "--int8" in workshop.said


def test_a_calibration_cache_stands_in_for_the_data(workshop: Workshop) -> None:
    cache = ("--calib-cache", workshop.path("ranges.json"))
    first = workshop.built("--calib", workshop.calibration(), *cache, *OPTIONS)
    second = workshop.built(*cache, "--tensorrt-cache", workshop.path("trt.cache"), "8.6.1", *OPTIONS,
                            output="second.plan")
    for tensor, (_, high) in read_table(workshop.path("trt.cache")).ranges.items():
        assert np.isclose(high, np.abs(read_table(cache[1]).ranges[tensor]).max(), rtol=1e-6)
    np.testing.assert_array_equal(second.run(workshop.feeds())["output"], first.run(workshop.feeds())["output"])


def test_a_cache_for_tensorrt_needs_ranges_and_a_version_that_reads_one(workshop: Workshop) -> None:
    assert workshop.build("--tensorrt-cache", workshop.path("trt.cache"), "11.0.0", *OPTIONS) == 2
    assert "give that, too" in workshop.said and "'11.0.0' is not a version of TensorRT that reads" in workshop.said


def test_a_calibration_cache_that_is_not_there_yet_needs_data(workshop: Workshop) -> None:
    assert workshop.build("--calib-cache", workshop.path("ranges.json"), *OPTIONS) == 2
    assert "ranges.json does not exist" in workshop.said and "give --calib" in workshop.said
