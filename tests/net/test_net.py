"""Fixed sample of the random graphs; `python -m tests.net` draws others, 500 of each family."""
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import sampled_from

from tests.net.check import check
from tests.net.graphs import Case
from tests.net.strategies import MIXED, NAMES, cases
from tests.net.symbolic_plans import check as check_symbolic_plan

EXAMPLES = 10           # examples of a family, in half a second or one


@pytest.mark.parametrize("family", NAMES)
def test_random_graphs_compute_what_onnx_says(family: str) -> None:
    @settings(max_examples=EXAMPLES * (3 if family == MIXED else 1), derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
    @given(cases(family))
    def search(case: Case) -> None:
        check(case)

    search()


def test_symbolic_plans_of_random_graphs_give_what_is_made_for_the_extents_alone() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=10 * EXAMPLES, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
    @given(sampled_from(NAMES).flatmap(cases))
    def search(case: Case) -> None:
        seen[check_symbolic_plan(case)] += 1

    search()
    assert seen["served"] > sum(seen.values()) // 5, seen       # the test is not vacuous
