"""Operators that sample images, regions and categories give ONNX Runtime's results."""
import os

import numpy as np
import onnx
import pytest

from infer_server.engines.errors import ModelError
from infer_server.engines.ir.graph import Node
from infer_server.engines.ops import OPS
from tests.engines.frontend.one_node import check, imported, normal


def places(*shape):
    return np.random.default_rng(5).uniform(-1.4, 1.4, shape).astype(np.float32)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [0, 1])
def test_an_image_is_sampled(mode, padding, corners):
    attrs = {"domain": "", "padding_mode": padding, "align_corners": corners}
    inputs = [normal(2, 3, 6, 7), places(2, 4, 5, 2)]
    check("GridSample", inputs, mode=mode, version=20, atol=1e-4, **attrs)
    older = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    check("GridSample", inputs, mode=older, version=16, atol=1e-4, batch=True, **attrs)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_volume_is_sampled(mode, padding):
    check("GridSample", [normal(2, 3, 4, 6, 7), places(2, 4, 5, 2, 3)], mode=mode, padding_mode=padding, domain="",
          atol=1e-4)


def test_a_place_that_is_no_number_is_beyond_the_image():
    grid = np.float32([[[[np.nan, 0], [0, np.inf], [0, 0]]]])
    result = imported("GridSample", [np.ones((1, 1, 3, 3), np.float32), grid], domain="")["o0"]
    np.testing.assert_array_equal(result, [[[[0, 0, 1]]]])


@pytest.mark.parametrize("grid, version, attrs, message", [
    ((2, 4, 5, 3), 20, {}, "the grid's last axis must have a coordinate for each axis of the image"),
    ((3, 4, 5, 2), 20, {}, "the grid must have the image's batch size"),
    ((2, 4, 5, 2), 20, {"mode": "bilinear"}, "mode is 'bilinear', but must be one of linear, nearest, cubic"),
    ((2, 4, 5, 2), 16, {"mode": "linear"}, "mode is 'linear', but must be one of bilinear, nearest, bicubic"),
    ((2, 4, 5, 2), 20, {"padding_mode": "wrap"}, "attribute 'padding_mode' is 'wrap', but must be one of zeros")])
def test_what_does_not_fit_is_refused(grid, version, attrs, message):
    with pytest.raises(ModelError, match=message):
        imported("GridSample", [normal(2, 3, 6, 7), places(*grid)], domain="", version=version, **attrs)


@pytest.mark.parametrize("cells, scale", [((2, 2), 1.0), ((7, 7), 0.0625), ((3, 5), 0.25), ((1, 1), 0.5)])
def test_regions_are_pooled_also_where_they_reach_out_of_the_image(cells, scale):
    random = np.random.default_rng(3)
    corners = np.sort(random.uniform(-3, 20 / scale, (6, 2, 2)), axis=1).reshape(6, 4)
    regions = np.concatenate([random.integers(0, 2, (6, 1)), corners], axis=1).astype(np.float32)
    check("MaxRoiPool", [normal(2, 3, 17, 19), regions], pooled_shape=cells, spatial_scale=scale, domain="", version=17)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_categories_are_drawn_as_often_as_they_weigh(dtype):
    weights, number = np.float32([[0.1, 0.2, 0.7], [0.5, 0.5, 1e-12]]), 20000
    numbers = {"int32": onnx.TensorProto.INT32, "int64": onnx.TensorProto.INT64}
    drawn = imported("Multinomial", [np.log(weights)], sample_size=number, dtype=numbers[dtype], domain="")["o0"]
    assert drawn.dtype == dtype and drawn.shape == (2, number)
    counts = [np.bincount(row, minlength=3) / number for row in drawn]
    np.testing.assert_allclose(counts, weights, atol=0.03)      # eight standard deviations


def test_each_run_draws_anew_and_a_fork_draws_other_numbers_than_its_parent():
    node, even = Node("Multinomial", ("x",), ("y",), {"sample_size": 64}), np.zeros((1, 2), np.float32)
    first = OPS["Multinomial"].compute(node, even)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, OPS["Multinomial"].compute(node, even).tobytes())
        os._exit(0)
    second = OPS["Multinomial"].compute(node, even)
    of_child = np.frombuffer(os.read(read, first.nbytes), np.int32)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert len({drawn.tobytes() for drawn in (first, second, of_child)}) == 3
