"""Faults that the suite finds in any backend: writes beside an output, and changed inputs."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.engines.lowering.problems.movement import Permute
from infer_server.engines.lowering.problems.problem import Array, Problem
from scripts.testing.suite import check, gapped
from tests.engines.backends.numpy.runner import NumpyRunner

VIEW = gapped("uint8", (3, 4))


class Smearing(NumpyRunner):
    """Runner with right results that also changes the byte behind a row of its output, or of its input."""

    def __init__(self, of_inputs: bool) -> None:
        self.of_inputs = of_inputs

    def execute(self, problem: Problem, inputs: list[Array], outputs: list[Array], constants: dict[str, Any],
                batch: int, pieces: int = 1) -> None:
        super().execute(problem, inputs, outputs, constants, batch)
        memory, = inputs if self.of_inputs else outputs
        memory[VIEW.item - 1] ^= 1


@pytest.mark.parametrize(("of_inputs", "message"), [(False, "beside an output"), (True, "an input was written")])
def test_bytes_that_are_not_a_result_stay_as_they_were(of_inputs: bool, message: str) -> None:
    x = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    check(Permute(VIEW, VIEW), NumpyRunner(), [x], {})
    with pytest.raises(AssertionError, match=message):
        check(Permute(VIEW, VIEW), Smearing(of_inputs), [x], {})
