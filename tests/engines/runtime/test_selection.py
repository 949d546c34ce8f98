"""Tests of the operators that select by data and run on the host."""
import numpy as np
import pytest

from infer_server.engines.runtime.host.selection import OPERATORS


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (2, 3, 5, 4), (30, 7, 6)])
def test_the_places_of_what_is_not_zero_come_in_the_order_of_the_elements(shape, dtype):
    x = np.random.default_rng(0).integers(-1, 2, shape).astype(dtype)
    found, = OPERATORS["NonZero"]({}, x)
    expected = np.stack(np.nonzero(x)) if shape else np.zeros((0, int(x != 0)))
    np.testing.assert_array_equal(found, expected.astype(np.int64), strict=True)


@pytest.mark.parametrize("dtype, start, limit, delta", [
    ("int64", 0, 5, 2), ("int16", 3, 3, 1), ("int32", 2, 7, -1), ("int64", 7, -3, -4), ("float32", -2.5, 1, 0.75)])
def test_a_range_ends_before_its_limit(dtype, start, limit, delta):
    found, = OPERATORS["Range"]({}, *(np.array(number, dtype) for number in (start, limit, delta)))
    steps = [start + i * delta for i in range(20) if (limit - start - i * delta) * delta > 0]
    np.testing.assert_array_equal(found, np.array(steps, dtype), strict=True)


@pytest.mark.parametrize("numbers, kept", [
    ((), []), ((np.int64([2]),), [0, 2]), ((np.int64([2]), np.float32([0.9])), [0, 1]),
    ((np.int64([9]), None, np.float32([0.5])), [0])])
def test_of_boxes_as_many_are_kept_as_the_numbers_that_are_given_say(numbers, kept):
    boxes = np.float32([[[0, 0, 4, 4], [0, 0, 4, 3], [5, 5, 9, 9]]])
    found, = OPERATORS["NonMaxSuppression"]({}, boxes, np.float32([[[0.6, 0.5, 0.4]]]), *numbers)
    assert found.tolist() == [[0, 0, box] for box in kept]
