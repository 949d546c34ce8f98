"""Tests of ONNX Runtime's activations, alone and after a bias."""
import math

import numpy as np
import pytest

from tests.engines.frontend.one_node import check, imported, normal

EDGES = np.array([[-np.inf, np.inf, np.nan, 0, -0.0, 3e38]], np.float32)


@pytest.mark.parametrize("op", ["Gelu", "FastGelu", "QuickGelu"])
@pytest.mark.parametrize("shape", [(4,), (2, 3, 5)])
def test_an_activation_is_what_onnx_runtime_computes(op, shape):
    check(op, [normal(*shape) * 3])


@pytest.mark.parametrize("alpha", [1.0, 2.0, -0.5])
def test_a_quick_gelu_has_a_slope(alpha):
    check("QuickGelu", [normal(3, 4)], alpha=alpha)


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_a_bias_goes_before_the_activation(op, shape):
    check(op, [normal(*shape), normal(8)])


def test_a_half_is_multiplied_by_the_gelu_of_the_other():
    x, bias = normal(2, 3, 8), normal(8)
    left, right = np.split(x + bias, 2, axis=-1)
    gelu = right * (1 + np.vectorize(math.erf)(right / math.sqrt(2))) / 2
    np.testing.assert_allclose(imported("BiasSplitGelu", [x, bias])["o0"], left * gelu, 1e-5, 1e-6)


def test_a_bias_and_what_skipped_a_layer_are_added():
    x, bias, skip = normal(2, 3, 8), normal(8), normal(2, 3, 8)
    np.testing.assert_allclose(imported("BiasAdd", [x, bias, skip])["o0"], x + bias + skip, 1e-5, 1e-6)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_goes_before_the_activation(with_bias):
    x, weights, bias = normal(2, 3, 8), normal(8, 5), normal(5) * with_bias
    product = x @ weights + bias
    expected = product / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (product + 0.044715 * product ** 3)))
    inputs = [x, weights, bias] if with_bias else [x, weights]
    np.testing.assert_allclose(imported("GemmFastGelu", inputs)["o0"], expected, 1e-4, 1e-5)
