"""What a fallback step sees and stores."""
from __future__ import annotations

import numpy as np
import pytest

from engines.fallback import to_real, to_stored
from engines.ir import Array, QParams
from engines.plan import TensorView


def view(dtype: str, quant: QParams | None = None) -> TensorView:
    return TensorView("t", dtype, (2, 3), 0, 0, (0, 0), 0, quant=quant)


@pytest.mark.parametrize(("tensor", "stored", "real"), [
    (view("uint8", QParams((0.5,), (128,), "uint8")), [[[0, 128, 255], [127, 129, 1]]],
     [[[-64, 0, 63.5], [-0.5, 0.5, -63.5]]]),
    (view("int8", QParams((1.0, 2.0, 4.0), (0, 0, 1), "int8", axis=2)), [[[1, 1, 1], [-1, -1, -1]]],
     [[[1, 2, 0], [-1, -2, -8]]]),
    (view("bfloat16"), [[[0x3F80, 0xC000, 0], [0x7F80, 0x4049, 1]]], [[[1, -2, 0], [np.inf, 3.140625, 2.0**-133]]]),
    (view("int64"), [[[1, 2, 3], [4, 5, 6]]], [[[1, 2, 3], [4, 5, 6]]]),
], ids=["uint8", "int8 per channel", "bfloat16", "int64"])
def test_what_is_stored_is_a_real_number_and_back(tensor: TensorView, stored: list[object], real: list[object]) -> None:
    memory = np.array(stored, "uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    values = to_real(memory, tensor)
    np.testing.assert_array_equal(values, np.array(real))
    assert not np.shares_memory(values, memory)
    np.testing.assert_array_equal(to_stored(values, tensor), memory)


def test_storing_rounds_half_to_even_and_saturates() -> None:
    def stored(values: list[float], tensor: TensorView) -> list[int]:
        array: Array = np.array(values, np.float32)
        return list(map(int, to_stored(array, tensor)))

    assert stored([0.25, 0.75, 1e9, -1e9], view("uint8", QParams((0.5,), (10,), "uint8"))) == [10, 12, 255, 0]
    assert stored([1.00390625, 1.01171875], view("bfloat16")) == [0x3F80, 0x3F82]
    assert stored([float("nan")], view("bfloat16")) == [0x7FC0]
