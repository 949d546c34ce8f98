"""Several threads on one request give the bytes of one thread, however they are scheduled."""
from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.runtime import chunks
from infer_server.engines.backends.llvm.runtime.abi import WorkerRow
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.workers import ParallelExecution, ParallelProgram
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.arena import PAGE
from infer_server.engines.plan.plan import Fill, IoTensor, Plan, TensorView
from tests.engines.tiny import executor, mix_object, mix_plan, mix_reference, mixed

ROWS, COLUMNS, MAX_BATCH = 12, 16, 4
LEAST_SECS, PATIENCE_SECS = 1, 120


def random_plan(rng: np.random.Generator) -> tuple[Plan, list[tuple[int, int]], list[int]]:
    """Return a random graph of mixes whose grids are cut at random multiples, along either axis."""
    count = int(rng.integers(3, 14))
    reads = [(int(rng.integers(max(0, i - 2), i + 1)), int(rng.integers(0, i + 1))) for i in range(count)]
    outputs = sorted({count, int(rng.integers(1, count + 1))})
    plan = mix_plan(reads, outputs, ROWS, COLUMNS, MAX_BATCH,
                    steps=[(int(rng.integers(1, 5)), int(rng.choice([1, 3, 8, 16]))) for _ in reads],
                    constant_bytes=[int(rng.choice([0, 1 << 20])) for _ in reads])
    return plan, reads, outputs


def run(execution: ParallelExecution, plan: Plan, x: Array) -> dict[str, Array]:
    execution.input(plan.machine.inputs[0], len(x))[...] = x
    execution.run(len(x))
    return {view.name: execution.output(view, len(x)) for view in plan.machine.outputs}


def lendable(*shape: int) -> Array:
    """Return an int32 array that starts on a page and leaves room for SLACK behind it."""
    memory = np.empty(2 * PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE
    return memory[begin:begin + 4 * math.prod(shape)].view(np.int32).reshape(shape)


def run_lent(execution: ParallelExecution, plan: Plan, x: Array) -> tuple[dict[str, Array], bool]:
    """Run with the caller's arrays as inputs and outputs. Returns the results and whether no helper uses the arrays.

    Afterwards the input, and without running helpers the results too, are overwritten, which must change nothing.
    """
    given = lendable(*x.shape)
    given[...] = x
    results = {view.name: lendable(len(x), *view.shape) for view in plan.machine.outputs}
    lent = [execution.set_buffer(plan.machine.inputs[0], given)]
    lent += [execution.set_buffer(view, results[view.name]) for view in plan.machine.outputs]
    assert all(lent)
    execution.run(len(x))
    is_ours = execution.release_buffers()
    results = results if is_ours else {name: result.copy() for name, result in results.items()}
    given[...] = -1
    return results, is_ours


@pytest.fixture
def busy_neighbour() -> Iterator[None]:
    """Run a process on every core that works in bursts of 0.7 ms, so that threads are preempted within chunks."""
    program = ("import time\nwhile True:\n end = time.perf_counter() + 7e-4\n while time.perf_counter() < end: pass\n"
               " time.sleep(7e-4)")
    children = [subprocess.Popen([sys.executable, "-c", program]) for _ in os.sched_getaffinity(0)]
    yield
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.usefixtures("eager", "busy_neighbour")
def test_every_byte_is_that_of_one_thread_whatever_the_neighbours_do() -> None:
    rng = np.random.default_rng(1)
    done = np.zeros(2, np.int64)
    begin = time.monotonic()
    runs = 0
    # Worth something only if helpers took part and late chunks were run again, which takes its time on a busy machine.
    while time.monotonic() - begin < (LEAST_SECS if done.all() else PATIENCE_SECS):
        plan, reads, outputs = random_plan(rng)
        execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=int(rng.integers(2, 5))))
        for _ in range(60):
            batch = int(rng.integers(1, MAX_BATCH + 1))
            x = rng.integers(-2**31, 2**31, (batch, ROWS, COLUMNS), np.int32)
            got = run(execution, plan, x) if runs % 2 else run_lent(execution, plan, x)[0]
            for name, want in mix_reference(reads, outputs, x).items():
                np.testing.assert_array_equal(got[name], want, err_msg=f"run {runs}, {name}")
            runs += 1
        done += [execution.workers[1:, WorkerRow.DONE].sum(), execution.workers[:, WorkerRow.REPEATED].sum()]
        execution.close()
    assert done.all(), f"{runs} runs: chunks by helpers {done[0]}, chunks run again {done[1]}"


@pytest.mark.usefixtures("eager")
def test_a_caller_whose_helpers_are_gone_runs_alone() -> None:
    plan, reads, outputs = random_plan(np.random.default_rng(2))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=3))
    execution.close()
    before = execution.workers[:, WorkerRow.DONE].copy()
    x = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(1, ROWS, COLUMNS)
    got = run(execution, plan, x)
    for name, want in mix_reference(reads, outputs, x).items():
        np.testing.assert_array_equal(got[name], want)
    after = execution.workers[:, WorkerRow.DONE]
    assert (after[1:] == before[1:]).all() and after[0] > before[0]


@pytest.mark.usefixtures("eager")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_helpers_stay_where_they_are_pinned_and_otherwise_off_the_callers_cpu() -> None:
    plan, _, _ = random_plan(np.random.default_rng(6))
    x = np.zeros((1, ROWS, COLUMNS), np.int32)
    cpus = sorted(os.sched_getaffinity(0))[:2]
    shared = ParallelProgram(LoadedPlan(plan), workers=2)
    for pinned in (cpus, cpus[::-1], None):
        execution = ParallelExecution(shared, pinned)
        run(execution, plan, x)
        helper, = (t for t in threading.enumerate() if t.name == "mixer-helper-1")
        allowed = os.sched_getaffinity(helper.native_id or 0)
        assert allowed == {pinned[1]} if pinned else len(allowed) == len(os.sched_getaffinity(0)) - 1
        execution.close()


def test_what_sends_the_helpers_home_keeps_the_code_that_it_runs() -> None:
    """Helpers of a collected pool hold the last reference to the code, and may end before `stop_helpers` returns."""
    plan, _, _ = random_plan(np.random.default_rng(7))
    program = LoadedPlan(plan)
    execution = ParallelExecution(ParallelProgram(program, workers=2))
    alive = execution._pool._finalizer.peek()
    assert alive is not None and any(program in kept for kept in alive[2] if isinstance(kept, tuple))
    execution.close()


@pytest.mark.usefixtures("eager")
def test_a_forked_child_runs_alone() -> None:
    plan, reads, outputs = random_plan(np.random.default_rng(3))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=2))
    x = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(1, ROWS, COLUMNS)
    want = mix_reference(reads, outputs, x)
    run(execution, plan, x)
    pid = os.fork()
    if not pid:     # the child: no pytest, no finalizers, only an exit status
        got = run(execution, plan, x[::-1])
        os._exit(0 if all(np.array_equal(got[name], want[name]) for name in want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    got = run(execution, plan, x)
    assert all(np.array_equal(got[name], want[name]) for name in want)
    execution.close()


@pytest.mark.usefixtures("eager")
def test_a_request_stays_out_of_the_arena_in_which_a_late_helper_is() -> None:
    plan, reads, outputs = random_plan(np.random.default_rng(5))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=3))
    execution.close()       # from here on the test plays the helpers
    x = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(1, ROWS, COLUMNS)
    for busy in ([], [0], [0, 1], [1, 2]):
        for number, arena in enumerate(busy, 1):
            execution.workers[number, WorkerRow.INSIDE] = execution.runs[arena][0].ctypes.data
        before = [arena.array(plan.machine.outputs[-1], 1).copy() for arena in execution.arenas]
        x += 1
        got = run(execution, plan, x)
        for name, want in mix_reference(reads, outputs, x).items():
            np.testing.assert_array_equal(got[name], want)
        changed = [arena for arena in range(3)
                   if (execution.arenas[arena].array(plan.machine.outputs[-1], 1) != before[arena]).any()]
        assert len(changed) == 1 and changed[0] not in busy


@pytest.mark.usefixtures("eager")
def test_arrays_that_a_late_helper_may_write_to_are_kept_and_not_the_callers() -> None:
    plan, reads, outputs = random_plan(np.random.default_rng(5))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=2))
    execution.close()       # from here on the test plays the helper
    x = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(1, ROWS, COLUMNS)
    for late in (False, True, True, False):
        x += 1
        execution.workers[1, WorkerRow.INSIDE] = execution.runs[0].ctypes.data if late else 0
        got, is_ours = run_lent(execution, plan, x)
        assert is_ours is not late and bool(execution._retained) is late
        for name, want in mix_reference(reads, outputs, x).items():
            np.testing.assert_array_equal(got[name], want)
            np.testing.assert_array_equal(run(execution, plan, x)[name], want)


@pytest.mark.usefixtures("eager")
def test_what_is_not_numpys_memory_is_not_lent() -> None:
    """Such memory may be unmapped as soon as the run has ended, while a helper is late."""
    plan, _, _ = random_plan(np.random.default_rng(5))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=2))
    owned = lendable(1, ROWS, COLUMNS)
    view = np.frombuffer(memoryview(owned), np.int32).reshape(owned.shape)
    assert not execution.set_buffer(plan.machine.inputs[0], view)
    assert execution.set_buffer(plan.machine.inputs[0], owned)
    execution.close()


def test_a_batch_that_is_too_small_to_be_shared_runs_on_the_caller() -> None:
    reads, outputs = [(0, 0), (1, 0), (1, 2)], [3]
    plan = mix_plan(reads, outputs, ROWS, COLUMNS, MAX_BATCH)
    shared = ParallelProgram(LoadedPlan(plan), workers=2)
    shared._step_us = [2.0] * len(reads)
    execution = ParallelExecution(shared)
    worth = [shared.worth_sharing(batch) for batch in range(1, MAX_BATCH + 1)]
    assert not worth[0] and worth[-1]
    rng = np.random.default_rng(9)
    for batch in (1, MAX_BATCH, 1, 2, MAX_BATCH, 1):
        x = rng.integers(-2**31, 2**31, (batch, ROWS, COLUMNS), np.int32)
        before = execution.workers[:, WorkerRow.DONE].sum()
        for got in (run(execution, plan, x), run_lent(execution, plan, x)[0]):
            for name, want in mix_reference(reads, outputs, x).items():
                np.testing.assert_array_equal(got[name], want)
        assert (execution.workers[:, WorkerRow.DONE].sum() > before) == worth[batch - 1]
    whole = rng.integers(-2**31, 2**31, (MAX_BATCH, ROWS, COLUMNS), np.int32)
    execution.input(plan.machine.inputs[0], MAX_BATCH)[...] = whole     # what is in its slots stays there
    execution.run(1)
    got = execution.output(plan.machine.outputs[0], 1)
    np.testing.assert_array_equal(got, mix_reference(reads, outputs, whole[:1])["t3"])
    execution.close()


def test_the_halo_of_an_input_is_written_before_the_input_and_never_again() -> None:
    whole = TensorView("x", "int32", (2, 6), 0, 0, (24, 4), 48)
    inner = replace(whole, shape=(2, 4), offset=4)
    plan = mix_plan([(0, 0)], [1], rows=2, columns=6)
    plan = plan.with_machine(fills=(Fill(whole, -7, ((0, 0), (1, 1))),), inputs=(inner,))
    plan = replace(plan, inputs=(IoTensor("x", "int32", ("batch", 2, 4)),))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=2))
    execution.close()
    padded = np.full((2, 2, 6), -7, np.int32)
    for busy in (0, 1, 0):
        execution.workers[1, WorkerRow.INSIDE] = execution.runs[busy][0].ctypes.data
        padded[:, :, 1:5] += 1
        got = run(execution, plan, padded[:, :, 1:5])
        np.testing.assert_array_equal(got["t1"], mixed(padded, padded))


def test_a_request_ends_when_its_last_chunk_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two chunks of a millisecond; the helper starts later, so the caller finishes first."""
    monkeypatch.setattr(chunks, "CHUNK_US", 1e6)
    plan = mix_plan([(0, 0)], [1], ROWS, COLUMNS)
    plan = plan.with_machine(code=(mix_object("mix", ROWS, COLUMNS, repeats=5000), executor()))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=2))
    for turn in range(20):
        x = np.full((1, ROWS, COLUMNS), turn, np.int32)
        np.testing.assert_array_equal(run(execution, plan, x)["t1"], mixed(x, x))
    execution.close()


def test_idle_helpers_sleep() -> None:
    plan, _, _ = random_plan(np.random.default_rng(4))
    execution = ParallelExecution(ParallelProgram(LoadedPlan(plan), workers=3))
    run(execution, plan, np.zeros((1, ROWS, COLUMNS), np.int32))
    deadline = time.monotonic() + PATIENCE_SECS
    workers = execution.workers
    while not workers[1:, WorkerRow.ASLEEP].all():
        assert time.monotonic() < deadline, "helpers still spin"
        time.sleep(0.001)
    execution.close()
