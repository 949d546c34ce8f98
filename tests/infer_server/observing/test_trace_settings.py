"""Trace settings behave as Triton's own test of them expects (qa/L0_trace)."""
from __future__ import annotations

import pytest

from infer_server.errors import InvalidRequestError, NotServedError
from infer_server.observing.trace_settings import Sampler, SettingsByModel, TraceSettings

START = TraceSettings("trace.json", ("TIMESTAMPS",), 1)


@pytest.fixture
def retired() -> list[Sampler]:
    return []


@pytest.fixture
def settings(retired: list[Sampler]) -> SettingsByModel:
    return SettingsByModel(START, retired.append)


def now(settings: SettingsByModel, model: str = "") -> TraceSettings:
    return settings.of(model).now()


def test_what_is_not_said_of_a_model_is_as_for_all(settings: SettingsByModel) -> None:
    settings.update("", {"trace_level": ["TENSORS", "TIMESTAMPS"]})
    assert now(settings, "simple") == TraceSettings("trace.json", ("TIMESTAMPS", "TENSORS"), 1)
    settings.update("simple", {"trace_rate": ["12"], "log_frequency": ["34"]})
    settings.update("", {"trace_rate": ["56"], "trace_count": ["78"], "trace_level": ["OFF"]})
    assert now(settings) == TraceSettings("trace.json", (), 56, 78)
    assert now(settings, "simple") == TraceSettings("trace.json", (), 12, 78, 34)
    assert now(settings, "another") == now(settings)


def test_what_is_said_no_longer_is_as_it_was(settings: SettingsByModel) -> None:
    settings.update("simple", {"trace_rate": ["12"], "log_frequency": ["34"]})
    settings.update("", {"trace_rate": ["56"], "trace_count": ["78"], "trace_level": ["OFF"]})
    settings.update("", {"trace_rate": [], "trace_count": []})
    assert now(settings) == TraceSettings("trace.json", (), 1)
    assert now(settings, "simple") == TraceSettings("trace.json", (), 12, -1, 34)
    settings.update("simple", {"trace_rate": [], "trace_level": []})
    assert now(settings, "simple") == TraceSettings("trace.json", (), 1, -1, 34)
    settings.update("simple", {"log_frequency": []})
    assert settings.of("simple") is settings.of("")


def test_one_request_in_so_many_is_traced_and_so_many_of_them() -> None:
    sampler = Sampler(TraceSettings("trace.json", ("TIMESTAMPS",), 3, 2))
    assert [sampler.sample() for _ in range(12)] == [False, False, True, False, False, True, *[False] * 6]
    assert sampler.now().count == 0 and sampler.open == 2
    assert not any(Sampler(TraceSettings("trace.json", (), 1)).sample() for _ in range(9))


def test_a_count_goes_on_when_something_else_is_said(settings: SettingsByModel, retired: list[Sampler]) -> None:
    settings.update("", {"trace_count": ["5"]})
    former = settings.of("")
    assert former.sample() and former.sample()
    settings.update("", {"log_frequency": ["2"]})
    assert now(settings).count == 3 and retired[-1] is former and former.is_retired
    settings.update("simple", {"trace_rate": ["2"]})
    assert now(settings).count == 3 and now(settings, "simple").count == 3


@pytest.mark.parametrize(("said", "reason"), [
    ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF'"),
    ({"trace_level": ["MUCH"]}, "unknown trace level 'MUCH'"),
    ({"trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x"),
    ({"trace_rate": ["0"]}, "Attempting to set invalid trace setting :sample rate must be non-zero"),
    ({"trace_count": ["-2"]}, "out of range"), ({"log_frequency": [str(1 << 32)]}, "out of range"),
    ({"trace_mode": ["triton"]}, "unknown trace setting 'trace_mode'")])
def test_what_makes_no_sense_changes_nothing(settings: SettingsByModel, said: dict[str, list[str]],
                                             reason: str) -> None:
    for model in ("", "simple"):
        with pytest.raises(InvalidRequestError, match=reason):
            settings.update(model, {"trace_count": ["7"], **said})
        assert now(settings, model) == START


def test_where_traces_go_is_the_command_line_s(settings: SettingsByModel) -> None:
    with pytest.raises(NotServedError, match="can not be updated through network protocol"):
        settings.update("", {"trace_file": ["/etc/passwd"]})
    without = SettingsByModel(TraceSettings(), lambda _: None)
    with pytest.raises(InvalidRequestError, match="trace file name is not given"):
        without.update("", {"trace_level": ["TIMESTAMPS"]})
    without.update("", {"trace_level": ["OFF"], "trace_rate": ["5"]})
