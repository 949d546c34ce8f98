"""Arrays of equal content have equal keys, and share cached results, whatever memory they are in."""
import ml_dtypes
import numpy as np
import pytest

from infer_server.engines.ir.content import LEAST, content_of, remembering
from infer_server.engines.ir.graph import Array


def test_content_tells_elements_order_shape_and_dtype() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    others = [weight, weight.T, weight[::-1], weight[:, ::-1], weight.reshape(4, 16), weight.view(np.int32), weight + 1]
    assert len({content_of(array) for array in others}) == len(others)
    assert content_of(weight) == content_of(weight.copy()) and content_of(weight.T) == content_of(weight.copy().T)
    stored = np.arange(8, dtype=np.uint8)
    kinds = [stored.view(dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
    kinds += [stored.astype(dtype) for dtype in (ml_dtypes.int4, ml_dtypes.uint4)]
    assert len({content_of(array) for array in kinds}) == len(kinds)
    assert content_of(np.float32(3.0)) != content_of(np.float32(4.0))


@pytest.mark.parametrize("size, runs", [(LEAST, 3), (LEAST - 1, 5)])
def test_what_a_function_found_of_a_large_array_is_found_once(size: int, runs: int) -> None:
    met = []

    @remembering()
    def least(array: Array, axis: int) -> float | None:
        met.append(axis)
        return None if array[0] else float(array.min()) + axis

    zeros, ones = np.zeros(size), np.ones(size)
    found = [least(*one) for one in ((zeros, 0), (zeros.copy(), 0), (zeros, 2), (ones, 0), (ones, 0))]
    assert found == [0, 0, 2, None, None]
    assert len(met) == runs


def test_what_a_function_is_told_by_name_counts_too() -> None:
    @remembering()
    def scaled(array: Array, factor: float) -> float:
        return float(array.sum()) * factor

    ones = np.ones(LEAST)
    assert [scaled(ones, factor=2), scaled(ones, factor=3), scaled(ones, 4)] == [2 * LEAST, 3 * LEAST, 4 * LEAST]
