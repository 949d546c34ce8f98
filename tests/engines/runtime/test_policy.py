"""Tests of the demand for shapes, and of idle memory."""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.engines.runtime.policy import IDLE_BYTES, ONCE, REMEMBERED, Demand, IdleMemory, Kept


def test_shapes_come_once_where_none_of_the_last_was_asked_for_again() -> None:
    demand = Demand(most=16)
    assert not demand.comes_once
    assert all(demand.count((length,)) == 1 for length in range(ONCE)) and demand.comes_once
    assert demand.count((1,)) == 2 and not demand.comes_once
    assert demand.count((2,)) == 2 and demand.count((ONCE,)) == 1 and not demand.comes_once
    assert demand.count((ONCE + 1,)) == 1 and demand.comes_once


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    demand = Demand(most=1)
    for length in range(REMEMBERED + 1):
        demand.count((length,))
    assert demand.count((0,)) == 2 and demand.count((REMEMBERED + 1,)) == 1 and demand.count((0,)) == 1


class _Shape:
    """Stand-in for an engine, compared and freed by identity."""


def test_idle_memory_of_the_shapes_used_longest_ago_is_freed() -> None:
    freed: list[_Shape] = []
    memory, shapes = IdleMemory[_Shape](freed.append), [_Shape() for _ in range(4)]
    half = IDLE_BYTES // 2
    for shape in (shapes[0], shapes[1], shapes[0], shapes[2]):
        memory.use(shape, half)
    assert freed == [shapes[1]]
    memory.use(shapes[3], 3 * IDLE_BYTES)           # two arenas of the shape in use are kept
    assert freed == [shapes[1]]


def test_a_shape_that_nobody_has_any_more_is_not_counted() -> None:
    freed: list[_Shape] = []
    memory, kept = IdleMemory[_Shape](freed.append), _Shape()
    memory.use(kept, IDLE_BYTES // 2)
    for _ in range(5):
        memory.use(_Shape(), IDLE_BYTES // 2)
    assert not freed


def test_engines_used_longest_ago_are_dropped_beyond_a_number_or_so_many_bytes() -> None:
    few, small = Kept[str, _Engine](3, 1000), Kept[str, _Engine](9, 100)
    for key in "abcd":
        few.keep(key, _Engine(30))
        small.keep(key, _Engine(30))
    assert [*few] == [*small] == ["b", "c", "d"]
    small.move_to_end("b")
    small.keep("c", _Engine(60))            # in place of the one of 30
    assert [*small] == ["b", "c"]
    assert small.pop("b").bytes == 30 and small.pop("b", None) is None
    small.keep("e", _Engine(40))
    assert [*small] == ["c", "e"]
    small.keep("large", _Engine(200))
    assert [*small] == ["large"], "the last one is kept, whatever its size"


@dataclass
class _Engine:
    bytes: int
