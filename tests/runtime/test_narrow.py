"""Wide integers of few bits: kept in a byte each, and back."""
from __future__ import annotations

import numpy as np
import pytest

from engines.narrow import Run, narrow, widen

SMALL = np.random.default_rng(0).integers(-128, 128, 4096)


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_wide_integers_that_fit_a_byte_are_kept_in_one(dtype: str) -> None:
    wide, floats = SMALL.astype(dtype).tobytes(), np.linspace(0, 1, 500, dtype=np.float32).tobytes()
    memory = floats + wide + b"tail"
    kept, runs = narrow(memory, [len(floats), len(floats) + len(wide)])
    assert runs == (Run(len(floats)), Run(len(wide), dtype), Run(4))
    assert len(kept) == len(floats) + len(SMALL) + 4
    again = widen(memoryview(kept), runs)
    assert bytes(again) == memory and again.readonly


@pytest.mark.parametrize("odd", [128, -129, 1 << 14])
def test_one_value_that_does_not_fit_keeps_its_run_as_it_is(odd: int) -> None:
    values = SMALL.astype(np.int16)
    values[-1] = odd
    memory = values.tobytes()
    assert narrow(memory, [0]) == (memory, ())


def test_what_would_save_little_is_kept_as_it_is() -> None:
    wide, other = SMALL.astype(np.int16).tobytes(), np.full(1 << 14, 1000, np.int16).tobytes()
    assert narrow(wide + other, [0, len(wide)]) == (wide + other, ())


def test_a_run_reaches_to_where_the_next_may_begin() -> None:
    wide, other = SMALL.astype(np.int16).tobytes(), np.full(2048, 1000, np.int16).tobytes()
    assert narrow(wide + other, [0]) == (wide + other, ())
    assert narrow(wide + other, [0, len(wide)])[1] == (Run(len(wide), "int16"), Run(len(other)))
