"""ONNX Runtime's operators on quantised tensors.

Quantised results may be off by one: it rounds after one multiplication by the quotient of the scales, we after two.
Weights are of seven bits: on CPUs without VNNI its sums of products of more saturate at 16 bits.
"""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from tests.engines.frontend.one_node import RNG, check, feeds_of, imported, model_of, normal, onnx_runtime


def stored(shape, dtype=np.uint8):
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def seven_bits(shape):
    return stored(shape, np.int8) // 2


def f32(value):
    return np.array(value, np.float32)


def nearly(op, arrays, *places, most=1, **options):
    model = model_of(op, arrays, *places, **options)
    (wanted,) = onnx_runtime(model, feeds_of(model, arrays)).values()
    (result,) = imported(op, arrays, *places, **options).values()
    assert result.dtype == wanted.dtype and result.shape == wanted.shape
    assert np.abs(result.astype(int) - wanted.astype(int)).max() <= most


@pytest.mark.parametrize("dtype, zeros", [(np.uint8, (128, 3, 100)), (np.int8, (0, -5, 7))])
@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("shapes", [((2, 3, 8), (2, 3, 8)), ((2, 3, 8), (8,)), ((1,), (3, 4))])
def test_a_pair_of_quantised_tensors(op, dtype, zeros, shapes):
    a, b, c = (np.array(zero, dtype) for zero in zeros)
    inputs = [stored(shapes[0], dtype), f32(0.02), a, stored(shapes[1], dtype), f32(0.05), b, f32(0.1), c]
    nearly(op, inputs, (1, 2, 4, 5, 6, 7))


def test_a_zero_point_that_is_not_there_is_0():
    a, b, zero = stored((2, 8), np.int8), stored((2, 8), np.int8), np.array(0, np.int8)
    given, absent = ([a, f32(0.02), z, b, f32(0.05), z, f32(0.1), z] for z in (zero, None))
    result, expected = (imported("QLinearAdd", inputs[:8 if inputs[7] is not None else 7], (1, 4, 6))["o0"]
                        for inputs in (absent, given))
    assert result.dtype == np.int8 and np.array_equal(result, expected)


@pytest.mark.parametrize("dtype, zero", [(np.uint8, 128), (np.int8, 3)])
@pytest.mark.parametrize("op, attrs, scale", [("QLinearSigmoid", {}, 1 / 256), ("QLinearLeakyRelu", {}, 0.05),
                                              ("QLinearLeakyRelu", {"alpha": 0.5}, 0.05)])
def test_an_activation_of_a_quantised_tensor(op, attrs, scale, dtype, zero):
    inputs = [stored((3, 7), dtype), f32(0.04), np.array(zero, dtype), f32(scale), np.array(0, dtype)]
    nearly(op, inputs, (1, 2, 3, 4), **attrs)


@pytest.mark.parametrize("attrs", [{"axis": -1, "opset": 13}, {"axis": 1, "opset": 13}, {"axis": 1, "opset": 12}])
def test_a_softmax_of_a_quantised_tensor(attrs):
    inputs = [stored((2, 3, 5)), f32(0.03), np.uint8(100), f32(1 / 256), np.uint8(0)]
    nearly("QLinearSoftmax", [np.asarray(x) for x in inputs], (1, 2, 3, 4), **attrs)


def test_one_of_two_quantised_tensors():
    condition = stored((2, 5)) > 100
    inputs = [condition, stored((2, 5)), f32(0.1), np.array(3, np.uint8), stored((5,)), f32(0.2),
              np.array(200, np.uint8), f32(0.15), np.array(50, np.uint8)]
    nearly("QLinearWhere", inputs, (2, 3, 5, 6, 7, 8))


@pytest.mark.parametrize("axis", [1, -1])
def test_quantised_tensors_side_by_side(axis):
    parts = [stored((2, 3, 4)), f32(0.1), np.array(128, np.uint8), stored((2, 3, 4)), f32(0.02), np.array(7, np.uint8)]
    nearly("QLinearConcat", [f32(0.05), np.array(120, np.uint8), *parts], (0, 1, 3, 4, 6, 7), axis=axis)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 1, 1, 1], "strides": [2, 2]},
                                   {"pads": [1, 1, 1, 1], "count_include_pad": 1}, {"auto_pad": "SAME_UPPER"}])
def test_a_pool_of_a_quantised_tensor(attrs, last):
    inputs = [stored((2, 6, 7, 4) if last else (2, 4, 6, 7)), f32(0.1), np.array(128, np.uint8), f32(0.07),
              np.array(120, np.uint8)]
    nearly("QLinearAveragePool", inputs, (1, 2, 3, 4), kernel_shape=[3, 3], channels_last=last, **attrs)
    nearly("QLinearGlobalAveragePool", inputs, (1, 2, 3, 4), channels_last=last)


def test_a_mean_of_a_quantised_tensor():
    x = stored((2, 3, 8))
    inputs = [x, f32(0.1), np.array(128, np.uint8), f32(0.05), np.array(120, np.uint8)]
    result = imported("QLinearReduceMean", inputs, (1, 2, 3, 4), axes=[2], keepdims=0)["o0"]
    expected = np.rint((x.astype(np.float32) - 128).mean(-1) * 0.1 / 0.05) + 120
    assert np.abs(result - np.clip(expected, 0, 255)).max() <= 1


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"transB": 1}, {"transA": 1, "transB": 1, "alpha": 0.5}])
@pytest.mark.parametrize("given", ["", "C", "C y", "y"])
def test_a_gemm_of_quantised_matrices(columns, attrs, given):
    scale = np.abs(normal(5)) / 50 + 0.01 if columns else f32(0.02)
    zero = np.zeros(5, np.int8) if columns else np.array(3, np.int8)
    a = stored((4, 3) if "transA" not in attrs else (3, 4))
    b = seven_bits((3, 5) if "transB" not in attrs else (5, 3))
    c = RNG.integers(-9999, 9999, (5,)).astype(np.int32) if "C" in given else None
    inputs = [a, f32(0.03), np.array(120, np.uint8), b, scale, zero, c]
    if "y" in given:
        nearly("QGemm", [*inputs, f32(0.3), np.array(99, np.uint8)], (1, 2, 3, 4, 5, 6, 7, 8), **attrs)
    else:
        check("QGemm", inputs, (1, 2, 3, 4, 5, 6), atol=1e-3, **attrs)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_integers_becomes_float(columns, zeros, bias):
    scale = np.abs(normal(5)) if columns else f32(0.02)
    points = [np.array(120, np.uint8), seven_bits(5) if columns else np.array(3, np.int8)]
    inputs = [stored((2, 4, 3)), seven_bits((3, 5)), f32(0.03), scale, *(points if zeros else (None, None)),
              normal(5) if bias else None]
    check("MatMulIntegerToFloat", inputs, (1, 3, 4, 5, 6))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_what_is_quantised_as_it_runs(columns, zeros, bias):
    scale = np.abs(normal(5)) if columns else f32(0.02)
    zero = seven_bits(5) if columns else np.array(3, np.int8)
    inputs = [normal(2, 4, 3), seven_bits((3, 5)), scale, zero if zeros else None, normal(5) if bias else None]
    check("DynamicQuantizeMatMul", inputs, (1, 2, 3, 4), atol=1e-4)


@pytest.mark.parametrize("dtypes", [(np.int16, np.int16), (np.uint16, np.uint16), (np.uint16, np.int16)])
def test_a_product_of_16_bits(dtypes):
    a, b = stored((3, 4), dtypes[0]) // 256, stored((4, 5), dtypes[1]) // 256
    result = imported("MatMulInteger16", [a, b])["o0"]
    assert result.dtype == (np.uint32 if dtypes == (np.uint16, np.uint16) else np.int32)
    np.testing.assert_array_equal(result, a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("op, arrays, attrs", [
    ("QuantizeLinear", [normal(3, 4), f32(0.001), np.array(100, np.uint16)], {}),
    ("QuantizeLinear", [normal(3, 4), np.abs(normal(4)) / 50 + 0.01, np.zeros(4, np.int8)], {"axis": 1}),
    ("DequantizeLinear", [stored((3, 4), np.int16), f32(0.001), np.array(-100, np.int16)], {}),
    ("DequantizeLinear", [stored((3, 4)), np.abs(normal(3)), np.full(3, 7, np.uint8)], {"axis": 0})])
def test_tensors_are_quantised_as_by_onnx(op, arrays, attrs):
    check(op, arrays, (1, 2), **attrs)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_a_quantised_image(last, bias):
    x, weights = stored((2, 6, 7, 4) if last else (2, 4, 6, 7)), seven_bits((5, 4, 3, 3))
    inputs = [x, f32(0.02), np.array(128, np.uint8), weights, np.abs(normal(5)) / 50, np.zeros(5, np.int8), f32(0.1),
              np.array(90, np.uint8), RNG.integers(-999, 999, 5).astype(np.int32) if bias else None]
    nearly("QLinearConv", inputs, (1, 2, 3, 4, 5, 6, 7, 8), pads=[1, 1, 1, 1], strides=[2, 2], channels_last=last)


def lstm(columns, directions, given=""):
    """Return X, W, R, B, sequence_lens, initial_h, initial_c, P, then scales and zero points of W and R."""
    steps, items, size, hidden = 5, 2, 6, 4
    scale = (directions, 4 * hidden) if columns else (directions,)
    states = [normal(directions, items, hidden) if name in given else None for name in "hc"]
    return [normal(steps, items, size), seven_bits((directions, size, 4 * hidden)),
            seven_bits((directions, hidden, 4 * hidden)), normal(directions, 8 * hidden),
            np.array([3, 5], np.int32) if "lengths" in given else None, *states, None,
            np.full(scale, 0.01, np.float32), np.zeros(scale, np.int8), np.full(scale, 0.008, np.float32),
            np.zeros(scale, np.int8)]


LSTM = {"hidden_size": 4}
WEIGHTS = (1, 2, 3, 8, 9, 10, 11)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"direction": "reverse"}, {"direction": "bidirectional"}, {"clip": 0.7}])
@pytest.mark.parametrize("given", ["", "hc"])
def test_an_lstm_of_quantised_weights_rounds_its_inputs_and_states(columns, attrs, given):
    inputs = lstm(columns, 2 if "bidirectional" in attrs.values() else 1, given)
    check("DynamicQuantizeLSTM", inputs, WEIGHTS, 3, atol=1e-4, threads=2, **LSTM, **attrs)


def test_an_lstm_of_quantised_weights_is_near_to_one_of_what_they_mean():
    inputs = lstm(True, 2, "lengths")
    weights = [np.float32(inputs[i] * inputs[scale].reshape(2, 1, -1)).transpose(0, 2, 1)
               for i, scale in ((1, 8), (2, 10))]
    attrs = {**LSTM, "direction": "bidirectional"}
    expected = imported("LSTM", [inputs[0], *weights, *inputs[3:7]], (1, 2, 3), 3, domain="", **attrs)
    result = imported("DynamicQuantizeLSTM", inputs, WEIGHTS, 3, **attrs)
    for name, array in expected.items():
        np.testing.assert_allclose(result[name], array, 0, 0.05)


def test_scales_that_are_of_neither_are_refused():
    inputs = lstm(False, 1)
    inputs[8] = np.ones(3, np.float32)
    with pytest.raises(ModelError, match="must have one value per direction or per column"):
        imported("DynamicQuantizeLSTM", inputs, WEIGHTS, **LSTM)


def test_the_greatest_of_windows_of_bytes_with_their_channels_last():
    x = np.random.default_rng(0).integers(0, 255, (2, 6, 7, 3)).astype(np.uint8)
    check("NhwcMaxPool", [x], kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
