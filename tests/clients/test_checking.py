"""Tests of the comparison of outputs by load-test --check."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.clients.load.checking import difference

FLOATS = np.array([1000.0, 1.0, np.nan, np.inf], np.float32)


@pytest.mark.parametrize(("expected", "output", "said"), [
    (FLOATS, FLOATS + np.float32(0.5), ""),                                     # a thousandth of the largest
    (FLOATS, FLOATS + np.float32(2.0), "2 of 4 elements"),
    (FLOATS, np.array([1000.0, 1.0, 0.0, np.inf], np.float32), "1 of 4 elements"),
    (FLOATS, np.array([1000.0, 1.0, np.nan, -np.inf], np.float32), "1 of 4 elements"),
    (FLOATS, FLOATS.astype(np.float64), "float64[4] in the place of float32[4]"),
    (FLOATS, FLOATS.reshape(2, 2), "float32[2, 2] in the place of float32[4]"),
    (np.arange(3), np.arange(3), ""), (np.arange(3), np.array([0, 1, 3]), "1 of 3 elements"),
    (np.array([b"a", b"b"], object), np.array([b"a", b"c"], object), "1 of 2 elements"),
    (np.zeros(3, np.float32), np.zeros(3, np.float32), ""), (np.zeros(0), np.zeros(0), "")])
def test_outputs_differ_by_more_than_rounding(expected: np.ndarray, output: np.ndarray, said: str) -> None:
    assert difference(expected, output) == said
