"""Metrics that models make: shared by name and labels, gone with the last model that made them."""
from __future__ import annotations

import math
from typing import cast

import pytest

from infer_server.observing.custom_metrics import MOST, CustomMetrics, Owner


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
    ("load", "gauge", {"__name__": "rows"}, (), "'__name__' is no name of a label"),
    ("load", "gauge", {"l": "\udc80"}, (), "surrogates not allowed"),
    ("load", "gauge", {"l": 1}, (), "expected text, got 1"),
    (5, "gauge", {}, (), r"'5' \(gauge\) is no name of a metric"),
    ("times", "histogram", {}, (1.0, math.inf), "inf is no bound of a bucket"),
    ("times", "histogram", {}, (False, True), "False is no bound of a bucket"),
    ("times", "histogram", {}, ("x", 1.0), "'x' is no bound of a bucket"),
    ("sizes_count", "counter", {}, (), "the histogram 'sizes' has samples that are named 'sizes_count', too"),
    ("ro", "histogram", {}, (1.0,), "the counter 'ro_sum' has samples that are named 'ro_sum', too"),
    ("times", "histogram", {}, (), "a histogram has buckets"),
    ("times", "histogram", {}, (2.0, 1.0), "the bounds of which ascend"),
    ("sizes", "histogram", {}, (1.0, 3.0), r"has the buckets \[1.0, 2.0\] already"),
])
def test_a_metric_that_is_none_or_contradicts_another_is_refused(
        name: str, kind: str, labels: dict[str, str], bounds: tuple[float, ...], why: str) -> None:
    metrics, owner = CustomMetrics(), Owner()
    metrics.make(owner, "rows", "counter", "", {})
    metrics.make(owner, "ro_sum", "counter", "", {})
    metrics.make(owner, "sizes", "histogram", "", {}, (1, 2))
    before = metrics.families()
    with pytest.raises(ValueError, match=why):
        metrics.make(owner, name, kind, "", labels, bounds)
    assert metrics.families() == before


def test_a_metric_that_no_page_could_show_for_its_text_is_refused() -> None:
    for text in (None, "\udc80"):
        with pytest.raises(ValueError, match="expected text, got None|surrogates not allowed"):
            CustomMetrics().make(Owner(), "rows", "counter", cast(str, text), {})


def test_a_model_has_so_many_metrics_and_no_more() -> None:
    metrics, owner = CustomMetrics(), Owner()
    for number in range(MOST):
        metrics.make(owner, "rows", "counter", "", {"of": str(number)})
    with pytest.raises(ValueError, match=f"its model has {MOST} metrics already"):
        metrics.make(owner, "rows", "counter", "", {"of": "one more"})
    metrics.make(owner, "rows", "counter", "", {"of": "0"})
    metrics.make(Owner(), "rows", "counter", "", {"of": "another's"})
