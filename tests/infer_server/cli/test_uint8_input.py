"""Tests of --uint8-input: requests carry decoded pixels, which the engine normalises."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.coverage import writes_border
from infer_server.engines.preprocess import IMAGENET
from tests.infer_server.cli.commands import UNTIMED, Workshop
from tests.infer_server.cli.test_calibration_options import folder_of_images
from tests.zoo import run_onnx


def pixels_for(workshop: Workshop) -> Array:
    items, channels, height, width = workshop.feeds()["input"].shape
    return np.random.default_rng(1).integers(0, 256, (items, height, width, channels), np.uint8)


def expected_of(workshop: Workshop, pixels: Array) -> Array:
    """Return ONNX Runtime's output for the normalised pixels."""
    values = (pixels * IMAGENET.scale - np.array(IMAGENET.mean)) / np.array(IMAGENET.std)
    return run_onnx(workshop.model, {"input": np.ascontiguousarray(values.transpose(0, 3, 1, 2), np.float32)})["output"]


@pytest.mark.parametrize(("precision", "decibels"), [("fp32", 80), ("int8", 15)])
def test_an_engine_takes_pixels(workshop: Workshop, precision: str, decibels: float) -> None:
    data = ("--calib", folder_of_images(workshop)) if precision == "int8" else ()
    engine = workshop.built(f"--{precision}", *data, "--uint8-input", "--preprocess", "imagenet", *UNTIMED)
    pixels = pixels_for(workshop)
    assert engine.inputs[0].dtype == "uint8" and engine.inputs[0].shape == ("batch", *pixels.shape[1:])
    assert sqnr_db(expected_of(workshop, pixels), engine.run({"input": pixels})["output"]) > decibels


def test_normalising_and_arranging_the_pixels_is_one_kernel(workshop: Workshop) -> None:
    options = ("--int8", "--calib", folder_of_images(workshop), "--preprocess", "imagenet", *UNTIMED)
    pixels, floats = workshop.built(*options, "--uint8-input", output="pixels.plan"), workshop.built(*options)
    kernels, others = ([step for step in engine.plan.machine.steps if not writes_border(step)]
                       for engine in (pixels, floats))
    assert len(kernels) == len(others) and not [step for step in kernels if step.fallback]


def test_calibration_images_are_given_as_the_engine_takes_them(workshop: Workshop) -> None:
    photos = folder_of_images(workshop)
    engine = workshop.built("--int8", "--calib", photos, "--uint8-input", "--preprocess", "imagenet", *UNTIMED)
    recorded = engine.plan.metadata["preprocess"]
    assert (recorded["layout"], recorded["scale"], recorded["mean"]) == ("NHWC", 1.0, [0.0])


def test_pixels_without_a_normalisation_are_refused(workshop: Workshop) -> None:
    assert workshop.build("--uint8-input", *UNTIMED) == 2
    assert "--uint8-input needs --preprocess" in workshop.said


def test_a_model_without_such_an_input_says_which_it_has(workshop: Workshop) -> None:
    assert workshop.build("--uint8-input", "--preprocess", "gray", *UNTIMED) == 2
    assert "images of 1 channels" in workshop.said and "'input' float32[batch,3," in workshop.said
