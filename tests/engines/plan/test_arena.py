"""Tests of the memory planner's rules on random plans."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.errors import PlanError
from infer_server.engines.plan.arena import Layout, Memory, MemoryPool, array_at, plan_memory, rounded_up, write_halo
from infer_server.engines.plan.plan import Buffer, Fill, TensorView


def random_buffers(rng: np.random.Generator) -> tuple[list[Buffer], list[Fill]]:
    """Return buffers of chains of steps with residuals, some with halos."""
    steps = int(rng.integers(2, 40))
    buffers = [Buffer("in", int(rng.integers(1, 50_000)), -1, int(rng.integers(0, steps)))]
    fills = []
    for step in range(steps):
        last = steps if rng.random() < 0.1 else min(step + int(rng.integers(1, 6)), steps - 1)
        size = int(rng.choice([64, 100, 5000, 5000, 40_000]))
        buffers.append(Buffer(f"b{step}", size, step, max(last, step)))
        if rng.random() < 0.3:
            view = TensorView(f"b{step}", "uint8", (size,), len(buffers) - 1, 0, (1,), size)
            fills.append(Fill(view, float(rng.choice([0, 128])), ((int(rng.choice([1, 2])), 1),)))
    return buffers, fills


def conflicts(buffers: Sequence[Buffer], fills: Sequence[Fill], layout: Layout) -> list[tuple[str, str]]:
    """Return the pairs of buffers that overlap in memory and must not."""
    halo = {f.view.buffer: (f.value, f.halo, f.view.shape) for f in fills}
    end = max(b.last for b in buffers)
    # An input keeps its memory to the end.
    lives = [(b.first, end if b.first < 0 else b.last) for b in buffers]
    bad = []
    for j, b in enumerate(buffers):
        for i, a in enumerate(buffers[:j]):
            start, other = layout.offsets[i], layout.offsets[j]
            if start + a.bytes <= other or other + b.bytes <= start:
                continue
            together = lives[i][0] <= lives[j][1] and lives[j][0] <= lives[i][1]
            same_halo = halo.get(i) == halo.get(j) and (i not in halo or start == other)
            if together or not same_halo:
                bad.append((a.name, b.name))
    return bad


def test_no_two_buffers_that_are_alive_together_overlap() -> None:
    rng = np.random.default_rng(0)
    shared = 0
    for _ in range(150):
        buffers, fills = random_buffers(rng)
        layout = plan_memory(buffers, fills)
        assert not conflicts(buffers, fills, layout)
        assert all(offset % 64 == 0 for offset in layout.offsets)
        assert layout.total >= max(o + b.bytes for o, b in zip(layout.offsets, buffers, strict=True))
        shared += layout.total < plan_memory(buffers, fills, reuse=False).total
    assert shared > 100, "the planner should share memory in nearly every plan"


def test_the_check_finds_an_overlap() -> None:
    buffers = [Buffer("a", 64, -1, 1), Buffer("b", 64, 0, 1)]
    assert conflicts(buffers, [], Layout((0, 32), 96)) == [("a", "b")]
    ended = [Buffer("a", 64, 0, 1), Buffer("b", 64, 2, 3)]
    assert conflicts(ended, [], Layout((0, 0), 64)) == []
    halo = Fill(TensorView("b", "uint8", (64,), 1, 0, (1,), 64), 0, ((1, 1),))
    assert conflicts(ended, [halo], Layout((0, 0), 64)) == [("a", "b")]


def test_without_reuse_every_buffer_has_memory_of_its_own() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        buffers, fills = random_buffers(rng)
        layout = plan_memory(buffers, fills, reuse=False)
        segments = sorted((o, o + b.bytes) for o, b in zip(layout.offsets, buffers, strict=True))
        assert all(end <= start for (_, end), (start, _) in zip(segments, segments[1:], strict=False))


def test_a_chain_of_two_live_buffers_takes_the_memory_of_two() -> None:
    size = 1 << 20
    layout = plan_memory([Buffer(f"b{i}", size, i, i + 1) for i in range(20)], [])
    assert layout.total < 2 * size + 3 * 4096


def test_large_buffers_begin_at_different_cache_sets() -> None:
    offsets = plan_memory([Buffer(f"b{i}", 8192, 0, 9) for i in range(16)], []).offsets
    assert len({offset % 4096 for offset in offsets}) == 16


def test_an_input_keeps_its_memory() -> None:
    buffers = [Buffer("x", 4096, -1, 0), Buffer("y", 4096, 0, 1), Buffer("z", 4096, 1, 2)]
    offsets = plan_memory(buffers, []).offsets
    assert offsets[0] not in offsets[1:]


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 64])
def test_memory_that_no_machine_has_is_a_plan_error(size: int) -> None:
    with pytest.raises(PlanError, match=f"cannot have {size} bytes of memory"):
        Memory(size)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_a_view_is_where_its_strides_say(dtype: str) -> None:
    memory = Memory(4096)
    assert memory.address % (2 << 20) == 0
    size = 1 if dtype == "uint8" else 2 if dtype == "bfloat16" else 4
    view = TensorView("t", dtype, (2, 3), 0, size, (8 * size, size), 16 * size)
    array = array_at(memory.bytes, 64, view, 2)
    array[1, 1, 2] = 7
    assert memory.bytes[64 + size + 16 * size + 8 * size + 2 * size:][:size].any()
    assert array_at(memory.bytes, 64, replace(view, batched=False), 2).shape == (2, 3)


def test_memory_of_a_pool_is_taken_again_when_the_last_view_of_it_is_gone() -> None:
    pool = MemoryPool()
    first = pool.take(1 << 22)
    first[...] = 7
    address, view = first.ctypes.data, first[100:200]
    del first
    other = pool.take(1 << 22)
    assert other.ctypes.data != address and (view == 7).all()
    del view
    again = pool.take((1 << 22) + 1000)             # a little more: blocks have room to spare
    assert again.ctypes.data == address and len(again) == (1 << 22) + 1000
    del again
    assert pool.take(1 << 10).ctypes.data != address, "a large block is not spent on a small arena"


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 4095, 1 << 20, (1 << 20) + 1])
def test_sizes_are_rounded_up_by_no_more_than_an_eighth(size: int) -> None:
    rounded = rounded_up(np.array([size]))
    assert size <= rounded[0] <= size * 9 / 8 and rounded_up(rounded) == rounded


@pytest.mark.parametrize("batched", [False, True])
def test_a_halo_is_written_around_the_tensor_in_new_slots_only(batched: bool) -> None:
    view = TensorView("t", "float32", (4, 5, 3), 0, 0, (60, 12, 4), 240, batched)
    fill, shape = Fill(view, 7.0, ((1, 0), (1, 2), (0, 0))), (2, 4, 5, 3) if batched else (4, 5, 3)
    array = np.zeros(shape, np.float32)
    write_halo(array, fill, 1 if batched else 0)
    inside = np.zeros(shape, bool)
    inside[..., 1:, 1:3, :] = True
    expected = np.where(inside, 0, 7)
    if batched:
        expected[0] = 0         # it has its halo already
    np.testing.assert_array_equal(array, expected)
