"""Zero-copy inputs and outputs: steps work in the caller's large arrays, on handwritten plans."""
from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.zero_copy import VOLATILE_SAFE, ZeroCopyBuffers, address_of
from infer_server.engines.errors import InputError
from infer_server.engines.ir.graph import Array
from infer_server.engines.lowering import problems
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.plan.arena import PAGE, ChangingArray
from infer_server.engines.plan.plan import SLACK, IoTensor, Plan
from infer_server.engines.runtime import context
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.results import MOST_BYTES, Results
from tests.engines.tiny import halo_plan, mix_plan, mix_reference

READS, OUTPUTS = [(0, 0), (0, 1), (2, 1)], [2, 3]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ZERO_COPY_BYTES", 0)
    monkeypatch.setattr(context, "ITEM_BYTES", 0)


def some_input(items: int, seed: int = 0) -> Array:
    """Return an input far from the end of a page."""
    memory = np.empty(2 * PAGE, np.uint8)
    x = memory[-memory.ctypes.data % PAGE:][:items * 240].view(np.int32).reshape(items, 6, 10)
    x[...] = np.random.default_rng(seed).integers(-1000, 1000, x.shape, np.int32)
    return x


def assert_right(got: dict[str, Array], x: Array) -> None:
    for name, want in mix_reference(READS, OUTPUTS, x).items():
        np.testing.assert_array_equal(got[name], want, err_msg=name)


@pytest.mark.parametrize("items", [1, 3, 9])
def test_steps_read_the_callers_input_and_write_what_he_is_given(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Array] = []
    monkeypatch.setattr(np, "copyto", lambda to, array: copied.append(array))
    x = some_input(items)
    before = x.copy()
    assert_right(Engine(mix_plan(READS, OUTPUTS)).run({"x": x}), before)
    np.testing.assert_array_equal(x, before)
    assert not copied


def test_what_is_not_in_one_piece_or_ends_with_its_page_is_copied() -> None:
    memory = np.zeros(2 * PAGE, np.uint8)
    at = -memory.ctypes.data % PAGE
    assert address_of(memory[at:at + PAGE - SLACK]) == memory.ctypes.data + at
    assert address_of(memory[at:at + PAGE - SLACK + 1]) is None
    assert address_of(memory[at:at + 64:2]) is None
    assert address_of(memory[at + 1:at + 65].view(np.int32)) == memory.ctypes.data + at + 1
    mixer = Engine(mix_plan(READS, OUTPUTS))
    x = some_input(4)
    assert_right(mixer.run({"x": np.asfortranarray(x)}), x)
    assert_right(mixer.run({"x": x}), x)


def test_a_context_that_was_lent_arrays_runs_on_its_own_memory_again() -> None:
    own = Engine(mix_plan(READS, OUTPUTS)).create_context()
    x, other = some_input(2), some_input(2, seed=1)
    own.input("x", 2)[...] = x
    assert_right(own.run({"x": other}, 2), other)
    own.execute(2)
    assert_right({f"t{i}": own.output(f"t{i}", 2) for i in OUTPUTS}, x)


def test_only_a_buffer_that_is_one_tensor_is_lent() -> None:
    def places(plan: Plan) -> set[int]:
        operands = [operand for step in plan.machine.steps for operand in step.operands]
        buffers = np.array([-1 if operand.buffer is None else operand.buffer for operand in operands])
        return set(ZeroCopyBuffers(plan, buffers).operands)

    plan = mix_plan(READS, OUTPUTS)
    assert places(plan) == {0, *OUTPUTS}
    assert places(halo_plan()) == {0}                                                   # y has a halo
    second = plan.machine.outputs[1]
    assert places(plan.with_machine(outputs=(replace(second, buffer=0), second))) == {3}     # an input is an output
    assert places(plan.with_machine(outputs=(second, replace(second, name="same")))) == {0}
    wide = replace(plan.machine.inputs[0], strides=(48, 4))
    assert places(plan.with_machine(inputs=(wide,))) == {*OUTPUTS}


def somewhere(x: Array, at: int) -> Array:
    """Return a copy of the array, `at` bytes after the beginning of a page."""
    memory = np.empty(3 * PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + at
    memory[begin:begin + x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
    return memory[begin:begin + x.nbytes].view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("threads", [1, 2])
def test_items_are_read_wherever_they_lie(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Engine(mix_plan(READS, OUTPUTS), threads).create_context()
    x = some_input(4)
    pieces = [somewhere(x[:1], 64), somewhere(x[1:3], 1), somewhere(x[3:], PAGE - 240)]     # which ends with its page
    copied: list[Array] = []
    copy = np.copyto
    monkeypatch.setattr(np, "copyto", lambda to, array: copied.append(array) or copy(to, array))
    own.execute_with(4, {"x": pieces})
    assert_right({f"t{i}": own.output(f"t{i}", 4) for i in OUTPUTS}, x)
    if threads == 1:
        assert own.zero_copy_inputs == {"x"} and [own.accepts("x", piece) for piece in pieces] == [True, True, False]
        assert [id(array) for array in copied] == [id(pieces[2])]
    else:
        assert not own.zero_copy_inputs and not own.accepts("x", pieces[0])
    own.close()


def test_a_number_stands_for_items_in_the_slots_and_the_next_run_is_on_all_slots() -> None:
    own = Engine(mix_plan(READS, OUTPUTS)).create_context()
    x, other = some_input(4), some_input(4, seed=1)
    own.input("x", 4)[...] = x
    own.execute_with(4, {"x": [1, somewhere(other[1:3], 3)]})
    assert_right({f"t{i}": own.output(f"t{i}", 4) for i in OUTPUTS}, np.concatenate([x[:1], other[1:3], x[3:]]))
    own.execute(4)
    assert_right({f"t{i}": own.output(f"t{i}", 4) for i in OUTPUTS}, x)
    own.execute_with(4, {"x": [3, somewhere(other[3:], 3)]})
    assert_right({f"t{i}": own.output(f"t{i}", 4) for i in OUTPUTS}, np.concatenate([x[:3], other[3:]]))


def test_items_that_do_not_fit_are_refused_and_none_stay_lent() -> None:
    own = Engine(mix_plan(READS, OUTPUTS)).create_context()
    x, other = some_input(4), some_input(4, seed=1)
    own.input("x", 4)[...] = x
    for wrong in (other[1:, :3], other[1:].astype(np.int64), other, some_input(3).view(np.float32)):
        with pytest.raises(InputError, match="from item 1 on"):
            own.execute_with(4, {"x": [other[:1], wrong]})
    with pytest.raises(InputError, match="no input 'z'"):
        own.execute_with(4, {"x": [other[:1]], "z": [x]})
    own.execute(4)
    assert_right({f"t{i}": own.output(f"t{i}", 4) for i in OUTPUTS}, x)


def test_only_what_reads_one_item_after_the_other_takes_them_apart() -> None:
    def taken(plan: Plan) -> bool:
        return bool(LoadedPlan(plan).zero_copy.items)

    def first(**changes: Any) -> Plan:
        return plan.with_machine(steps=(replace(reader, **changes), *plan.machine.steps[1:]))

    plan = mix_plan(READS, OUTPUTS)
    reader, item = plan.machine.steps[0], 240
    assert taken(plan) and LoadedPlan(plan).zero_copy.readers == {0, 1}
    assert not taken(first(row_step=4))                         # a tile may have rows of two items
    assert not taken(first(reads=(), writes=()))                # it may read whatever it likes
    assert not taken(first(reads=(replace(reader.reads[0], item_stride=0), reader.reads[1])))
    assert not taken(first(reads=(replace(reader.reads[0], end=item + SLACK + 1), reader.reads[1])))
    assert not taken(first(reads=(replace(reader.reads[0], stride=100), reader.reads[1])))
    assert taken(first(constant_bytes=item // 2)) and not taken(first(constant_bytes=item // 2 + 1))
    output = plan.machine.outputs[0]
    assert not taken(plan.with_machine(outputs=(replace(output, buffer=0), *plan.machine.outputs[1:])))
    whole = replace(plan.machine.inputs[0], batched=False, shape=(24, 10))
    assert not taken(replace(plan.with_machine(inputs=(whole,)), inputs=(IoTensor("x", "int32", (24, 10)),)))


def test_what_others_may_write_meanwhile_is_lent_to_steps_that_only_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def context_of(family: str) -> ExecutionContext:
        plan = mix_plan(READS, OUTPUTS)
        return Engine(plan.with_machine(steps=tuple(
            replace(step, tactic=f"{family}: default") for step in plan.machine.steps))).create_context()

    x = some_input(4)
    at_the_end = somewhere(x, PAGE - x.nbytes)
    pieces = [ChangingArray(x.shape, x.dtype, at_the_end.data) for _ in range(2)]
    pieces[1].address = at_the_end.ctypes.data
    copied: list[Array] = []
    copy = np.copyto
    monkeypatch.setattr(np, "copyto", lambda to, array: copied.append(array) or copy(to, array))
    for family, lent in (("pointwise", True), ("top_k", False), ("of tomorrow", False)):
        own = context_of(family)
        for piece in pieces:
            assert own.accepts("x", piece) == lent and not own.accepts("x", at_the_end) and own.accepts("x", x)
            own.execute_with(4, {"x": [piece]})
            assert_right({f"t{i}": own.output(f"t{i}", 4) for i in OUTPUTS}, x)
            assert len(copied) == (not lent)
            assert_right(own.run({"x": piece}, 4), x)
            copied.clear()


def test_steps_that_only_compute_are_of_families_that_there_are() -> None:
    def below(problem: type[Problem]) -> Iterator[type[Problem]]:
        for kind in problem.__subclasses__():
            yield from (kind, *below(kind))

    for module in pkgutil.iter_modules(problems.__path__):
        importlib.import_module(f"{problems.__name__}.{module.name}")
    families = {getattr(kind, "family", "") for kind in below(Problem)}
    assert families > VOLATILE_SAFE
    others = families - VOLATILE_SAFE
    assert {"top_k", "lookup", "gather_elements", "scatter", "nest", "suppression", "recurrence"} <= others


def test_a_results_memory_is_used_again_when_its_last_view_is_gone_and_not_before() -> None:
    results = Results()
    first = results.array((4, 100), np.dtype(np.float32))
    at, row = first.ctypes.data, first[1:]
    assert results.array((4, 100), np.dtype(np.float32)).ctypes.data != at
    del first
    assert results.array((4, 100), np.dtype(np.float32)).ctypes.data != at
    del row
    assert results.array((4, 100), np.dtype(np.float32)).ctypes.data == at


def test_a_debugger_that_holds_what_it_looks_at_frees_no_memory() -> None:
    """Tracing is on while the module is imported and while it runs."""
    found = importlib.util.find_spec("infer_server.engines.runtime.results")
    assert found is not None and found.loader is not None
    module, before = importlib.util.module_from_spec(found), sys.gettrace()

    def look(frame: FrameType, event: str, value: object) -> Callable[..., Any]:
        assert frame.f_locals is not None
        return look

    def addresses(results: Results) -> list[int]:
        held = [results.array((4,), np.dtype(np.float32)) for _ in range(3)]
        return [array.ctypes.data for array in held]

    sys.settrace(look)
    try:
        found.loader.exec_module(module)
        looked_at = module.Results()
        assert len(set(addresses(looked_at))) == 3
    finally:
        sys.settrace(before)
    assert len(set(addresses(looked_at))) == 3


def test_without_the_gil_no_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    results = Results()
    at = results.array((4,), np.dtype(np.float32)).ctypes.data
    assert results.array((4,), np.dtype(np.float32)).ctypes.data != at


def test_results_of_many_shapes_are_not_kept_without_end() -> None:
    results = Results()
    for rows in range(1, 100):
        results.array((rows, 1 << 18), np.dtype(np.float32))
    kept = sum(array.nbytes for arrays in results._arrays.values() for array in arrays)
    assert 0 < kept == results._bytes <= MOST_BYTES
