"""Metrics that models make: shared by name and labels, gone with the last model that made them."""
from __future__ import annotations

import pytest

from infer_server.observing.custom_metrics import CustomMetrics, Owner


def test_a_metric_is_shared_and_goes_with_the_last_model_that_made_it() -> None:
    metrics, first, second = CustomMetrics(), Owner(), Owner()
    for owner in (first, second):
        metrics.make(owner, "rows", "counter", "Rows", {"a": "1", "b": "2"})
        metrics.change("rows", {"b": "2", "a": "1"}, "increment", 1)
    metrics.release(first)
    assert metrics.families() == [("rows", "counter", "Rows", [("", (("a", "1"), ("b", "2")), 2.0)])]
    metrics.release(second)
    metrics.change("rows", {"a": "1", "b": "2"}, "increment", 1)
    assert metrics.families() == [] and metrics.value("rows", {"a": "1", "b": "2"}) == 0


@pytest.mark.parametrize(("name", "kind", "labels", "bounds", "why"), [
    ("rows", "gauge", {}, (), "is a counter already, and no gauge"),
    ("1st", "gauge", {}, (), "is no name of a metric"),
    ("load", "gauge", {"le": "1"}, (), "'le' is no name of a label"),
    ("times", "histogram", {}, (), "a histogram has buckets"),
    ("times", "histogram", {}, (2.0, 1.0), "the bounds of which ascend"),
    ("sizes", "histogram", {}, (1.0, 3.0), r"has the buckets \[1.0, 2.0\] already"),
])
def test_a_metric_that_is_none_or_contradicts_another_is_refused(
        name: str, kind: str, labels: dict[str, str], bounds: tuple[float, ...], why: str) -> None:
    metrics, owner = CustomMetrics(), Owner()
    metrics.make(owner, "rows", "counter", "", {})
    metrics.make(owner, "sizes", "histogram", "", {}, (1.0, 2.0))
    with pytest.raises(ValueError, match=why):
        metrics.make(owner, name, kind, "", labels, bounds)
