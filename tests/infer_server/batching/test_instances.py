"""Tests of the execution of a batch by an instance."""
from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from infer_server.batching.batch_times import ShortBatches
from infer_server.batching.batcher import Batcher
from infer_server.batching.engine_executor import EngineExecutor, copy_into
from infer_server.batching.instances import Instance
from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution

SHORT_NS, LONG_NS = 1_000, 10_000_000


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


class RecordingExecutor:
    """Executor that returns the number of items, and records the threads that call it."""

    def __init__(self, computing_ns: int = SHORT_NS, encoding_ns: int = 0) -> None:
        self.threads: list[threading.Thread] = []
        self.computed_ns, self.encoded_ns = computing_ns, computing_ns + encoding_ns

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        self.threads.append(threading.current_thread())
        items = sum(request.items for request in batch)
        return [(request, request.items) for request in batch], BatchExecution(
            items, 0, 0, 0, self.computed_ns, self.encoded_ns)

    def close(self) -> None: ...


def instance_of(executor: RecordingExecutor, *items: int, short: ShortBatches | None) -> tuple[Instance, Batcher]:
    """Return an instance without a running thread, and its queue filled with requests of these sizes in items."""
    batcher = Batcher("m", BatchPolicy(4), QueuePolicy(), lambda requests, error: None)
    for count in items:
        batcher.submit(Request({"x": np.zeros(count)}, count, (), lambda outputs: b"", reply=None))
    return Instance("m", batcher, executor, lambda outcomes, execution: None, short=short), batcher


def known(max_batch: int = 4, **ns: int) -> ShortBatches:
    short = ShortBatches(max_batch)
    for items, each in ((1, "one"), (max_batch, "most")):
        short.add(items, ns.get(each, SHORT_NS), ns.get(each, SHORT_NS))
    return short


def test_a_short_batch_is_executed_by_who_finds_it_waiting() -> None:
    executor = RecordingExecutor()
    instance, batcher = instance_of(executor, 1, 2, 3, short=known())
    done = instance.execute_short()
    assert done is not None and [result for _, result in done[0]] == [1, 2], "a fourth item would be too many"
    assert executor.threads == [threading.current_thread()] and len(batcher) == 1


@pytest.mark.parametrize("short", [None, known(most=LONG_NS), known(one=LONG_NS, most=LONG_NS)],
                         ids=["nobody knows", "long", "long even alone"])
def test_a_batch_that_is_not_known_to_be_short_stays_in_the_queue(short: ShortBatches | None) -> None:
    executor = RecordingExecutor()
    instance, batcher = instance_of(executor, 1, 2, short=short)
    assert instance.execute_short() is None and not executor.threads and len(batcher) == 2


def test_a_batch_with_a_lengthy_request_waits_for_the_thread_and_says_nothing_of_others() -> None:
    executor, short = RecordingExecutor(LONG_NS), known()
    instance, batcher = instance_of(executor, 1, short=short)
    batcher.submit(Request({"x": np.zeros(1)}, 1, (), lambda outputs: b"", reply=None, lengthy=True))
    assert instance.execute_short() is None and not executor.threads and len(batcher) == 2
    instance.start()
    batcher.close()
    instance.join()
    assert len(executor.threads) == 1 and short.is_short(2)


def test_an_instance_goes_on_where_answers_could_not_be_handed_out(caplog: pytest.LogCaptureFixture) -> None:
    def fail(outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        raise OSError("too many open files")

    executor = RecordingExecutor()
    _, batcher = instance_of(executor, 4, 4, short=None)
    instance = Instance("m", batcher, executor, fail)
    batcher.close()
    instance.start()
    instance.join()
    assert len(executor.threads) == 2 and caplog.text.count("m could not deliver the responses of a batch") == 2


def test_an_instance_that_executes_takes_no_short_batch_beside_it() -> None:
    class Nested(RecordingExecutor):
        def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
            assert instance.execute_short() is None
            return super().execute(batch)

    executor = Nested()
    instance, batcher = instance_of(executor, 4, 4, short=known())
    assert instance.execute_short() is not None
    assert len(executor.threads) == 1 and len(batcher) == 1


@pytest.mark.parametrize("executor", [RecordingExecutor(LONG_NS), RecordingExecutor(SHORT_NS, LONG_NS)],
                         ids=["to compute", "to encode"])
def test_a_batch_that_takes_long_again_and_again_counts_as_short_no_more(executor: RecordingExecutor) -> None:
    instance, batcher = instance_of(executor, *[4] * 100, short=known())
    while instance.execute_short() is not None:
        assert len(executor.threads) < 10
    assert len(executor.threads) > 1, "any machine is busy now and then"


def test_sizes_that_were_not_measured_take_no_longer_than_the_largest() -> None:
    short = known(8)
    assert [size for size in range(1, 12) if short.is_short(size)] == list(range(1, 9))
    assert not ShortBatches(8).is_short(1)


@pytest.mark.parametrize(("cores", "expected"), [(1, [1, 8]), (2, [1, 8]), (3, [1])])
def test_on_few_cores_the_time_of_each_item_decides_within_a_limit_of_the_batch(
        cores: int, expected: list[int]) -> None:
    short = ShortBatches(64, cores)
    for items in (1, 8, 64):
        short.add(items, 40_000 * items, 45_000 * items)
    assert [items for items in (1, 8, 64) if short.is_short(items)] == expected
    short.add(4, 60_000 * 4, 60_000 * 4)
    assert not short.is_short(4), "an item takes long"


def test_one_slow_measurement_of_the_largest_size_does_not_count_for_all_others() -> None:
    short = known(32, most=LONG_NS)
    assert [size for size in range(1, 33) if short.is_short(size)] == [1, 2], "at most twice a measured size"
    short.add(2, SHORT_NS, SHORT_NS)
    short.add(4, LONG_NS, LONG_NS)
    assert [size for size in range(1, 33) if short.is_short(size)] == [1, 2, 3], "which was measured is not estimated"


def test_the_time_that_an_instances_thread_waits_does_not_make_a_batch_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits for the interpreter lock after the execution, for as long as the event loop holds it."""
    monkeypatch.setattr(time, "thread_time_ns", itertools.count(1, SHORT_NS).__next__)
    executor, short = RecordingExecutor(LONG_NS), known(most=LONG_NS)
    instance, batcher = instance_of(executor, *[4] * 100, short=short)
    assert not short.is_short(4)
    batcher.close()
    instance.start()
    instance.join()
    assert len(executor.threads) == 100 and short.is_short(4)


@pytest.mark.parametrize("layout", ["small", "large", "strided", "halves", "bfloat16"])
def test_inputs_of_a_batch_are_joined_in_the_order_of_its_requests(layout: str) -> None:
    size = 4 if layout == "small" else 600
    dtype = {"halves": np.dtype(np.float16), "bfloat16": np.dtype(bfloat16)}.get(layout, np.dtype(np.float32))
    tensors = [np.full((items, size), first, dtype) for items, first in ((1, 1), (2, 2), (1, 3))]
    if layout == "strided":
        tensors = [np.repeat(tensor, 2, axis=1)[:, ::2] for tensor in tensors]
    context = NumpyBatch(np.zeros((4, size), dtype))
    batch = [Request({"x": tensor}, len(tensor), (), dict, reply=None) for tensor in tensors]
    outcomes, _ = EngineExecutor(context, ["x"], max_batch=4).execute(batch)
    assert context.slots[:, 0].tolist() == [1, 2, 2, 3] and (context.slots == context.slots[:, :1]).all()
    assert [computed["x"].shape for _, computed in outcomes] == [(1, size), (2, size), (1, size)]


class NumpyBatch:
    """Context whose output is its input."""

    def __init__(self, slots: np.ndarray[Any, Any]) -> None:
        self.slots = slots

    def at(self, shapes: Any) -> NumpyBatch:
        return self

    def input(self, name: str, batch: int) -> np.ndarray[Any, Any]:
        return self.slots[:batch]

    output = input

    def execute(self, batch: int) -> None: ...

    def close(self) -> None: ...
