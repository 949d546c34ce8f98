"""Tests of ONNX Runtime's fused products and convolutions."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from tests.engines.frontend.one_node import check, imported, normal


@pytest.mark.parametrize("a, b, attrs", [
    ((3, 4), (4, 5), {}),
    ((3, 4), (4, 5), {"alpha": 0.125}),
    ((4, 3), (5, 4), {"transA": 1, "transB": 1, "alpha": 2.0}),
    ((2, 3, 4), (2, 5, 4), {"transB": 1}),
    ((2, 4, 3), (4, 5), {"transA": 1}),
    ((6, 2, 3, 4), (6, 2, 5, 4), {"transB": 1, "alpha": 0.5}),
    ((3, 2, 4), (2, 4, 5), {"transBatchA": 1}),
    ((3, 2, 6, 4), (2, 6, 4, 5), {"transBatchA": 1}),
    ((3, 2, 6, 4), (5, 2, 6, 4), {"transBatchA": 1, "transBatchB": 1, "transB": 1}),
    ((4, 2, 3), (2, 4, 5), {"transBatchA": 1, "transA": 1}),
])
def test_a_product_of_turned_matrices_is_what_onnx_runtime_computes(a, b, attrs):
    for constants in ((), (1,)):
        check("FusedMatMul", [normal(*a), normal(*b)], constants, **attrs)


def test_a_product_under_its_first_name_is_the_same():
    check("TransposeMatMul", [normal(4, 3), normal(5, 4)], transA=1, transB=1, alpha=0.5)


ACTIVATIONS = [{"activation": "Relu"}, {"activation": "Tanh"}, {"activation": "Sigmoid"},
               {"activation": "LeakyRelu", "activation_alpha": 0.3},
               {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4}]


@pytest.mark.parametrize("attrs", ACTIVATIONS)
@pytest.mark.parametrize("more", [{}, {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}])
def test_an_activation_follows_a_gemm(attrs, more):
    a, b = (normal(4, 3), normal(5, 4)) if more else (normal(3, 4), normal(4, 5))
    check("FusedGemm", [a, b, normal(5)], **attrs, **more)


def of_conv(attrs):
    given = {key: value for key, value in attrs.items() if key == "activation"}
    parameters = [attrs[key] for key in ("activation_alpha", "activation_beta") if key in attrs]
    return given | ({"activation_params": parameters} if parameters else {})


@pytest.mark.parametrize("attrs", [{}, *map(of_conv, ACTIVATIONS),
                                   {"activation": "Clip", "activation_params": [-0.5, 0.75]}])
def test_an_activation_follows_a_convolution(attrs):
    x, weights, bias = normal(2, 4, 7, 7), normal(6, 2, 3, 3), normal(6)
    check("FusedConv", [x, weights, bias], (1, 2), group=2, pads=[1, 1, 1, 1], strides=[2, 2], **attrs)


def test_a_sum_goes_between_a_convolution_and_its_activation():
    x, weights, bias, z = normal(1, 4, 6, 6), normal(5, 4, 3, 3), normal(5), normal(1, 5, 6, 6)
    check("FusedConv", [x, weights, bias, z], (1, 2), auto_pad="SAME_UPPER", activation="Relu")
    check("FusedConv", [x, weights, None, z], (1,), auto_pad="SAME_UPPER", activation="Relu")


def test_an_unknown_activation_is_refused():
    with pytest.raises(ModelError, match="activation is 'Mish', but must be one of Relu"):
        imported("FusedGemm", [normal(3, 4), normal(4, 5)], activation="Mish")


@pytest.mark.parametrize("op, attrs", [("NhwcConv", {}), ("NhwcFusedConv", {"activation": "Relu"})])
def test_a_convolution_with_the_channels_last_is_one_with_the_channels_first(op, attrs):
    x, weights, bias = normal(2, 4, 7, 7), normal(6, 2, 3, 3), normal(6)
    same = {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2]}
    expected = imported("Conv", [x, weights, bias], (1, 2), domain="", **same)["o0"].transpose(0, 2, 3, 1)
    result = imported(op, [x.transpose(0, 2, 3, 1), weights.transpose(0, 2, 3, 1), bias], (1, 2), **same, **attrs)
    np.testing.assert_allclose(result["o0"], np.maximum(expected, 0) if attrs else expected, 1e-5, 1e-6)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
def test_distances_of_rows_are_what_onnx_runtime_computes(metric):
    check("CDist", [normal(3, 4), normal(5, 4)], (1,), metric=metric)


def test_an_unknown_metric_is_refused():
    with pytest.raises(ModelError, match="metric is 'cityblock'"):
        imported("CDist", [normal(3, 4), normal(5, 4)], metric="cityblock")


def packed(elements, bits):
    """Pack rows of elements into bytes, the first element in the lowest bits."""
    each = 8 // bits
    rows = np.pad(elements, ((0, 0), (0, -elements.shape[1] % each))).reshape(len(elements), -1, each)
    return (rows << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
@pytest.mark.parametrize("k", [32, 40])
def test_weights_of_few_bits_are_dequantised_in_blocks(bits, zeros, k):
    n, size = 6, 16
    blocks = -(-k // size)
    elements = np.random.default_rng(1).integers(0, 1 << bits, (n, blocks * size))
    scales = np.abs(normal(n, blocks)) + 0.1
    points = {"none": np.full((n, blocks), 1 << bits - 1), "packed": elements[:, :blocks],
              "float": elements[:, :blocks] + 0.25}[zeros]
    weights = (elements - np.repeat(points, size, 1)) * np.repeat(scales, size, 1)
    x, given = normal(3, k), {"none": None, "packed": packed(points.astype(np.int64), bits).reshape(-1),
                              "float": points.astype(np.float32)}[zeros]
    inputs = [x, packed(elements, bits).reshape(n, blocks, -1), scales, given, None, bias := normal(n)]
    attrs = {"K": k, "N": n, "bits": bits, "block_size": size}
    constants = (1, 2, 3, 5)
    result = imported("MatMulNBits", inputs, constants, **attrs)["o0"]
    np.testing.assert_allclose(result, x @ weights[:, :k].T.astype(np.float32) + bias, 1e-4, 1e-4)
    if zeros != "float" or bits == 4:
        check("MatMulNBits", inputs, constants, **attrs, atol=1e-3)


def test_weights_in_groups_that_are_no_blocks_are_refused():
    inputs = [normal(3, 16), np.zeros((6, 1, 8), np.uint8), normal(6), None, np.zeros(16, np.int32)]
    with pytest.raises(ModelError, match="weights with group indices"):
        imported("MatMulNBits", inputs, (1, 2, 4), K=16, N=6, bits=4, block_size=16)


def test_weights_that_are_no_constants_are_refused():
    with pytest.raises(ModelError, match="input 'i1' must be a constant"):
        imported("MatMulNBits", [normal(3, 16), np.zeros((6, 1, 8), np.uint8), normal(6)], (2,), K=16, N=6,
                 block_size=16)


@pytest.mark.parametrize("kind", [0, 1])
def test_weights_as_bitsandbytes_packs_them(kind):
    packed = np.random.default_rng(0).integers(0, 256, 32 * 24 // 2).astype(np.uint8)
    check("MatMulBnb4", [normal(2, 3, 32), packed, np.abs(normal(32 * 24 // 16))], (1, 2), K=32, N=24, block_size=16,
          quant_type=kind)
