"""What shapes are expected of what was asked for."""
from __future__ import annotations

from engines.runtime.policy import ONCE, REMEMBERED, Demand


def test_shapes_come_once_where_none_of_the_last_was_asked_for_again() -> None:
    demand = Demand(most=16)
    assert not demand.comes_once
    assert all(demand.is_new((length,)) for length in range(ONCE)) and demand.comes_once
    demand.again((1,))
    assert not demand.comes_once
    assert not demand.is_new((2,)) and demand.is_new((ONCE,)) and not demand.comes_once
    assert demand.is_new((ONCE + 1,)) and demand.comes_once


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    demand = Demand(most=1)
    for length in range(REMEMBERED + 1):
        demand.is_new((length,))
    assert not demand.is_new((0,)) and demand.is_new((REMEMBERED + 1,)) and demand.is_new((0,))
