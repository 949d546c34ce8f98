"""Operators of com.microsoft that were later added to ONNX."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError, UnknownValueError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run
from tests.engines.frontend.one_node import check, feeds_of, imported, model_of, normal, onnx_runtime


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, -1, 2])
def test_a_triangle_of_matrices(upper, k):
    check("Trilu", [normal(2, 4, 5), None if k is None else np.array(k)], (1,), upper=upper)


@pytest.mark.parametrize("pads", [[0, 1, 2, 0], [[1, 0, 0, 3]]])
@pytest.mark.parametrize("attrs", [{}, {"mode": "reflect"}, {"mode": "edge"}])
def test_a_border_around_a_tensor(pads, attrs):
    check("Pad", [normal(3, 4), np.array(pads), None if attrs else np.float32([0.5])], (1, 2), **attrs)


@pytest.mark.parametrize("numbers", [(2, 9), (2.0, 9.0, 1.5), (9, 2, -3)])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_in_steps(numbers, shape):
    dtype = np.float32 if isinstance(numbers[0], float) else np.int64
    check("Range", [np.full(shape, number, dtype) for number in numbers], range(3))


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_one_axis_more(axis):
    check("ExpandDims", [normal(3, 4), np.array(axis, np.int32)], (1,))


def test_elements_by_their_places():
    check("GatherND", [normal(3, 4, 5), np.array([[0, 1], [2, 3]])], (1,))


@pytest.mark.parametrize("attrs", [{"size": 3}, {"dim": 1, "size": 2, "step": 2}])
def test_windows_along_an_axis(attrs):
    check("UnfoldTensor", [normal(2, 7, 5)], **attrs)


def test_what_is_there_once():
    check("Unique", [np.float32([2, 1, 1, 3, 4, 3])], (0,), 3)
    with pytest.raises(UnknownValueError, match="depends on data"):
        imported("Unique", [np.float32([2, 1, 1])], (), 3)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 5, 5)])
def test_the_inverse_of_matrices(shape):
    check("Inverse", [normal(*shape)], rtol=1e-3, atol=1e-3)


def test_an_inverse_is_written_as_onnx_runtimes():
    x = normal(2, 3, 3)
    model = model_of("Inverse", [x])
    graph = graph_from_onnx(model)
    written = onnx_runtime(onnx_from_graph(graph), feeds_of(model, [x]))
    np.testing.assert_allclose(written["o0"], run(graph, {"i0": x})["o0"], 1e-3, 1e-3)


def test_an_inverse_of_what_is_not_square_is_refused():
    with pytest.raises(ModelError, match="the matrices must be square"):
        imported("Inverse", [normal(3, 4)])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("axis", [1, -1])
def test_rows_of_a_quantised_table(bits, zeros, axis):
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, (6, 32 * bits // 8)).astype(np.uint8)
    points = rng.integers(0, 256, (6, 2 * bits // 8)).astype(np.uint8)
    inputs = [data, np.array([[1, 5], [0, 2]]), np.abs(normal(6, 2)) + 0.1, points if zeros else None]
    check("GatherBlockQuantized", inputs, (0, 2, 3), bits=bits, block_size=16, quantize_axis=axis)


def test_rows_of_other_tables_are_refused():
    with pytest.raises(ModelError, match="only rows gathered from a uint8 matrix"):
        imported("GatherBlockQuantized", [np.zeros((2, 3, 8), np.uint8), np.array([1]), normal(2, 3, 1)], (0, 2),
                 block_size=16)
