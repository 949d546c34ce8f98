"""Item-major runs give the same bytes as steps run one by one."""
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines import build_engine
from infer_server.engines.backends.llvm.runtime.abi import WorkerRow
from infer_server.engines.backends.llvm.runtime.execution import SerialExecution
from infer_server.engines.backends.llvm.runtime.item_groups import divides_by_items
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.workers import ParallelExecution, ParallelProgram
from infer_server.engines.backends.llvm.runtime.zero_copy import address_of
from infer_server.engines.backends.llvm.tuning import item_major
from infer_server.engines.backends.llvm.tuning.item_major import run_item_major, with_item_major_runs
from infer_server.engines.compiler.specialise import Specialiser
from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.ir.graph import Array
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.arena import PAGE
from infer_server.engines.plan.plan import ItemMajorRun, Plan
from infer_server.engines.plan.verification import verify
from infer_server.engines.runtime import context
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.specialisation import Specialisation
from tests.engines.compiler.open_models import picture_net
from tests.engines.compiler.zoo_engines import MAX_BATCH, compiled
from tests.zoo import TINY, images_for


@pytest.fixture(scope="module", params=["int8", "fp32"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return compiled(TINY["mobilenet_v2"](), tmp_path_factory.mktemp("runs"), precision=request.param).plan


def long_runs(plan: Plan) -> list[ItemMajorRun]:
    """Return the item-major runs if weights cost nothing."""
    return list(item_major._runs([replace(step, constant_bytes=0) for step in plan.machine.steps]))


def test_item_by_item_the_bytes_are_the_same(plan: Plan) -> None:
    by_item = run_item_major(plan, long_runs(plan))
    assert sum(run.last - run.first for run in by_item.machine.item_major) > len(plan.machine.steps) // 2
    x = {"input": images_for(TINY["mobilenet_v2"](), MAX_BATCH, seed=3)}
    expected = Engine(plan).run(x)["output"]
    np.testing.assert_array_equal(Engine(by_item).run(x)["output"], expected)


def test_threads_divide_a_batch_by_items_and_the_bytes_are_the_same(plan: Plan) -> None:
    by_item = run_item_major(plan, long_runs(plan))
    x = images_for(TINY["mobilenet_v2"](), MAX_BATCH, seed=3)
    expected = Engine(plan).run({"input": x})["output"]
    for workers in (2, 3):
        shared = ParallelProgram(LoadedPlan(by_item), workers)
        execution = ParallelExecution(shared)
        ran = execution.workers[:, WorkerRow.DONE]
        for batch in (MAX_BATCH, workers, MAX_BATCH - 1, MAX_BATCH):
            assert shared.divides_by_items(batch) and shared.worth_sharing(batch)
            before = ran.sum()
            np.copyto(execution.input(by_item.machine.inputs[0], batch), x[-batch:])
            execution.run(batch)
            np.testing.assert_array_equal(execution.output(by_item.machine.outputs[0], batch), expected[-batch:])
            assert ran.sum() - before == min(batch, 2 * workers)        # each group once
        execution.close()


def test_what_threads_cannot_divide_by_items(plan: Plan) -> None:
    by_item = run_item_major(plan, long_runs(plan))
    assert not divides_by_items(LoadedPlan(by_item), 1, 2)          # fewer items than threads
    assert not divides_by_items(LoadedPlan(plan), MAX_BATCH, 2)     # no item-major runs


def test_items_are_read_where_they_lie_and_the_bytes_are_the_same(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ITEM_BYTES", 0)
    monkeypatch.setattr(context, "ZERO_COPY_BYTES", 0)
    x = far_from_the_end_of_a_page(images_for(TINY["mobilenet_v2"](), MAX_BATCH, seed=3))
    expected = Engine(plan).run({"input": x})["output"]
    monkeypatch.setattr(np, "copyto", None)         # nothing is copied
    for one in (plan, run_item_major(plan, long_runs(plan))):
        own = Engine(one).create_context()
        assert own.zero_copy_inputs == {"input"}
        for bytes_off in (0, 1, 6):
            pieces = [far_from_the_end_of_a_page(x[i:i + 1], bytes_off) for i in range(MAX_BATCH)]
            own.execute_with(MAX_BATCH, {"input": pieces})
            np.testing.assert_array_equal(own.output("output", MAX_BATCH), expected)
        np.testing.assert_array_equal(Engine(one).run({"input": x})["output"], expected)


def far_from_the_end_of_a_page(array: Array, bytes_off: int = 0) -> Array:
    """Return a copy that steps can read in place, `bytes_off` bytes after a multiple of 64."""
    memory = np.zeros(array.nbytes + 2 * PAGE, np.uint8)
    first = -memory.ctypes.data % 64 + bytes_off
    at = next(at for at in range(first, first + PAGE, 64) if address_of(memory[at:at + array.nbytes]) is not None)
    memory[at:at + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return memory[at:at + array.nbytes].view(array.dtype).reshape(array.shape)


def test_a_run_is_one_call_whatever_the_batch(plan: Plan) -> None:
    program = LoadedPlan(run_item_major(plan, long_runs(plan)))
    calls = SerialExecution(program)._prepared(MAX_BATCH)
    assert any(segment.by_item for segment in program.serial_segments)
    assert len(calls) == len(program.serial_segments)


def test_a_tensor_from_outside_that_dies_inside_a_band_keeps_its_memory_to_the_end_of_it(plan: Plan) -> None:
    run = long_runs(plan)[0]
    assert verify(run_item_major(plan, [run]))
    dying = [buffer for buffer in plan.machine.buffers if buffer.first < run.first <= buffer.last < run.last - 1]
    wrong = plan.with_machine(item_major=(run,)) if dying else \
        plan.with_machine(item_major=(replace(run, first=run.first + 1),))     # the first step is now outside
    with pytest.raises(PlanCorruptError, match="alive in steps"):
        verify(wrong)


def test_what_only_a_band_uses_has_room_for_one_item(plan: Plan) -> None:
    program, whole = LoadedPlan(run_item_major(plan, long_runs(plan))), LoadedPlan(plan)
    assert program.one_item_bytes and not whole.one_item_bytes
    assert program.shared_layout.one_item == set(program.one_item_bytes)
    assert program.shared_layout.total < whole.shared_layout.total
    assert program.separate_layout.total == whole.separate_layout.total


def test_steps_of_bands_can_be_timed_where_their_buffers_hold_one_item(plan: Plan) -> None:
    context = Engine(run_item_major(plan, long_runs(plan))).create_context()
    assert all(0 <= seconds < math.inf for _, seconds in context.profile(MAX_BATCH, repeats=1))


@pytest.mark.parametrize("wrong", [(ItemMajorRun(3, 3),), (ItemMajorRun(2, 5), ItemMajorRun(4, 6)),
                                   (ItemMajorRun(0, 1000),)])
def test_runs_that_are_empty_or_overlap_or_end_nowhere_are_refused(plan: Plan, wrong: tuple[ItemMajorRun, ...]) -> None:
    with pytest.raises(PlanCorruptError, match="item by item"):
        verify(run_item_major(plan, wrong))


def test_what_was_timed_is_not_timed_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_major, "LEAST_BYTES", 0)
    monkeypatch.setattr(item_major, "ITEMS", MAX_BATCH)
    cache = TimingCache()
    monkeypatch.setattr(item_major, "_difference", lambda *_: 1.0)
    first = with_item_major_runs(plan, cache, "this one")
    assert first.machine.item_major and len(cache)
    monkeypatch.delattr(item_major, "_difference")
    assert with_item_major_runs(plan, cache, "this one") == first


def test_a_plan_that_shows_tensors_between_steps_stays_as_it_is(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_major, "LEAST_BYTES", 0)
    monkeypatch.setattr(item_major, "ITEMS", MAX_BATCH)
    monkeypatch.setattr(item_major, "_difference", lambda *_: 1.0)
    assert with_item_major_runs(plan, TimingCache(), "this one").machine.item_major
    inner = next(i for i, buffer in enumerate(plan.machine.buffers) if buffer.first >= 0)
    shown = plan.with_machine(outputs=(*plan.machine.outputs, replace(plan.machine.outputs[0], name="t", buffer=inner)))
    assert with_item_major_runs(shown, TimingCache(), "this one") is shown


@pytest.mark.parametrize(("whole", "part", "chosen"), [(9.0, 1.0, "whole"), (2.0, 1.0, "parts"), (0.0, 0.0, "none")])
def test_a_run_is_kept_whole_unless_its_windows_save_more(plan: Plan, monkeypatch: pytest.MonkeyPatch, whole: float,
                                                       part: float, chosen: str) -> None:
    monkeypatch.setattr(item_major, "LEAST_BYTES", 0)
    monkeypatch.setattr(item_major, "ITEMS", MAX_BATCH)
    run, = (run for run in item_major._runs(plan.machine.steps) if run.last - run.first > 2 * item_major.WINDOW)
    first, *_, last = item_major._windows(run)
    saving = {run: whole, first: part, last: 2 * part}      # the windows between them save nothing
    monkeypatch.setattr(item_major, "_difference", lambda by_step, by_item, run: saving.get(run, 0.0))
    wanted = {"whole": (run,), "parts": (first, last), "none": ()}[chosen]
    assert with_item_major_runs(plan, TimingCache(), "this one").machine.item_major == wanted


@pytest.mark.parametrize("general", [False, True], ids=["specialisation", "symbolic plan"])
def test_other_shapes_run_item_by_item_what_the_usual_one_does(monkeypatch: pytest.MonkeyPatch, general: bool) -> None:
    monkeypatch.setattr(item_major, "LEAST_BYTES", 0)
    monkeypatch.setattr(item_major, "ITEMS", MAX_BATCH)
    usual = build_engine(picture_net(), cache=False, timing=False, max_batch=MAX_BATCH, symbolic_plans=False).plan
    run, = (run for run in item_major._runs(usual.machine.steps) if run.last - run.first > 2)
    gaining = Specialiser(run_item_major(usual, [replace(run, last=run.last - 1)]))
    names = {step.name for step in usual.machine.steps[run.first:run.last - 1]}
    for extents in ({"H": 21, "W": 34}, {"H": 40, "W": 28}):
        by_item, by_step = (one.symbolic(extents) if general else one.plan(extents)
                            for one in (gaining, Specialiser(usual)))
        assert verify(by_item) and not by_step.machine.item_major
        found = [step.name for run in by_item.machine.item_major for step in by_item.machine.steps[run.first:run.last]]
        assert names <= {*found} and usual.machine.steps[run.last - 1].name not in found
        x = {"x": np.random.default_rng(3).standard_normal((MAX_BATCH, *by_item.inputs[0].shape[1:]), np.float32)}
        expected = Specialisation(by_step, base=Specialisation(usual)).run(x)
        for name, output in Specialisation(by_item, base=Specialisation(usual)).run(x).items():
            np.testing.assert_array_equal(output, expected[name])


def test_what_moves_little_at_another_shape_is_run_step_by_step(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_major, "ITEMS", MAX_BATCH)
    usual = run_item_major(plan, long_runs(plan)).machine
    monkeypatch.setattr(item_major, "LEAST_BYTES", 0)
    assert item_major.item_major_as_in(usual, plan.machine, MAX_BATCH).item_major
    monkeypatch.setattr(item_major, "LEAST_BYTES", 1 << 40)
    assert not item_major.item_major_as_in(usual, plan.machine, MAX_BATCH).item_major


def test_what_no_cache_holds_is_run_step_by_step(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(step.bytes - step.constant_bytes for step in plan.machine.steps)
    before = [step for run in long_runs(plan) for step in range(run.first, run.last)]
    monkeypatch.setattr(item_major, "MOST_BYTES", largest - 1)
    after = [step for run in long_runs(plan) for step in range(run.first, run.last)]
    assert after and {plan.machine.steps[i].bytes - plan.machine.steps[i].constant_bytes for i in before} > {
        plan.machine.steps[i].bytes - plan.machine.steps[i].constant_bytes for i in after}
