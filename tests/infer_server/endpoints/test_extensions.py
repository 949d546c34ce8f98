"""Tests of Triton's inference extensions, through its own clients, over gRPC and HTTP."""
from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from infer_server.endpoints.settings import LogSettings
from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import RunningServer, serving

X = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], np.float32)
NAMED = """output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "names.txt" },
                    { name: "sum" data_type: TYPE_FP32 dims: [ 4 ] } ]"""
KEY = f"/surface_{os.getpid()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "whole", shape=[3], max_batch=0, dtype="int32")
    write_model(repository, "half", dtype="float16")
    write_model(repository, "wide", config='input { name: "x" data_type: TYPE_FP32 dims: [-1, -1] }', shape=[2, 2])
    folder = write_model(repository, "named", config=NAMED, kind="two")
    (folder / "names.txt").write_text("cat\ndog\nold owl\n")
    write_model(repository, "text", kind="echo", dtype="object", shape=[2])
    with serving(repository, allow_client_shm=True) as running:
        yield running


@pytest.fixture
def region(client: Any) -> Iterator[Any]:
    """Register 96 bytes of shared memory as "r", from byte 16 of the region on."""
    handle = shm.create_shared_memory_region("r", KEY, 112)
    client.register_system_shared_memory("r", KEY, 96, offset=16)
    yield handle
    client.unregister_system_shared_memory()
    shm.destroy_shared_memory_region(handle)


def placed(protocol: Any, shape: list[int], byte_size: int, offset: int = 0, datatype: str = "FP32") -> Any:
    tensor = protocol.InferInput("x", shape, datatype)
    tensor.set_shared_memory("r", byte_size, offset)
    return tensor


def sent(protocol: Any, array: np.ndarray[Any, Any], datatype: str = "FP32", **how: Any) -> Any:
    tensor = protocol.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **how)
    return tensor


def test_tensors_come_from_shared_memory_and_go_there(protocol: Any, client: Any, region: Any) -> None:
    shm.set_shared_memory_region(region, [X], offset=16)
    output = protocol.InferRequestedOutput("y")
    output.set_shared_memory("r", 40, offset=48)
    client.infer("affine", [placed(protocol, [2, 4], 32)], outputs=[output])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [2, 4], offset=64), X * 2 + 1)
    second = client.infer("affine", [placed(protocol, [1, 4], 16, 16)]).as_numpy("y")
    np.testing.assert_array_equal(second, X[1:] * 2 + 1)
    status = client.get_system_shared_memory_status("r")
    (one,) = (status if isinstance(status, list) else
              [{"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
               for each in status.regions.values()])
    assert one == {"name": "r", "key": KEY, "offset": 16, "byte_size": 96}


def test_nothing_beyond_what_was_registered_is_reached(protocol: Any, client: Any, region: Any) -> None:
    for tensor, text in ((placed(protocol, [1, 4], 16, 88), "Invalid offset . byte size"),
                         (placed(protocol, [1, 4], 16, 96), "Invalid offset for"),
                         (placed(protocol, [2, 4], 16), "Expected 32, got 16")):
        with pytest.raises(InferenceServerException, match=text):
            client.infer("affine", [tensor])
    beyond, short = protocol.InferRequestedOutput("y"), protocol.InferRequestedOutput("y")
    beyond.set_shared_memory("r", 96, offset=8)
    short.set_shared_memory("r", 8)
    for output, text in ((beyond, "Invalid offset . byte size"), (short, "should be at least 32 bytes")):
        with pytest.raises(InferenceServerException, match=text):
            client.infer("affine", [sent(protocol, X)], outputs=[output])


def test_an_empty_tensor_that_no_array_is_like_is_refused_in_shared_memory_too(protocol: Any, client: Any, region: Any
                                                                               ) -> None:
    with pytest.raises(InferenceServerException, match=r"input 'x' \(FP32 \[1, 0, 4611686018427387904\]\)"):
        client.infer("wide", [placed(protocol, [1, 0, 1 << 62], 0)])


def test_only_objects_of_clients_are_registered(client: Any, region: Any, tmp_path: Path) -> None:
    link = Path("/dev/shm") / (KEY[1:] + "_link")
    link.symlink_to("/etc/passwd")
    try:
        for name, key, size, output in (
                ("r", KEY, 8, "already in manager"), ("s", KEY + "_none", 8, "Unable to open"),
                ("s", "/../../etc/passwd", 8, "invalid shm key"), ("s", "/", 8, "invalid shm key"),
                ("s", KEY + "_link", 8, "Unable to open"), ("s", "infer_server_1", 8, "reserved prefix 'infer_"),
                ("s", KEY, 113, "113 bytes at 0 .* has 112"), ("s", KEY, 0, "invalid args: 0 bytes")):
            with pytest.raises(InferenceServerException, match=output):
                client.register_system_shared_memory(name, key, size)
    finally:
        link.unlink()


def test_a_file_that_is_cut_short_fails_its_request_and_not_the_server(protocol: Any, client: Any) -> None:
    handle = shm.create_shared_memory_region("r", KEY + "_cut", 8192)
    client.register_system_shared_memory("r", KEY + "_cut", 8192)
    try:
        os.truncate(f"/dev/shm{KEY}_cut", 4)
        output = protocol.InferRequestedOutput("y")
        output.set_shared_memory("r", 32, offset=4096)
        for inputs, outputs in (([placed(protocol, [1, 4], 16)], []), ([sent(protocol, X)], [output])):
            with pytest.raises(InferenceServerException, match="shorter than it was"):
                client.infer("affine", inputs, outputs=outputs or None)
        assert os.stat(f"/dev/shm{KEY}_cut").st_size == 4
    finally:
        os.truncate(f"/dev/shm{KEY}_cut", 8192)
        shm.destroy_shared_memory_region(handle)
        client.unregister_system_shared_memory("r")
    assert client.is_server_live()
    with pytest.raises(InferenceServerException, match="Unable to find"):
        client.infer("affine", [placed(protocol, [1, 4], 16)])


def test_shared_memory_must_be_switched_on(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")
    with serving(tmp_path) as running, tritonclient.grpc.InferenceServerClient(running.address) as client:
        assert not client.get_system_shared_memory_status().regions
        for call in (lambda: client.register_system_shared_memory("r", KEY, 8),
                     lambda: client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 8),
                     lambda: client.infer("affine", [placed(tritonclient.grpc, [1, 4], 16)])):
            with pytest.raises(InferenceServerException, match="--allow-client-shm") as caught:
                call()
            assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_the_memory_of_gpus_tracing_and_the_log_answer_as_without_them(
        protocol: Any, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)       # which is set back at the end
    assert client.get_cuda_shared_memory_status() is not None
    with pytest.raises(InferenceServerException, match="GPUs not supported"):
        client.register_cuda_shared_memory("g", b"aGFuZGxl", 0, 64)
    client.unregister_cuda_shared_memory()
    as_json = {"as_json": True} if protocol is tritonclient.grpc else {}
    assert "OFF" in str(client.get_trace_settings("affine", **as_json))
    client.update_trace_settings(settings={"trace_level": "OFF"})
    with pytest.raises(InferenceServerException, match="invalid trace setting :trace file name is not given"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    assert "log_warning" in str(client.update_log_settings({"log_info": True, "log_verbose_level": 0}, **as_json))
    for wrong, output in (({"log_file": "/tmp/x"}, "can not be updated"), ({"log_format": "xml"}, "invalid argument")):
        with pytest.raises(InferenceServerException, match=output):
            client.update_log_settings(wrong)


@pytest.mark.parametrize(("name", "level", "least"), [
    ("infer_server.server", logging.INFO, 0), ("__main__", logging.INFO, 0),
    ("infer_server.engines.plan", logging.INFO, 0), ("infer_server.engines.plan", logging.DEBUG, 1),
    ("azure.core.pipeline", logging.INFO, 1), ("azure.core.pipeline", logging.WARNING, 0)])
def test_what_libraries_tell_beside_their_warnings_is_written_where_the_log_is_verbose(
        name: str, level: int, least: int) -> None:
    record = logging.LogRecord(name, level, __file__, 1, "", (), None)
    assert [LogSettings(log_verbose_level=verbose).writes(record) for verbose in (0, 1)] == [least == 0, True]


def test_an_output_comes_as_its_best_classes(protocol: Any, client: Any, server: RunningServer) -> None:
    def classes(model: str, array: np.ndarray[Any, Any], datatype: str, count: int, **how: Any) -> Any:
        return client.infer(model, [sent(protocol, array, datatype)], outputs=[
            protocol.InferRequestedOutput("y", class_count=count, **how)]).as_numpy("y")
    assert classes("affine", X, "FP32", 2).tolist() == [[b"9.000000:3", b"7.000000:2"], [b"9.000000:0", b"7.000000:1"]]
    assert classes("affine", X, "FP32", 9).shape == (2, 4)
    assert classes("whole", np.array([-1, 5, 0], np.int32), "INT32", 2).tolist() == [b"11:1", b"1:2"]
    if protocol is tritonclient.http:
        assert classes("affine", X, "FP32", 1, binary_data=False).tolist() == [["9.000000:3"], ["9.000000:0"]]
    x2 = protocol.InferInput("x2", [2, 4], "FP32")
    x2.set_data_from_numpy(X)
    named = client.infer("named", [sent(protocol, X), x2], outputs=[
        protocol.InferRequestedOutput(name, class_count=2) for name in ("y", "sum")])
    assert named.as_numpy("y").tolist() == [
        [b"9.000000:3", b"7.000000:2:old owl"], [b"9.000000:0:cat", b"7.000000:1:dog"]]
    assert named.as_numpy("sum").tolist()[1] == [b"8.000000:0", b"6.000000:1"]
    with pytest.raises(InferenceServerException, match="unsupported type 'FP16'"):
        classes("half", X.astype(np.float16), "FP16", 2)


@pytest.mark.parametrize("binary", [True, False], ids=["in bytes", "as JSON"])
def test_strings_pass_unchanged(protocol: Any, client: Any, binary: bool) -> None:
    words = np.array([["", "caf\u00e9"], ["a\0b", "x" * 300]], np.object_)
    how = {"binary_data": binary} if protocol is tritonclient.http else {}
    result = client.infer("text", [sent(protocol, words, "BYTES", **how)],
                          outputs=[protocol.InferRequestedOutput("y", **how)])
    actual = [[value if isinstance(value, str) else value.decode() for value in row] for row in result.as_numpy("y")]
    assert actual == words.tolist()


def test_bytes_that_are_no_text_are_not_answered_as_json(server: RunningServer) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as client:
        tensor = sent(tritonclient.http, np.array([["a\xff".encode("latin-1")] * 2], np.object_), "BYTES")
        requested = [tritonclient.http.InferRequestedOutput("y", binary_data=binary) for binary in (True, False)]
        assert client.infer("text", [tensor], outputs=requested[:1]).as_numpy("y").tolist() == [[b"a\xff"] * 2]
        with pytest.raises(InferenceServerException, match="not UTF-8 have no JSON form; request binary data"):
            client.infer("text", [tensor], outputs=requested[1:])
