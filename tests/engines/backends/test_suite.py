"""Faults that the suite finds in any backend: writes beside an output, and changed inputs. CPUs that it leaves out."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.movement import Permute
from infer_server.engines.lowering.problems.problem import Array, Problem
from scripts.testing.suite import check, gapped
from tests.engines.backends import test_attention, test_contraction, test_product
from tests.engines.backends.llvm.runner import kernel_of
from tests.engines.backends.numpy.runner import NumpyRunner
from tests.engines.backends.runners import CPUS, DOT_CPUS, FLOAT_CPUS

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


@pytest.mark.parametrize("precision", ["int8", *FLOAT_CPUS])
def test_cpus_that_are_left_out_run_the_code_of_others(precision: str) -> None:
    shape = test_product.SHAPES["nothing a multiple of anything"]
    integers, _ = test_product.integers(shape, ("uint8", ""))
    specs: list[Problem] = [test_contraction.problem(test_contraction.SHAPES["groups"], precision)[0]]
    specs += [integers] if precision == "int8" else [
        test_product.problem(shape, precision, result="float32")[0],
        test_attention.problem(test_attention.SHAPES["one query"], precision, result="float32")[0]]
    tested = FLOAT_CPUS.get(precision, [runner.isa for runner in DOT_CPUS])
    texts = {texts_of(specs, isa) for isa in tested}
    assert len(texts) > 3 and {texts_of(specs, cpu.isa) for cpu in CPUS} == texts


def texts_of(specs: list[Problem], isa: Isa) -> tuple[str, ...]:
    modules = [Module() for _ in specs]
    for module, kernel in zip(modules, map(kernel_of, specs), strict=True):
        kernel.emit(module, "kernel", isa, kernel.tactics(isa)[0])
    return tuple(module.text() for module in modules)
