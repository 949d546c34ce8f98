"""Tests of the distribution of cores to instances."""
from __future__ import annotations

import pytest
from google.protobuf import text_format

from infer_server.batching.policy import BatchPolicy, Send, decide, share
from infer_server.config.autocomplete import complete
from infer_server.errors import ModelConfigError
from infer_server.protos import model_config
from infer_server.repository.cores import ARENA_BUDGET_BYTES, CpuDealer, default_instances
from scripts.testing.numpy_engine import NumpyEngine
from tests.infer_server.batching.test_paying_batch import ones


def test_a_model_that_says_nothing_has_an_instance_for_every_core_that_its_threads_leave() -> None:
    assert default_instances(cores=8, threads=1, arena_bytes=0) == 8
    assert default_instances(cores=8, threads=3, arena_bytes=0) == 2
    assert default_instances(cores=2, threads=4, arena_bytes=0) == 1


def test_the_memory_of_instances_that_nobody_asked_for_is_limited() -> None:
    assert default_instances(cores=64, threads=1, arena_bytes=ARENA_BUDGET_BYTES // 5) == 5
    assert default_instances(cores=64, threads=1, arena_bytes=2 * ARENA_BUDGET_BYTES) == 1


@pytest.mark.parametrize(("text", "count"), [
    ("", 4), ("instance_group { kind: KIND_CPU }", 4), ("instance_group { count: 2 }", 2),
    ("dynamic_batching { preserve_ordering: true }", 1)])
def test_a_configuration_goes_before_the_default(text: str, count: int) -> None:
    message = text_format.Parse(text, model_config.ModelConfig())
    completed = complete(message, "m", NumpyEngine(), "model.plan", instances=4)
    assert [group.count for group in completed.instance_group] == [count]


def test_cpus_are_dealt_in_turn() -> None:
    dealer = CpuDealer([2, 3, 5])
    assert [dealer.deal(2), dealer.deal(2), dealer.deal(1)] == [(2, 3), (5, 2), (3,)]
    with pytest.raises(ModelConfigError, match="4 threads, but this process may use only 3 CPUs"):
        dealer.deal(4)


def test_batches_are_not_shared_out_where_the_policy_asks_for_full_ones() -> None:
    assert (share(7, 2), share(7, 0)) == (3, 7)
    waiting = ones(7)
    assert decide(waiting, 0, BatchPolicy(8), idle=2) == Send(3)
    assert decide(waiting, 0, BatchPolicy(8, preferred_batch_sizes=frozenset({4})), idle=2) == Send(4)
    assert decide(waiting, 10**6, BatchPolicy(8, max_queue_delay_us=100), idle=2) == Send(7)
