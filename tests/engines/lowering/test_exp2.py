"""2**x equals its reference bit for bit, and has the documented accuracy."""
import numpy as np
import pytest

from infer_server.engines.lowering.epilogue.program import NUMPY
from infer_server.engines.lowering.problems.exp2 import COEFFICIENTS, LOWEST, exp2


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2.5e-7), ("bfloat16", 1.1e-4), ("uint8", 1.1e-4)])
def test_a_power_of_two_is_as_near_as_it_says(dtype, error):
    x = np.linspace(-100, 0, 100_001, dtype=np.float32)
    exact = 2.0 ** x.astype(np.float64)
    assert np.abs(exp2(NUMPY, x, dtype) / (exact * COEFFICIENTS[dtype][0]) - 1).max() < error


@pytest.mark.parametrize("dtype", COEFFICIENTS)
def test_the_greatest_score_has_weight_one_and_a_hidden_one_none(dtype):
    weights = exp2(NUMPY, np.array([0, -np.inf, -1e30], np.float32), dtype)
    assert weights[0] == COEFFICIENTS[dtype][0] and (weights[1:] <= weights[0] * 2.0 ** LOWEST).all()


@pytest.mark.parametrize("dtype", COEFFICIENTS)
def test_a_score_that_is_no_number_has_no_weight_and_in_bytes_none_to_speak_of(dtype):
    weight, = exp2(NUMPY, np.float32([np.nan]), dtype)
    assert np.isnan(weight) if dtype != "uint8" else weight <= 2.0 ** -118
