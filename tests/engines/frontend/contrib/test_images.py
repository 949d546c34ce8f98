"""Tests of ONNX Runtime's operators that sample images."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from tests.engines.frontend.one_node import check, imported, normal


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [0, 1])
def test_a_grid_samples_an_image(mode, padding, corners):
    grid = np.random.default_rng(5).uniform(-1.3, 1.3, (2, 4, 5, 2)).astype(np.float32)
    check("GridSample", [normal(2, 3, 6, 7), grid], mode=mode, padding_mode=padding, align_corners=corners, atol=1e-4)


# No sample of these is in the middle between two pixels, which one may call nearest to either.
REGIONS = np.float32([[0.12, 0.2, 0.8, 0.7], [0, 0, 0.96, 0.98], [-0.3, 0.5, 0.6, 1.4], [0.94, 0.6, 0.2, 0.1]])


@pytest.mark.parametrize("size", [(3, 4), (1, 1), (1, 5)])
@pytest.mark.parametrize("attrs", [{}, {"mode": "nearest"}, {"extrapolation_value": 2.5}])
def test_regions_of_images_are_cut_out_in_one_size(size, attrs):
    inputs = [normal(2, 3, 6, 7), REGIONS, np.array([1, 0, 0, 1], np.int32), np.array(size, np.int32)]
    check("CropAndResize", inputs, (3,), atol=1e-4, **attrs)


@pytest.mark.parametrize("op, inputs, constants", [
    ("GridSample", [normal(2, 3, 6, 7), normal(2, 4, 5, 2)], ()),
    ("CropAndResize", [normal(2, 3, 6, 7), REGIONS, np.zeros(4, np.int32), np.array([2, 2], np.int32)], (3,))])
def test_an_unknown_mode_is_refused(op, inputs, constants):
    with pytest.raises(ModelError, match="mode is 'lanczos', but must be one of bilinear"):
        imported(op, inputs, constants, mode="lanczos")
