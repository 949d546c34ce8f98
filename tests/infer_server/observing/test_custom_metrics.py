"""Metrics created by Python models are shared by name and labels, and removed with the last model using them."""
from __future__ import annotations

import math
from typing import cast

import pytest

from infer_server.observing.custom_metrics import MAX_METRICS, CustomMetrics, MetricsOwner


def test_a_metric_is_shared_and_goes_with_the_last_model_that_made_it() -> None:
    metrics, first, second = CustomMetrics(), MetricsOwner(), MetricsOwner()
    for owner in (first, second):
        metrics.make(owner, "rows", "counter", "Rows", {"a": "1", "b": "2"})
        metrics.change("rows", {"b": "2", "a": "1"}, "increment", 1)
    metrics.release(first)
    assert metrics.families() == [("rows", "counter", "Rows", [("", (("a", "1"), ("b", "2")), 2.0)])]
    metrics.release(second)
    metrics.change("rows", {"a": "1", "b": "2"}, "increment", 1)
    assert metrics.families() == [] and metrics.value("rows", {"a": "1", "b": "2"}) == 0


@pytest.mark.parametrize(("name", "kind", "labels", "bounds", "why"), [
    ("rows", "gauge", {}, (), "already exists as a counter, not a gauge"),
    ("1st", "gauge", {}, (), "is not a valid metric name"),
    ("load", "gauge", {"le": "1"}, (), "'le' is not a valid label name"),
    ("load", "gauge", {"__name__": "rows"}, (), "'__name__' is not a valid label name"),
    ("load", "gauge", {"l": "\udc80"}, (), "surrogates not allowed"),
    ("load", "gauge", {"l": 1}, (), "expected text, got 1"),
    (5, "gauge", {}, (), r"'5' \(gauge\) is not a valid metric name"),
    ("times", "histogram", {}, (1.0, math.inf), "inf is not a bucket bound"),
    ("times", "histogram", {}, (False, True), "False is not a bucket bound"),
    ("times", "histogram", {}, ("x", 1.0), "'x' is not a bucket bound"),
    ("sizes_count", "counter", {}, (), "the histogram 'sizes' also has samples named 'sizes_count'"),
    ("ro", "histogram", {}, (1.0,), "the counter 'ro_sum' also has samples named 'ro_sum'"),
    ("times", "histogram", {}, (), "expected ascending bucket bounds"),
    ("times", "histogram", {}, (2.0, 1.0), "expected ascending bucket bounds"),
    ("sizes", "histogram", {}, (1.0, 3.0), r"already has the buckets \[1.0, 2.0\]"),
])
def test_a_metric_that_is_none_or_contradicts_another_is_refused(
        name: str, kind: str, labels: dict[str, str], bounds: tuple[float, ...], why: str) -> None:
    metrics, owner = CustomMetrics(), MetricsOwner()
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
            CustomMetrics().make(MetricsOwner(), "rows", "counter", cast(str, text), {})


def test_a_model_has_so_many_metrics_and_no_more() -> None:
    metrics, owner = CustomMetrics(), MetricsOwner()
    for number in range(MAX_METRICS):
        metrics.make(owner, "rows", "counter", "", {"of": str(number)})
    with pytest.raises(ValueError, match=f"its model already has {MAX_METRICS} metrics"):
        metrics.make(owner, "rows", "counter", "", {"of": "one more"})
    metrics.make(owner, "rows", "counter", "", {"of": "0"})
    metrics.make(MetricsOwner(), "rows", "counter", "", {"of": "another's"})
