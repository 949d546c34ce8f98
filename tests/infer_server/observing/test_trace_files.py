"""Tests of trace files, through Triton's clients."""
from __future__ import annotations

import json
import logging
import resource
import threading
import urllib.request
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from infer_server.observing import trace_files, traces
from infer_server.observing.access_log import OK, AccessEntry
from infer_server.observing.trace_files import TraceFiles
from infer_server.observing.trace_settings import TraceSettings
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.repository.test_ensembles import write_chain
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

BOTH = ("TIMESTAMPS", "TENSORS")
OF_A_REQUEST = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
                "COMPUTE_END", "REQUEST_END"]
ABOUT = {"HTTP": (["HTTP_RECV_START", "HTTP_RECV_END"], ["HTTP_SEND_START", "HTTP_SEND_END"]),
         "gRPC": (["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"], ["GRPC_SEND_START", "GRPC_SEND_END"])}


def ask(server: RunningServer, model: str, library: Any = tritonclient.grpc, value: float = 1) -> None:
    port = server.ports.grpc if library is tritonclient.grpc else server.ports.http
    tensor = library.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.infer(model, [tensor], request_id="7")


def objects_of(file: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the trace objects of a file, by trace id."""
    actual: dict[int, list[dict[str, Any]]] = {}
    for each in json.loads(file.read_text()):
        actual.setdefault(each["id"], []).append(each)
    return actual


def times_of(objects: list[dict[str, Any]]) -> dict[str, int]:
    return {time["name"]: time["ns"] for each in objects for time in each.get("timestamps", ())}


def about(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in objects if "model_name" in each)


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_a_request_has_its_times_and_tensors_in_the_file(front: str, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "affine")
    file = tmp_path / "trace.json"
    with serving(tmp_path / "models", tracing=TraceSettings(str(file), BOTH, 1), grpc_front=front) as server:
        ask(server, "affine")
        ask(server, "affine", tritonclient.http, 2)
    traces = objects_of(file)
    assert len(traces) == 2
    for (number, objects), protocol, value in zip(traces.items(), ("gRPC", "HTTP"), (1, 2), strict=True):
        assert about(objects) == {"id": number, "model_name": "affine", "model_version": 1, "request_id": "7"}
        times, (before, behind) = times_of(objects), ABOUT[protocol]
        assert list(times) == [*before, *OF_A_REQUEST, "INFER_RESPONSE_COMPLETE", *behind]
        assert list(times.values()) == sorted(times.values())
        assert [each["tensor"] | {"is": each["activity"]} for each in objects if "tensor" in each] == [
            {"is": "TENSOR_QUEUE_INPUT", "name": "x", "data": f"{value}.0," * 3 + f"{value}.0", "shape": "1,4",
             "dtype": "FP32"},
            {"is": "TENSOR_BACKEND_OUTPUT", "name": "y", "data": f"{2 * value + 1}.0," * 3 + f"{2 * value + 1}.0",
             "shape": "1,4", "dtype": "FP32"}]


def test_steps_of_an_ensemble_are_traces_below_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "affine")
    name = write_chain(tmp_path / "models", "affine", "affine", max_batch=8, dims="4")
    with serving(tmp_path / "models", tracing=TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS",), 1)) as server:
        ask(server, name)
    whole, *steps = objects_of(tmp_path / "t").items()
    number, objects = whole
    assert about(objects)["model_name"] == name and "QUEUE_START" not in times_of(objects)
    assert [about(step)["model_name"] for _, step in steps] == ["affine", "affine"]
    for _, step in steps:
        assert about(step)["parent_id"] == number and list(times_of(step)) == OF_A_REQUEST
    first, second = (times_of(step) for _, step in steps)
    ends = times_of(objects)
    assert ends["REQUEST_START"] <= first["REQUEST_START"] <= first["REQUEST_END"] <= second["REQUEST_START"]
    assert second["REQUEST_END"] <= ends["REQUEST_END"]


ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        asked = pb_utils.InferenceRequest(
            model_name="affine", requested_output_names=["y"], inputs=requests[0].inputs(), %s)
        return [pb_utils.InferenceResponse(asked.exec().output_tensors())]
"""


@pytest.mark.parametrize(("argument", "steps"), [("trace=requests[0].trace()", ["affine"]), ("trace=None", [])])
def test_what_a_python_model_asks_for_is_traced_where_it_gives_its_request_s_trace(
        argument: str, steps: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "models", "affine")
    python_model(tmp_path / "models", "asks", HEAD + ASKS % argument, """
        input { name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }""")
    with serving(tmp_path / "models", tracing=TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS",), 1)) as server:
        ask(server, "asks")
    traces = objects_of(tmp_path / "t")
    assert [about(each)["model_name"] for each in traces.values()] == ["asks", *steps]
    assert [about(each).get("parent_id") for each in traces.values()] == [None, *[1] * len(steps)]


SENDS = """
class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", requests[0].inputs()[0].as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
X_AND_Y = """
    input { name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }"""


@pytest.mark.parametrize("decoupled", ["true", "false"])
def test_what_a_python_model_answers_by_its_sender_has_the_times_of_its_execution(
        decoupled: str, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "sends", HEAD + SENDS, X_AND_Y + f"""
        model_transaction_policy {{ decoupled: {decoupled} }}""")
    with serving(tmp_path / "models", tracing=TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS",), 1)) as server:
        url = f"http://127.0.0.1:{server.ports.http}/v2/models/sends/generate_stream"
        with urllib.request.urlopen(url, b'{"x": [1, 2, 3, 4]}', TIMEOUT_SECS) as answer:
            assert b'"y":' in answer.read()
    (objects,) = objects_of(tmp_path / "t").values()
    times, (before, behind) = times_of(objects), ABOUT["HTTP"]
    assert list(times) == [*before, *OF_A_REQUEST, "INFER_RESPONSE_COMPLETE", *behind]
    assert list(times.values()) == sorted(times.values())


def test_what_fails_is_traced_too(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "fragile", kind="fails_on_negative")
    with serving(tmp_path / "models", tracing=TraceSettings(f"{tmp_path}/t", BOTH, 1)) as server:
        for model in ("fragile", "nobody"):
            with pytest.raises(InferenceServerException):
                ask(server, model, value=-1)
    fragile, nobody = objects_of(tmp_path / "t").values()
    assert about(fragile)["model_name"] == "fragile" and "REQUEST_END" in times_of(fragile)
    assert about(nobody) == {"id": 2, "model_name": "nobody", "model_version": -1, "request_id": "7"}


@pytest.mark.parametrize("library", [tritonclient.grpc, tritonclient.http], ids=["gRPC", "HTTP"])
def test_clients_switch_traces_on_for_one_model_and_off(library: Any, tmp_path: Path) -> None:
    for name in ("affine", "other"):
        write_model(tmp_path / "models", name)
    with serving(tmp_path / "models", tracing=TraceSettings(f"{tmp_path}/t")) as server:
        port = server.ports.grpc if library is tritonclient.grpc else server.ports.http
        as_json = {"as_json": True} if library is tritonclient.grpc else {}
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            ask(server, "affine", library)
            client.update_trace_settings("affine", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
            ask(server, "affine", library)
            ask(server, "other", library)
            client.update_trace_settings("affine", {"trace_level": None, "trace_rate": None})
            ask(server, "affine", library)
            settings = client.get_trace_settings("affine", **as_json)
            assert "OFF" in str(settings) and "1000" in str(settings) and f"{tmp_path}/t" in str(settings)
            with pytest.raises(InferenceServerException, match="can not be updated through network protocol"):
                client.update_trace_settings(settings={"trace_file": "elsewhere"})
            with pytest.raises(InferenceServerException, match="nobody"):
                client.update_trace_settings("nobody", {"trace_rate": "1"})
    (only,) = objects_of(tmp_path / "t").values()
    assert about(only)["model_name"] == "affine"


def test_so_many_traces_are_in_each_of_the_numbered_files_and_the_rest_in_the_last(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "affine")
    settings = TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS",), 1, -1, log_frequency=2)
    with serving(tmp_path / "models", tracing=settings) as server:
        for _ in range(4):
            ask(server, "affine")
        assert eventually((tmp_path / "t.1").exists)
        ask(server, "affine")
    assert [len(objects_of(tmp_path / f"t.{n}")) for n in range(3)] == [2, 2, 1]
    assert not (tmp_path / "t").exists()


def test_a_counted_number_of_traces_is_written_when_all_are_there(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "affine")
    with serving(tmp_path / "models", tracing=TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS",), 1, 2)) as server:
        for _ in range(4):
            ask(server, "affine")
        assert eventually((tmp_path / "t.0").exists)
    assert len(objects_of(tmp_path / "t.0")) == 2 and not (tmp_path / "t").exists()


@pytest.mark.parametrize("settings", [{"count": 3}, {"log_frequency": 3}])
@pytest.mark.parametrize("are_answered", [True, False])
def test_settings_that_change_while_requests_are_open_leave_their_traces_in_one_file(
        settings: dict[str, int], are_answered: bool, tmp_path: Path) -> None:
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TIMESTAMPS",), 1, **settings))
    begun = [files.begin("m", lambda _: "") for _ in range(3)]
    files.update("", {"trace_level": ["OFF"]})
    for each in begun if are_answered else begun[:2]:
        assert each
        each.end(AccessEntry("", "HTTP", "", "m", "", 0, 1), OK)
    files.close()
    assert [(file.name, len(objects_of(file))) for file in tmp_path.iterdir()] == [("t.0", 3 if are_answered else 2)]


@pytest.fixture
def traced() -> Callable[[TraceFiles], None]:
    def trace(files: TraceFiles) -> None:
        begun = files.begin("m", lambda _: "")
        assert begun
        begun.set_model("m", 1, {"b": np.array([True, False]), "s": np.array([b'a"b', b"\xff"], np.object_),
                            "h": np.array([[1.5]], np.float16)})
        begun.end(AccessEntry("", "HTTP", "", "m", "", 0, 1), OK)
    return trace


def test_tensors_are_written_as_triton_s_summary_reads_them(tmp_path: Path, traced: Any) -> None:
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1))
    traced(files)
    files.close()
    (objects,) = objects_of(tmp_path / "t").values()
    assert [each["tensor"] for each in objects if "tensor" in each] == [
        {"name": "b", "data": "1,0", "shape": "2", "dtype": "BOOL"},
        {"name": "s", "data": '"a""b","\\xff"', "shape": "2", "dtype": "BYTES"},
        {"name": "h", "data": "1.5", "shape": "1,1", "dtype": "FP16"}]
    assert not times_of(objects)


def test_a_disk_that_takes_nothing_costs_traces_and_is_said_once(
        tmp_path: Path, traced: Any, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles(TraceSettings(f"{tmp_path}/gone/t", ("TENSORS",), 1))
    for _ in range(3):
        traced(files)
    files.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "traces are lost" in caplog.text


@pytest.mark.parametrize("log_frequency", [0, 1])
def test_a_full_disk_costs_the_traces_that_it_does_not_take_and_no_others(log_frequency: int, tmp_path: Path) -> None:
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1, log_frequency=log_frequency))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def trace(name: str, items: int) -> None:
        begun = files.begin("m", lambda _: "")
        assert begun
        begun.set_model("m", 1, {"x": np.ones(items, np.int8)})
        begun.end(AccessEntry("", "HTTP", name, "m", "", 0, 1), OK)
        assert eventually(lambda: not files._writer._waiting_bytes)

    trace("before", 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        trace("large", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trace("behind", 1)
    files.close()
    traces = [about(each) for file in sorted(tmp_path.iterdir()) for each in objects_of(file).values()]
    assert [each["request_id"] for each in traces] == ["before", "behind"]


def test_traces_that_come_faster_than_they_are_written_are_left_out_with_a_warning(
        tmp_path: Path, traced: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trace_files, "_MAX_BYTES", -1)
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1))
    for _ in range(3):
        traced(files)
    files.close()
    assert "raise the rate" in caplog.text and "3 traces" in caplog.text and len(caplog.records) == 2


@pytest.mark.parametrize("tensor", [np.ones(1 << 10, np.uint8), np.array([b"1" * (1 << 10)], np.object_)],
                         ids=["numbers", "texts"])
def test_traces_that_are_not_written_have_no_more_memory_than_they_may(
        tensor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "_MAX_BYTES", 9 << 10)
    going_on = threading.Event()
    write = trace_files._TraceWriter._write

    def write_late(writer: Any, batch: Any) -> None:
        assert going_on.wait(TIMEOUT_SECS)
        write(writer, batch)

    monkeypatch.setattr(trace_files._TraceWriter, "_write", write_late)
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1))
    for _ in range(3):
        begun = files.begin("m", lambda _: "")
        assert begun
        begun.set_model("m", 1, {"x": tensor})
        begun.end(AccessEntry("", "HTTP", "", "m", "", 0, 1), OK)
    going_on.set()
    files.close()
    assert len(objects_of(tmp_path / "t")) == 2


@pytest.mark.parametrize("settings", [{"count": 5}, {"log_frequency": 5}])
def test_traces_of_large_tensors_are_written_before_all_of_a_file_are_there(
        settings: dict[str, int], tmp_path: Path, traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1, **settings))
    monkeypatch.setattr(trace_files, "_FILE_BYTES", 40)         # each has 24
    for _ in range(5):
        traced(files)
    files.close()
    assert [len(objects_of(file)) for file in sorted(tmp_path.iterdir())] == [2, 2, 1]
    assert not (tmp_path / "t").exists()


def test_a_stream_without_end_keeps_no_more_than_a_trace_may(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(traces, "_MAX_BYTES", 1 << 20)
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1))
    begun = files.begin("m", lambda _: "")
    assert begun
    encode = begun.wrap_encoder(lambda computed: computed)
    for _ in range(100):
        encode({"y": np.ones(100 << 10, np.uint8)})
        begun.step().wrap_encoder(lambda computed: computed)({"y": np.ones(100 << 10, np.uint8)})
    begun.end(AccessEntry("", "HTTP", "", "m", "", 0, 1), OK)
    files.close()
    kept = [each for objects in objects_of(tmp_path / "t").values() for each in objects if "tensor" in each]
    assert 10 <= len(kept) <= 12 and "left out" in caplog.text


def test_a_trace_that_is_written_is_let_go_of(tmp_path: Path) -> None:
    files = TraceFiles(TraceSettings(f"{tmp_path}/t", ("TENSORS",), 1))
    begun = files.begin("m", lambda _: "")
    assert begun
    begun.set_model("m", 1, {"x": np.ones(4, np.uint8)})
    tensor = weakref.ref(begun.tensors[0].array)
    begun.end(AccessEntry("", "HTTP", "", "m", "", 0, 1), OK)
    del begun
    assert eventually(lambda: tensor() is None)
    files.close()
