"""In real networks a chunk needs only the chunks that it waits for, and running it again changes nothing."""
from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from benchmarks.zoo.sequences.transformers import vit
from infer_server.engines.backends.llvm.runtime.abi import ChunkRow, StageRow
from infer_server.engines.backends.llvm.runtime.chunks import Schedule, make_schedule
from infer_server.engines.backends.llvm.runtime.execution import Arena
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.recurrent_models import MODELS as RECURRENT
from tests.engines.compiler.recurrent_models import sequences_for
from tests.engines.compiler.test_recurrent_models import engine_of as recurrent_engine
from tests.engines.compiler.zoo_engines import engine_of
from tests.zoo import TINY, images_for

BATCH, WORKERS = 2, 3
STEP_US = 1000.0        # as if every step took so long: all are cut as finely as they can be
MODELS = [("resnet50", "int8"), ("mobilenet_v2", "int8"), ("shufflenet_v2", "int8"), ("nanodet", "int8"),
          ("densenet", "fp32"), ("unet", "fp32"), ("layout_traps", "fp32"), ("views", "int8"), ("vit", "int8"),
          ("crnn", "fp32"), ("batch major", "fp32")]


class Chunks:
    """Chunks of a plan's only span over an arena of garbage, run one by one in any order."""

    def __init__(self, plan: Plan, x: Array) -> None:
        self.program = LoadedPlan(plan)
        segment, = self.program.segments
        schedule = make_schedule(self.program, segment, len(x), WORKERS, [STEP_US] * len(plan.machine.steps), 1.0)
        assert schedule is not None
        self.chunks = schedule.chunks
        self.depends = depends_of(schedule)
        self.arena = Arena(self.program, self.program.separate_layout)
        self.memory = self.arena._bytes
        self.memory[:] = np.random.default_rng(2).integers(0, 256, len(self.memory))
        self.arena.prepare(len(x))
        self.arena.array(plan.machine.inputs[0], len(x))[...] = x

    def run(self, index: int) -> None:
        row = self.chunks[index]
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(int(row[ChunkRow.FUNCTION]))
        kernel(self.arena.operands + int(row[ChunkRow.OPERANDS]), *map(int, row[ChunkRow.ROW_BEGIN:ChunkRow.LIMIT]))

    def run_each_as_early_as_it_may(self, order: list[int]) -> None:
        """Run each chunk in this order, preceded only by the chunks that it waits for."""
        done: set[int] = set()

        def visit(index: int) -> None:
            if index not in done:
                done.add(index)
                for other in self.depends[index]:
                    visit(other)
                self.run(index)

        for index in order:
            visit(index)

    def outputs(self) -> dict[str, Array]:
        return {view.name: self.arena.array(view, BATCH) for view in self.program.machine.outputs}


def depends_of(schedule: Schedule) -> list[list[int]]:
    """Return the chunks that each chunk waits for, by itself or with its stage."""
    def chunks_of(begin: int, end: int) -> list[int]:
        return [index for first, last in schedule.depends[begin:end].tolist() for index in range(first, last)]

    found = []
    for stage in schedule.stages[:-1].tolist():
        whole = chunks_of(stage[StageRow.DEPENDS_BEGIN], stage[StageRow.DEPENDS_END])
        for index in range(stage[StageRow.PARTS], stage[StageRow.PARTS + WORKERS]):
            begin, end = (int(schedule.chunks[i, ChunkRow.DEPENDS]) for i in (index, index + 1))
            found.append(whole + chunks_of(begin, end))
    return found


def prepared(name: str, precision: str, folder: Path) -> tuple[Engine, Array]:
    if name in RECURRENT:
        model = RECURRENT[name]()
        return recurrent_engine(model, folder, precision), sequences_for(model, BATCH)
    model = TINY[name]() if name in TINY else vit(classes=10)
    return engine_of(model, folder, precision=precision), images_for(model, BATCH, seed=1)


@pytest.mark.parametrize(("name", "precision"), MODELS)
def test_a_chunk_needs_only_what_it_waits_for_and_may_run_again_at_any_time(
        name: str, precision: str, tmp_path: Path) -> None:
    engine, x = prepared(name, precision, tmp_path)
    want = engine.run({engine.inputs[0].name: x})
    chunks = Chunks(engine.plan, x)
    order = np.random.default_rng(3).permutation(len(chunks.depends))
    chunks.run_each_as_early_as_it_may(order.tolist())
    for output, got in chunks.outputs().items():
        np.testing.assert_array_equal(got, want[output], err_msg=output)

    memory = chunks.memory.copy()
    for index in np.random.default_rng(4).permutation(len(chunks.depends)).tolist():
        chunks.run(index)
    np.testing.assert_array_equal(chunks.memory, memory)


def test_a_dependency_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    engine, x = prepared("views", "fp32", tmp_path)
    chunks = Chunks(engine.plan, x)
    chunks.depends = [others[1:] for others in chunks.depends]
    chunks.run_each_as_early_as_it_may(np.random.default_rng(3).permutation(len(chunks.depends)).tolist())
    got, want = chunks.outputs(), engine.run({engine.inputs[0].name: x})
    assert any((got[output] != want[output]).any() for output in want)
