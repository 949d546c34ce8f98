"""Tests of the gRPC protocol's methods, through Triton's own client."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from infer_server.cli.serve import _options, _parser
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.http2_client import INFER, Http2Client
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving


@pytest.fixture(scope="module", params=FRONTS + WORKERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "two", kind="two", shape=[2, 3])
    write_model(repository, "fixed", shape=[2, 2], max_batch=0)
    write_model(repository, "half", dtype="float16")
    write_model(repository, "small", dtype="int8")
    write_model(repository, "fragile", kind="fails_on_negative")
    write_model(repository, "versions", 1, 'version_policy { all {} }', shape=[1])
    write_model(repository, "versions", 2, shape=[2])
    (write_model(repository, "corrupt") / "1" / "model.plan").write_bytes(b"\0not a plan")
    write_model(repository, "misspelt", config="max_batchsize: 4")
    with serving(repository, max_message_bytes=1 << 20, grpc_front=request.param) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


@pytest.fixture
def stub(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer_input(name: str, array: np.ndarray[Any, Any], datatype: str = "FP32") -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def request_of(model: str = "affine", name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (1, 4),
               raw: bytes | None = None) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def refusal(stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=TIMEOUT_SECS)
    return caught.value.code(), caught.value.details()


def test_the_server_is_live_and_tells_who_it_is(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and not client.is_server_ready(), "two of its models have failed"
    metadata = client.get_server_metadata()
    assert metadata.name == "infer-server" and "statistics" in metadata.extensions


def test_metadata_gives_the_batch_axis_as_any_extent(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("two")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("x", "FP32", [-1, 2, 3]), ("x2", "FP32", [-1, 2, 3])]
    assert [t.name for t in metadata.outputs] == ["y", "sum"]
    assert list(client.get_model_metadata("fixed").inputs[0].shape) == [2, 2]


def test_the_configuration_is_completed_from_the_model(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("affine").config
    assert (config.name, config.max_batch_size, list(config.input[0].dims)) == ("affine", 8, [4])
    assert config.HasField("dynamic_batching") and config.instance_group[0].count == 1
    assert client.get_model_config("fixed").config.max_batch_size == 0


def test_an_inference_returns_the_rows_that_the_model_computes(client: triton.InferenceServerClient) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    result = client.infer("affine", [infer_input("x", x)], request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("y"), 2 * x + 1)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("seven", "affine", "1")


def test_inputs_go_by_name_and_outputs_come_as_asked_for(client: triton.InferenceServerClient) -> None:
    x, x2 = np.ones((1, 2, 3), np.float32), np.full((1, 2, 3), 5, np.float32)
    result = client.infer("two", [infer_input("x2", x2), infer_input("x", x)],
                          outputs=[triton.InferRequestedOutput("sum")])
    np.testing.assert_array_equal(result.as_numpy("sum"), x + x2)
    assert [output.name for output in result.get_response().outputs] == ["sum"]


def test_a_model_without_a_batch_axis_takes_its_shape_as_it_is(client: triton.InferenceServerClient) -> None:
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    np.testing.assert_array_equal(client.infer("fixed", [infer_input("x", x)]).as_numpy("y"), 2 * x + 1)


@pytest.mark.parametrize(("model", "datatype", "dtype"), [("half", "FP16", np.float16), ("small", "INT8", np.int8)])
def test_other_datatypes_pass_unchanged(
        client: triton.InferenceServerClient, model: str, datatype: str, dtype: type) -> None:
    x: np.ndarray[Any, Any] = np.array([[1, -2, 3, 0]], dtype)
    np.testing.assert_array_equal(client.infer(model, [infer_input("x", x, datatype)]).as_numpy("y"), x * 2 + 1)


def test_typed_contents_are_read(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    request = request_of()
    request.inputs[0].contents.fp32_contents.extend([0, 1, 2, 3])
    response = stub.ModelInfer(request)
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], np.float32), [1, 3, 5, 7])


def test_versions_are_chosen_by_number_and_the_highest_is_the_default(client: triton.InferenceServerClient) -> None:
    assert list(client.get_model_metadata("versions").versions) == ["1", "2"]
    assert list(client.get_model_metadata("versions").inputs[0].shape) == [-1, 2]
    one = np.ones((1, 1), np.float32)
    assert client.infer("versions", [infer_input("x", one)], model_version="1").get_response().model_version == "1"


@pytest.mark.parametrize(("request_", "code", "text"), [
    (request_of("nobody"), grpc.StatusCode.NOT_FOUND, "unknown model: 'nobody'"),
    (request_of("corrupt"), grpc.StatusCode.NOT_FOUND, "is no plan"),
    (request_of("misspelt"), grpc.StatusCode.NOT_FOUND, "Did you mean 'max_batch_size'?"),
    (request_of(name="xx", raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT, "[-1, 4]. Did you mean 'x'?"),
    (request_of(shape=(1, 5), raw=bytes(20)), grpc.StatusCode.INVALID_ARGUMENT, "Expected [-1,4], got [1,5]"),
    (request_of(shape=(4,), raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT, "Expected [-1,4], got [4], the batch"),
    (request_of(shape=(-1, 4), raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT, "negative extent"),
    (request_of(shape=(0, 4), raw=b""), grpc.StatusCode.INVALID_ARGUMENT, "must be >= 1 for 'affine', got 0"),
    (request_of(shape=(9, 4), raw=bytes(144)), grpc.StatusCode.INVALID_ARGUMENT, "must be <= 8 for 'affine', got 9"),
    (request_of(datatype="INT32", raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT,
     "input 'x' data-type is 'INT32', but model 'affine' expects 'FP32'"),
    (request_of(datatype="FLOAT", raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT, "unknown datatype 'FLOAT'"),
    (request_of(raw=bytes(15)), grpc.StatusCode.INVALID_ARGUMENT, "Expected 16, got 15: bytes of FP32 [1, 4]"),
    (request_of(), grpc.StatusCode.INVALID_ARGUMENT, "expected 4 values in fp32_contents, got 0"),
    (request_of("two", shape=(1, 2, 3), raw=bytes(24)), grpc.StatusCode.INVALID_ARGUMENT, "required input(s) ['x2']"),
    (request_of(shape=(1 << 40, 1 << 40), raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT, "exceed maximum size"),
    (request_of(shape=(1,) * 100, raw=bytes(4)), grpc.StatusCode.INVALID_ARGUMENT, "a shape of 100 axes"),
    (request_of(datatype="BYTES", raw=bytes(16)), grpc.StatusCode.INVALID_ARGUMENT, "is 'BYTES', but model"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_request_is_told_what_was_expected(
        stub: service_pb2_grpc.GRPCInferenceServiceStub, request_: service_pb2.ModelInferRequest,
        code: grpc.StatusCode, text: str) -> None:
    actual, details = refusal(stub, request_)
    assert (actual, text in details) == (code, True), details


def test_raw_and_typed_contents_are_not_mixed(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    request = request_of(raw=bytes(16))
    request.inputs[0].contents.fp32_contents.extend([0, 1, 2, 3])
    code, details = refusal(stub, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "must not be mixed" in details


def test_unknown_versions_outputs_and_extensions_are_refused_by_name(
        stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    request = request_of(raw=bytes(16))
    request.parameters["triton_x"].int64_param = 1
    assert "are reserved" in refusal(stub, request)[1]
    del request.parameters["triton_x"]
    request.parameters["timeout"].string_param = "soon"
    assert "expected int, got str" in refusal(stub, request)[1]
    del request.parameters["timeout"]
    request.model_version = "3"
    assert refusal(stub, request)[0] is grpc.StatusCode.NOT_FOUND
    request.model_version = "latest"
    assert refusal(stub, request)[0] is grpc.StatusCode.INVALID_ARGUMENT
    request.model_version = ""
    request.outputs.add(name="z")
    assert "it has y FP32 [-1, 4]" in refusal(stub, request)[1]
    request.outputs[0].name = "y"
    request.outputs[0].parameters["shared_memory_region"].string_param = "r"
    request.outputs[0].parameters["shared_memory_byte_size"].int64_param = 16
    code, details = refusal(stub, request)
    assert code is grpc.StatusCode.UNIMPLEMENTED and "shared memory" in details


def test_a_message_that_is_too_large_gets_a_status_of_its_own(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    code, details = refusal(stub, request_of(raw=bytes(2 << 20)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details


def test_a_failing_execution_fails_its_request_and_not_the_next(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="a negative value"):
        client.infer("fragile", [infer_input("x", np.full((1, 4), -1, np.float32))])
    client.infer("fragile", [infer_input("x", np.ones((1, 4), np.float32))])
    statistics = client.get_inference_statistics("fragile").model_stats[0].inference_stats
    assert (statistics.fail.count, statistics.success.count) == (1, 1)


def test_the_index_tells_the_state_of_every_model_and_the_reason(client: triton.InferenceServerClient) -> None:
    index = {(model.name, model.version): model for model in client.get_model_repository_index().models}
    assert index["affine", "1"].state == "READY"
    assert index["corrupt", "1"].state == "UNAVAILABLE" and "is no plan" in index["corrupt", "1"].reason
    assert index["misspelt", ""].state == "UNAVAILABLE" and "config.pbtxt:1" in index["misspelt", ""].reason
    ready = {name: client.is_model_ready(name) for name in ("affine", "corrupt", "nobody")}
    assert ready == {"affine": True, "corrupt": False, "nobody": False}


def test_statistics_count_requests_rows_and_executions_by_batch_size(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("half").model_stats[0]
    client.infer("half", [infer_input("x", np.ones((3, 4), np.float16), "FP16")])
    after = client.get_inference_statistics("half").model_stats[0]
    assert after.inference_count - before.inference_count == 3
    assert after.execution_count - before.execution_count == 1
    assert after.inference_stats.queue.count - before.inference_stats.queue.count == 1
    assert 3 in {batch.batch_size for batch in after.batch_stats}
    stats = after.inference_stats
    parts = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
    assert stats.success.ns == sum(part.ns for part in parts)
    assert len(client.get_inference_statistics().model_stats) >= 7


def test_loading_and_unloading_by_clients_must_be_switched_on(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="--model-control-mode explicit"):
        client.unload_model("affine")


@pytest.mark.parametrize("front", ["grpcio", "grpcio, 2 workers"])
def test_answers_are_compressed_where_that_is_asked_for(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "affine", shape=[1000])
    request = request_of(shape=(1, 1000), raw=np.zeros(1000, np.float32).tobytes())
    options = _options(_parser().parse_args(["--grpc-infer-response-compression-level=low"]))
    with (serving(tmp_path, grpc_front=front, grpc_channel=options.grpc_channel) as server,
          grpc.insecure_channel(server.address) as channel, Http2Client(server.ports.grpc) as plain):
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=TIMEOUT_SECS)
        assert answer.raw_output_contents == [np.ones(1000, np.float32).tobytes()]
        stream = plain.call(INFER, request.SerializeToString(), (b"grpc-accept-encoding", b"identity, gzip"))
        fields, message = plain.answer(stream)
        assert (fields[b"grpc-encoding"], message[0]) == (b"gzip", 1)
