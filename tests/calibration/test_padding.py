"""Padded positions count neither in ranges nor in errors."""
import numpy as np
import pytest
from onnx import parser

from infer_server.calibration import Calibration
from infer_server.calibration.data.padding import Padding
from infer_server.engines import build_engine

MASK = np.array([[1, 1, 0], [1, 0, 0]])
VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
SENTENCES = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3, 4] x, int64[N, 3] attention_mask) => (float[N, 3, 4] y) '
    f"<float[4, 4] w = {{{', '.join(str(0.1 * (i % 5 - 2)) for i in range(16))}}}> "
    "{ m = Cast<to = 1>(attention_mask) axes = Constant<value_ints = [2]>() c = Unsqueeze(m, axes) "
    "a = MatMul(x, w) b = Mul(a, c) y = MatMul(b, w) }")


def test_padded_rows_are_left_out_of_tensors_with_the_axes_of_the_mask():
    padding = Padding({"attention_mask": MASK})
    expected = VALUES[[0, 0, 1], [0, 1, 0]]
    np.testing.assert_array_equal(padding.without(VALUES), expected)
    np.testing.assert_array_equal(padding.without(VALUES.reshape(6, 4)), expected)
    assert padding.count == 3
    zeroed = padding.zeroed(VALUES)
    np.testing.assert_array_equal(zeroed[MASK != 0], expected)
    assert not zeroed[MASK == 0].any()


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4)])
def test_items_have_their_own_rows(shape):
    items = list(Padding({"attention_mask": MASK}).by_item(VALUES.reshape(shape), 2))
    np.testing.assert_array_equal(items[0].reshape(-1, 4), VALUES[0, :2])
    np.testing.assert_array_equal(items[1].reshape(-1, 4), VALUES[1, :1])


@pytest.mark.parametrize("feed", [{}, {"attention_mask": np.ones((2, 3))}, {"attention_mask": np.zeros((2, 3))},
                                  {"attention_mask": MASK * -1e4}, {"attention_mask": MASK[None]}])
def test_what_is_no_mask_of_ones_and_zeros_leaves_tensors_as_they_are(feed):
    padding = Padding(feed)
    assert padding.without(VALUES) is VALUES and padding.zeroed(VALUES) is VALUES


def test_other_axes_stay():
    padding = Padding({"attention_mask": MASK})
    for values in (VALUES.reshape(2, 12), VALUES[..., None]):       # pooled; scores of three heads
        assert padding.without(values) is values


def test_padding_does_not_widen_the_ranges_of_a_build():
    def outputs(padded):
        random = np.random.default_rng(0)
        feeds = []
        for _ in range(8):
            x = random.standard_normal((1, 3, 4)).astype(np.float32)
            x[:, 2] *= padded
            feeds.append({"x": x, "attention_mask": np.array([[1, 1, 0]])})
        calibration = Calibration(feeds, calibrator="minmax")
        build = build_engine(SENTENCES, precision="int8", timing=False, cache=False, calibration=calibration)
        assert any("8 positions at which attention_mask is 0" in notice for notice in build.notices)
        return build.engine().run(feeds[0])["y"][:, :2]

    np.testing.assert_array_equal(outputs(1.0), outputs(1000.0))
