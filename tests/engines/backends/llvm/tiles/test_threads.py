"""Threads share a request on tile registers, which each configures and releases for itself.

The emulated registers are memory of one process, for one thread at a time, so that these tests need a CPU with AMX.
"""
from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_AMX_FP16
from infer_server.engines.backends.llvm.runtime.abi import WorkerRow
from infer_server.engines.backends.llvm.runtime.workers import ParallelExecution
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.backends.llvm.jit import runs_here
from tests.engines.backends.llvm.tiles.test_plans import DIGITS, ITEMS, digits, plan_of, steps_on_tiles

AMX = pytest.mark.skipif(not runs_here(AVX512_AMX), reason="no tile registers here")
RUNS, PATIENCE_SECS = 50, 120


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Plan]:
    """Precision -> plan of the digits' network."""
    folder, calibration = tmp_path_factory.mktemp("plans"), digits("calibration", 16)
    precisions = ["int8", "bf16", *["fp16"] * runs_here(AVX512_AMX_FP16)]
    return {precision: plan_of(DIGITS / "model.onnx", calibration, precision, folder) for precision in precisions}


@AMX
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
@pytest.mark.usefixtures("eager")
def test_two_threads_give_the_bytes_of_one(plans: Mapping[str, Plan], precision: str) -> None:
    if precision not in plans:
        pytest.skip("no AMX-FP16 here")
    plan, feeds = plans[precision], digits("test", ITEMS)
    assert steps_on_tiles(plan) >= 9
    expected = Engine(plan).run(feeds)
    context = Engine(plan, threads=2).create_context()
    execution = context.execution
    assert isinstance(execution, ParallelExecution) and execution._shared.worth_sharing(ITEMS)
    runs, end = 0, time.monotonic() + PATIENCE_SECS
    while runs < RUNS or not execution.workers[:, WorkerRow.DONE].all():        # until each thread has run chunks
        assert time.monotonic() < end
        runs += 1
        for name, output in context.run(feeds, ITEMS).items():
            np.testing.assert_array_equal(output, expected[name])
