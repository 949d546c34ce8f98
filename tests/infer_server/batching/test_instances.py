"""What an instance does with a batch."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.batching.engine_executor import copy_into


@pytest.mark.parametrize("slots", [
    np.zeros((2, 3, 4), np.float32),
    np.zeros((2, 3, 8), np.float32)[:, :, ::2],         # padded
    np.zeros((2, 3, 4), np.float64),                    # converted
    np.zeros((2, 3, 4), np.object_),
    np.zeros((2, 3, 4), np.float16),
], ids=["plain", "padded", "converted", "objects", "halves"])
@pytest.mark.parametrize("offset", [0, 1])              # of tensors in a message, which are aligned to nothing
def test_rows_arrive_in_their_slots_whatever_the_layout(slots: np.ndarray[Any, Any], offset: int) -> None:
    dtype = np.float16 if slots.dtype == np.float16 else np.float32
    message = bytes(offset) + np.arange(24, dtype=dtype).tobytes()
    items = np.frombuffer(memoryview(message)[offset:], dtype).reshape(2, 3, 4)
    copy_into(slots, items)
    np.testing.assert_array_equal(slots.astype(dtype), items)
