"""Tests of the text and files that a load test writes."""
from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest

from infer_server.clients.load.cli import CLEAR, FAILED, FINE, Progress, verdict
from infer_server.clients.load.generator import LoadLevel
from infer_server.clients.load.measure import Latency, Summary
from infer_server.clients.load.report import Report, as_json, table
from infer_server.clients.load.schedule import Closed, Open
from infer_server.clients.load.statistics import ServerSplit

ANSWERED = LoadLevel(
    Closed(16), Summary(3.0, 6000, 2000.0, Latency(7.9, 7.8, 9.0, 9.5, 12.25, 30.0), {}, 0.02, 0.01),
    ServerSplit(3.5, 0.02, 4.0, 0.01, executions=1000, mean_batch=6.0, batch_sizes={4: 500, 8: 500}), "stable", {},
    client_busy=0.25)
FAILING = LoadLevel(
    Open(500.0), Summary(10.0, 0, 0.0, Latency(*[math.nan] * 6), {"UNAVAILABLE": 5000}, 8.0, 4.0), None, "duration",
    {"UNAVAILABLE": "the queue is full"}, 0.0)


def report(*levels: LoadLevel) -> Report:
    return Report("resnet", "", "localhost:8001", 1, 10.0, 1.0, 0, None, levels)


def test_the_table_has_a_line_a_load_and_says_what_went_wrong() -> None:
    assert table(report(ANSWERED, FAILING)) == """\
resnet at localhost:8001, batch 1; latency and its parts in the server in ms
load            infer/s  mean   p50   p90   p95    p99  queue  input  infer  output  batch  errors      measured
concurrency 16   2000.0  7.90  7.80  9.00  9.50  12.25   3.50   0.02   4.00    0.01    6.0       0  stable 3.0 s
rate 500/s          0.0     -     -     -     -      -      -      -      -       -      -    5000    all 10.0 s
concurrency 16: executed batches: 500 of 4, 500 of 8
rate 500/s: 5000 requests ended with UNAVAILABLE: the queue is full
rate 500/s: the client fell behind: 1 % of the requests were sent 8.0 ms late or more, which their latency counts"""


def test_a_load_generator_that_was_the_limit_says_so() -> None:
    text = "the load generator was the limit: its thread was busy for 95% of the time"
    assert text in table(report(replace(ANSWERED, client_busy=0.95)))
    assert "was the limit" not in table(report(replace(ANSWERED, client_busy=0.89)))
    assert as_json(report(ANSWERED))["levels"][0]["client_cpu_us"] == 0.25 * 3.0 * 1e6 / 6000
    idle = replace(FAILING, client=replace(FAILING.client, errors={}))
    assert as_json(report(idle))["levels"][0]["client_cpu_us"] is None


def test_the_parts_of_the_mean_latency_add_up_to_it() -> None:
    parts = ANSWERED.parts_ms
    assert parts["client"] == pytest.approx(0.01 + 0.125) and parts["compute"] == pytest.approx(4.03)
    assert sum(parts.values()) == pytest.approx(ANSWERED.client.latency.mean)
    assert FAILING.parts_ms == {}


def test_the_most_that_holds_the_goal_is_named() -> None:
    slower = replace(ANSWERED, load=Closed(64), client=replace(
        ANSWERED.client, throughput=9000.0, latency=replace(ANSWERED.client.latency, p99=20.0)))
    both = report(ANSWERED, slower)
    for goal, text in ((25.0, "9000.0 infer/s at concurrency 64"), (15.0, "2000.0 infer/s at concurrency 16")):
        assert table(replace(both, goal_ms=goal)).endswith(f"most with a p99 of at most {goal:g} ms: {text}")
    assert table(replace(both, goal_ms=1.0)).endswith("no load has a p99 of at most 1 ms")
    assert "p99 of at most" not in table(both)


def test_two_servers_stand_beside_each_other() -> None:
    quicker = replace(ANSWERED, client=replace(ANSWERED.client, throughput=3000.0))
    two = replace(report(ANSWERED), against=replace(report(quicker), url="http://other:8000"))
    assert table(two).endswith("""
A: localhost:8001, B: http://other:8000; latency in ms
load            infer/s A  infer/s B  B / A  p50 A  p50 B  p99 A  p99 B
concurrency 16     2000.0     3000.0   1.50   7.80   7.80  12.25  12.25""")
    assert as_json(two)["against"]["levels"][0]["throughput"] == 3000.0
    assert verdict(replace(report(ANSWERED), against=report(FAILING)), allow_errors=True) == FAILED


def test_json_has_null_for_what_was_not_measured_and_text_keys() -> None:
    document = json.loads(json.dumps(as_json(report(ANSWERED, FAILING)), allow_nan=False))
    answered, failing = document["levels"]
    assert answered["server"]["batch_sizes"] == {"4": 500, "8": 500}
    assert (answered["mode"], answered["concurrency"], answered["stopped_by"]) == ("closed", 16, "stable")
    assert (failing["mode"], failing["rate"], failing["server"]) == ("open", 500.0, None)
    assert failing["latency_ms"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    assert failing["errors"] == {"UNAVAILABLE": 5000}


@pytest.mark.parametrize(("levels", "allow_errors", "status"), [
    ((ANSWERED,), False, FINE), ((ANSWERED, FAILING), False, FAILED), ((ANSWERED, FAILING), True, FAILED),
    ((ANSWERED,), True, FINE),
])
def test_a_load_without_success_fails_even_when_errors_are_allowed(
        levels: tuple[LoadLevel, ...], allow_errors: bool, status: int) -> None:
    assert verdict(report(*levels), allow_errors) == status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_of_a_terminal_and_is_silent_elsewhere() -> None:
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(stream)
        progress.window(ANSWERED.load, 3.0, ANSWERED.client)
        progress.clear()
        line = "concurrency 16: 3.0 s, 2000.0 infer/s, p50 7.80 ms, p99 12.25 ms, 0 errors"
        assert stream.getvalue() == (f"{CLEAR}{line}{CLEAR}" if stream.isatty() else "")
