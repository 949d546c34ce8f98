"""Tests of PaddedBatches: requests of unlike lengths share a batch where their measured times say that it pays."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from infer_server.batching.batch_times import PaddedBatches
from infer_server.batching.batcher import Batcher
from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.batching.request import Request
from infer_server.repository.kinds.padding import Padding

AXIS = Padding({"x": 1}, {}, (8, 16, 32, 64, 128, 256, 512))
US = 1000
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def request(length: int, items: int = 1) -> Request:
    reply: Any = None
    return Request({"x": np.zeros((items, length), np.float32)}, items, length, lambda computed: None, reply)


def lengths_of(batch: Sequence[Request]) -> list[int]:
    return [AXIS.extent(one) for one in batch]


def batches(fixed_us: float, token_us: float, tokens: Sequence[int] = LENGTHS, max_batch: int = 8) -> PaddedBatches:
    """Return the policy of an engine whose executions take a fixed time and a time for each token."""
    policy = PaddedBatches(AXIS, max_batch)
    for count in tokens:
        for _ in range(3):
            policy.add(count, int(US * (fixed_us + token_us * count)), 0)
    return policy


def chosen(policy: PaddedBatches, *lengths: int, largest: int = 100) -> list[int]:
    return lengths_of(policy.choose([request(length) for length in lengths], largest))


def test_short_requests_share_a_batch_and_long_ones_are_alone() -> None:
    policy = batches(1000, 40)
    assert chosen(policy, 8, 256, 10, 250, 12) == [8, 10, 12]
    assert chosen(policy, 256, 200, 8, 9) == [256], "56 tokens take longer than an execution of its own saves"
    assert chosen(policy, 256, 200, 8, 250) == [256, 250]


def test_nothing_is_padded_if_an_execution_has_no_fixed_cost() -> None:
    assert chosen(batches(0, 1000), 8, 9, 10, 8) == [8, 8]


def test_requests_that_need_little_padding_come_first() -> None:
    assert chosen(batches(4000, 40), 8, 30, 7, 14, largest=3) == [8, 7, 14]


def test_a_longer_request_waits_if_it_would_pad_the_others_too_much() -> None:
    policy = batches(300, 40)
    assert chosen(policy, 8, 8, 8, 8, 60) == [8, 8, 8, 8]
    assert chosen(policy, 60, 8, 8, 8, 8) == [60]


@pytest.mark.parametrize(("tokens", "batch"), [((), [8, 7, 30]), ((8,), [8, 7]), ((8, 16, 32, 64), [8, 7, 30])])
def test_batches_up_to_twice_the_measured_size_are_tried(tokens: tuple[int, ...], batch: list[int]) -> None:
    assert chosen(batches(1000, 1, tokens), 8, 30, 7) == batch


def test_items_count_up_to_the_largest_batch() -> None:
    policy = batches(100_000, 1, max_batch=4)
    queue = [request(8, 2), request(9, 1), request(10, 2), request(11, 1)]
    assert lengths_of(policy.choose(queue, 100)) == [8, 9]
    assert lengths_of(policy.choose([request(8, 6), request(8)], 100)) == [8]
    assert AXIS.padded_extent(queue[:1]) == 8 and AXIS.padded_extent(queue[:2]) == 16


def test_a_batcher_takes_requests_behind_others_and_leaves_these_in_their_order() -> None:
    batcher = Batcher("m", BatchPolicy(8), QueuePolicy(), lambda requests, error: None)
    batcher.pad(AXIS)
    for tokens in LENGTHS:
        for _ in range(3):
            batcher.record_padded(tokens, int(US * (1000 + 40 * tokens)))
    for length in (8, 256, 9, 200, 16):
        batcher.submit(request(length))
    taken = []
    while len(batcher):
        taken.append(lengths_of(batcher.take() or []))
    assert taken == [[8, 9, 16], [256], [200]]


def test_a_size_that_was_slow_is_tried_again_after_a_while() -> None:
    policy = batches(1000, 10, (8, 16))
    for _ in range(3):
        policy.add(32, 100_000 * US, 0)
    assert chosen(policy, 16, 16) == [16]
    policy.add(8, 1080 * US, 40 * 1_000_000_000)
    policy.add(16, 1160 * US, 40 * 1_000_000_000)
    assert chosen(policy, 16, 16) == [16], "its trial takes long, and so the pause after it"
    policy.add(16, 1160 * US, 51 * 1_000_000_000)
    assert chosen(policy, 16, 16) == [16, 16]
