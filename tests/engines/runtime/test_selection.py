"""What the host selects by data."""
import numpy as np
import pytest

from engines.runtime.host.selection import OPERATORS


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (2, 3, 5, 4)])
def test_the_places_of_what_is_not_zero_come_in_the_order_of_the_elements(shape, dtype):
    x = np.random.default_rng(0).integers(-1, 2, shape).astype(dtype)
    found, = OPERATORS["NonZero"]({}, x)
    expected = np.stack(np.nonzero(x)) if shape else np.zeros((0, int(x != 0)))
    np.testing.assert_array_equal(found, expected.astype(np.int64), strict=True)
