"""Rewriting of the halos around images."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.lowering.buffers import border
from infer_server.engines.lowering.calls.placement import Storage
from infer_server.engines.lowering.problems.view import Halo, dense_view
from scripts.testing.suite import Runner
from tests.engines.backends.runners import EVERY_WIDTH

BATCH = 3


@EVERY_WIDTH
@pytest.mark.parametrize("halo", [Halo(1, 1, 1, 1), Halo(0, 0, 2, 1), Halo(2, 0, 0, 0), Halo(0, 3, 0, 0),
                                  Halo(1, 2, 3, 4), Halo(1, 0, 2, 3, front=2, back=1)], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 70), (5, 1, 3), (4, 6, 300), (3, 2, 4, 5)])
def test_the_halo_of_every_item_is_written_and_nothing_else(runner: Runner, halo: Halo,
                                                            shape: tuple[int, ...]) -> None:
    whole = dense_view("uint8", halo.around(shape))
    call = border(Storage("x", whole, "batch", halo, 7.0), 0)
    memory = np.zeros((BATCH + 1, *whole.shape), np.uint8)      # an item more than is written
    runner.execute(call.problem, [], [memory.reshape(-1)[placement.offset:] for placement in call.outputs], {}, BATCH)
    inside = np.zeros(memory.shape, bool)
    inside[(slice(None), *(slice(before, before + extent) for (before, _), extent in zip(
        halo.cells(len(shape)), shape, strict=True)))] = True
    inside[BATCH:] = True
    np.testing.assert_array_equal(memory, np.where(inside, 0, 7))
    for placement, expected in zip(call.outputs, call.problem.reference([], {}), strict=True):
        seen = np.ndarray((1, *placement.view.shape), np.uint8, memory, placement.offset, (0, *placement.view.strides))
        np.testing.assert_array_equal(seen, expected)
