"""Some of the net's graphs, the same in every run; `python -m tests.net` makes others."""
from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.net.check import check
from tests.net.graphs import Case
from tests.net.strategies import MIXED, NAMES, cases

EXAMPLES = 20           # of a family, in a second or two


@pytest.mark.parametrize("family", NAMES)
def test_random_graphs_compute_what_onnx_says(family: str) -> None:
    @settings(max_examples=EXAMPLES * (3 if family == MIXED else 1), derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
    @given(cases(family))
    def search(case: Case) -> None:
        check(case)

    search()
