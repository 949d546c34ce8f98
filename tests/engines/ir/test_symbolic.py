"""Symbolic integers: a result at one extent holds for every extent at which the guards hold."""
from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infer_server.engines.ir.deferred import Deferred, LateBytes, array_of, numbers
from infer_server.engines.ir.polynomials import Polynomial
from infer_server.engines.ir.shapes import BatchInt, broadcast, dim, extent
from infer_server.engines.ir.symbolic import NotSymbolic, ShapeEnv, as_int, is_symbolic, plain, structure


def value_at(env: ShapeEnv, polynomial: Polynomial, extents: list[int]) -> int:
    """Evaluate a polynomial with these extents."""
    def atom(index: int) -> int:
        what: Any = env.atoms[index]
        return extents[index] if isinstance(what, str) else (
            value_at(env, what.over, extents) // value_at(env, what.by, extents))
    return sum(factor * math.prod(map(atom, monomial)) for monomial, factor in polynomial)


def holds(env: ShapeEnv, extents: list[int]) -> bool:
    for (relation, polynomial), answer in env.guards.items():
        value = value_at(env, polynomial, extents)
        if (value == 0 if relation == "==" else value < 0) != answer:
            return False
    return True


DONE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "max": max,
    "min": min, "abs": lambda x, y: abs(x), "ceil": lambda x, y: -(-x // y),
    "if": lambda x, y: x if x < y else y + 1 if x == y else 7}


def program(seed: int) -> Callable[..., list[int]]:
    """Return a function of two numbers that computes and branches at random, fixed by the seed."""
    def run(a: Any, b: Any) -> list[Any]:
        chance = random.Random(seed)
        known: list[Any] = [a, b, 1, 2, 3, 8]
        for _ in range(12):
            x, y = chance.choice(known), chance.choice(known)
            do = chance.choice(list(DONE))
            if do in ("//", "%", "ceil") and y == 0:
                continue
            known.append(DONE[do](x, y))
        return known
    return run


def test_what_was_counted_at_one_extent_is_right_at_every_other_at_which_the_guards_hold() -> None:
    others = served = 0
    for seed in range(150):
        env, run, chance = ShapeEnv(), program(seed), random.Random(-seed)
        traced = run(env.extent("a", 7), env.extent("b", 12))
        assert plain(tuple(traced)) == tuple(run(7, 12))
        for _ in range(20):
            extents = [chance.randrange(1, 30), chance.randrange(1, 30)]
            others += 1
            if holds(env, extents):
                served += 1
                polynomials = [getattr(one, "expr", None) for one in traced]
                assert [value_at(env, p, extents) if p is not None else one
                        for p, one in zip(polynomials, traced, strict=True)] == run(*extents)
    assert served > others // 20        # the test is not vacuous


def test_what_is_so_for_all_extents_is_not_guarded() -> None:
    env = ShapeEnv()
    n = env.extent("n", 5)
    before = dict(env.guards)
    assert n > 0 and n + 1 != 0 and n * 4 // 4 == n and not n < 1 and 8 * n % 4 == 0
    assert env.guards == before
    assert n != 6 and env.guards != before


def test_quotients_of_quotients_are_one() -> None:
    n = ShapeEnv().extent("n", 224)
    assert structure(((n + 1) // 2 + 1) // 2) == structure((n + 3) // 4)


@pytest.mark.parametrize("taking", [
    range, int, float, hash, lambda n: [0, 1, 2][n], lambda n: [0, 1, 2][:n], lambda n: n / 2, lambda n: 1.5 * n,
    lambda n: np.zeros(n), lambda n: np.array([n, 1], np.int64), lambda n: {n: 0},
    lambda n: n in {1, 2}, lambda n: 1 << n, lambda n: math.sqrt(n), lambda n: np.float32(2) * n])
def test_whoever_takes_the_number_itself_is_told_that_there_is_none(taking: Callable[[Any], Any]) -> None:
    with pytest.raises(NotSymbolic):
        taking(ShapeEnv().extent("n", 2))


def test_a_pinned_number_is_no_error_of_a_model() -> None:
    assert not issubclass(NotSymbolic, Exception)


def test_it_passes_for_an_int_and_stays_itself() -> None:
    n = ShapeEnv().extent("n", 3)
    assert isinstance(n, int) and as_int(n) is n and as_int(np.int64(4)) == 4
    assert is_symbolic((1, [n])) and not is_symbolic((1, 2)) and plain((n, 2)) == (3, 2)


def test_an_extent_of_the_batch_counts_with_them() -> None:
    env = ShapeEnv()
    n = env.extent("n", 3)
    written = dim(BatchInt(1) * n + 1)
    assert extent(written) == BatchInt(n, 1) and written == dim(BatchInt(n, 1)) and written != "batch"
    assert broadcast((n, 1), (1, 4)) == (n, 4)


def test_the_elements_of_a_deferred_constant_are_not_known() -> None:
    n = ShapeEnv().extent("n", 3)
    array: Any = numbers([n, 5], np.dtype(np.int64), (2,))
    assert isinstance(array + 1, Deferred) and np.array_equal((array + 1).now(), [4, 6])
    assert (array.shape, array.size, array.dtype) == ((2,), 2, np.int64)
    for asking in (np.asarray, list, np.sum, bool, lambda a: a.tolist(), lambda a: bool(a == 3), lambda a: a[1]):
        with pytest.raises(NotSymbolic):
            asking(array)


def test_late_bytes_of_another_size_than_they_were_placed_by_are_refused() -> None:
    n = ShapeEnv().extent("n", 3)
    late = LateBytes((b"ab" * 32, numbers([n], np.dtype(np.int64), (1,)), array_of(np.arange, [n], (n,), np.int64),
                      numbers([n, 7], np.dtype(np.int64), (2,)), bytes(8)), 64)
    joined, arrays, values = late.joiner()
    assert values == [n, n, 7] and [array.nbytes for array in arrays] == [8 * n]
    expected = (b"ab" * 32, np.array([5]), np.array([4, 6, 8]), np.array([5, 7]), bytes(64))
    assert joined([np.array([4, 6, 8])], [24], [5, 5, 7]) == b"".join(
        part + bytes(-len(part) % 64) for part in map(bytes, expected))
    with pytest.raises(ValueError, match="16"):
        joined([np.array([5, 6])], [24], [5, 5, 7])


def test_no_number_is_neither_more_nor_less() -> None:
    env = ShapeEnv()
    n = env.extent("n", 5)
    assert not any((n < math.nan, n <= math.nan, n > math.nan, n >= math.nan, n == math.nan)) and n != math.nan
    assert n <= math.inf and n >= -math.inf and not n >= math.inf
