"""Tests of the tracing options, which are those of Triton's command line."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from infer_server.cli.serve import _parser
from infer_server.cli.tracing import parsed, tracing_of
from infer_server.errors import InvalidRequestError
from infer_server.observing import spans
from infer_server.observing.spans import SpanSettings
from infer_server.observing.trace_settings import TraceSettings


def test_traces_go_into_files_by_triton_s_documented_command_line(tmp_path: Path) -> None:
    file = f"{tmp_path}/trace.json"
    assert parsed([f"triton,file={file}", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS", "count=100"]) == (
        TraceSettings(file, ("TIMESTAMPS",), 100, 100, 50))
    assert parsed([f"triton,file={file}", "level=TENSORS", "level=TIMESTAMPS", "mode=triton"]) == (
        TraceSettings(file, ("TIMESTAMPS", "TENSORS")))


def test_older_options_say_the_same(tmp_path: Path) -> None:
    given = _parser().parse_args([f"--trace-file={tmp_path}/t", "--trace-level", "MAX", "--trace-level=tensors",
                                  "--trace-rate=5", "--trace-count=7", "--trace-log-frequency=3"])
    assert tracing_of(given) == TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS", "TENSORS"), 5, 7, 3)


def test_with_a_file_and_no_level_nothing_is_traced_until_a_client_says_so(tmp_path: Path) -> None:
    assert parsed([]) is None and parsed(["rate=5"]) is None and parsed(["level=OFF"]) is None
    assert parsed([f"triton,file={tmp_path}/t"]) == TraceSettings(f"{tmp_path}/t")
    assert parsed([f"triton,file={tmp_path}/t", "level=OFF", "level=TENSORS"]) == TraceSettings(f"{tmp_path}/t")


def test_spans_go_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "is_installed", lambda: True)
    assert parsed(["mode=opentelemetry", "level=TIMESTAMPS", "rate=5", "opentelemetry,url=collector:4318/v1/traces",
                   "opentelemetry,resource=service.name=mine", "triton,file=/unused"]) == (
        SpanSettings("http://collector:4318/v1/traces", 5, resource={"service.name": "mine"}))
    assert parsed(["opentelemetry,url=http://c/", "rate=0", "count=100"]) == SpanSettings("http://c/", 0, 100)
    assert parsed(["mode=opentelemetry", "level=OFF"]) is None


@pytest.mark.parametrize(("texts", "said"), [
    (["mode=jaeger"], "expected mode=triton or opentelemetry"), (["triton,files=/t"], "expected mode"),
    (["level=HIGH"], "expected OFF, TIMESTAMPS or TENSORS"),
    (["level=TIMESTAMPS"], "trace file name is not given; start the server with"),
    (["triton,file=/t", "rate=0", "level=TENSORS"], "must be non-zero"),
    (["rate=x"], "Unable to parse 'rate', got: x"), (["count=-2"], "out of range"),
    (["triton,file=/no/such/folder/t"], "in a folder that can be written to"), (["triton,file=/"], "expected a file"),
    (["mode=opentelemetry", "level=TENSORS"], "spans have no tensors"),
    (["opentelemetry,bsp_max_queue_size=1"], "OTEL_BSP_SCHEDULE_DELAY")])
def test_what_makes_no_sense_is_said(texts: list[str], said: str) -> None:
    with pytest.raises((ValueError, InvalidRequestError), match=said):
        parsed(texts)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_said_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="can be written to"):
        parsed([f"triton,file={tmp_path}/t"])
