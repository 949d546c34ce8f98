"""Limits hold for gRPC messages that are compressed, unfinished, or consist of headers."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

import grpc
import numpy as np
import pytest

from infer_server import protos
from infer_server.errors import MalformedMessageError, TooLargeError
from infer_server.protocol.compression import coding_of
from infer_server.protocol.wire import byte_strings, split_request
from infer_server.protos import health, inference
from scripts.testing.mute_client import MuteClient
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

MIB = 1 << 20
CODINGS = (grpc.Compression.Gzip, grpc.Compression.Deflate)
SERVICE = f"/{protos.INFERENCE_SERVICE}"


@pytest.fixture(scope="module", params=(*FRONTS, WORKERS[0]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "m", shape=[1 << 16])
    with serving(repository, max_message_bytes=4 * MIB, max_inflight_bytes=64 * MIB, explicit_control=True,
                 load_models=None, grpc_front=request.param) as running:
        yield running


def request_of(values: np.ndarray) -> inference.ModelInferRequest:
    message = inference.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    return message


@pytest.mark.parametrize("coding", CODINGS)
def test_compressed_messages_are_served(server: RunningServer, coding: grpc.Compression) -> None:
    values = np.zeros((1, 1 << 16), np.float32)
    message = request_of(values).SerializeToString()
    with grpc.insecure_channel(server.address, compression=coding) as channel:
        unary = channel.unary_unary(f"{SERVICE}/ModelInfer")(message, timeout=TIMEOUT_SECS)
        (streamed, last) = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(
            iter([message, message]), timeout=TIMEOUT_SECS)
        answers = [inference.ModelStreamInferResponse.FromString(each).infer_response for each in (streamed, last)]
        for answer in (inference.ModelInferResponse.FromString(unary), *answers):
            (content,) = answer.raw_output_contents
            np.testing.assert_array_equal(np.frombuffer(content, np.float32), 1)
        named = inference.ModelMetadataRequest(name="m", version="").SerializeToString()
        metadata = channel.unary_unary(f"{SERVICE}/ModelMetadata")(named, timeout=TIMEOUT_SECS)
        assert inference.ModelMetadataResponse.FromString(metadata).name == "m"


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("call", ["ModelInfer", "ModelMetadata", "RepositoryModelLoad", "ModelStreamInfer"])
def test_what_becomes_too_large_is_refused_while_it_does(server: RunningServer, call: str,
                                                         coding: grpc.Compression) -> None:
    bomb = bytes(8 * MIB)
    with grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)],
                               compression=coding) as channel:
        if call == "ModelStreamInfer":
            (answer,) = channel.stream_stream(f"{SERVICE}/{call}")(iter([bomb]), timeout=TIMEOUT_SECS)
            assert "when it is decompressed" in inference.ModelStreamInferResponse.FromString(answer).error_message
        else:
            with pytest.raises(grpc.RpcError, match="when it is decompressed") as raised:
                channel.unary_unary(f"{SERVICE}/{call}")(bomb, timeout=TIMEOUT_SECS)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_compressed_health_check_is_answered(server: RunningServer) -> None:
    from gzip import compress

    from infer_server.endpoints.grpc.errors import parsed
    sent = health.HealthCheckRequest(service="s" * 99).SerializeToString()
    assert parsed(health.HealthCheckRequest, compress(sent)).service == "s" * 99
    with pytest.raises(TooLargeError, match="HealthCheckRequest of"):
        parsed(health.HealthCheckRequest, health.HealthCheckRequest(service="s" * MIB).SerializeToString())


def test_no_message_of_the_protocol_looks_compressed() -> None:
    for message in (request_of(np.zeros((1, 4), np.float32)), inference.ServerLiveRequest(),
                    inference.SystemSharedMemoryRegisterRequest(offset=8, byte_size=1 << 40),
                    inference.RepositoryIndexRequest(ready=True), health.HealthCheckRequest(service="x")):
        assert coding_of(message.SerializeToString()) == ""


def test_what_is_said_beside_tensors_is_bounded() -> None:
    message = request_of(np.zeros((1, 4), np.float32))
    for i in range(20_000):
        message.inputs[0].parameters[str(i)].int64_param = i
    with pytest.raises(TooLargeError, match="in addition to the contents of its tensors"):
        split_request(message.SerializeToString())


def test_many_byte_strings_are_no_header() -> None:
    message = inference.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="BYTES", shape=[200_000])
    tensor.contents.bytes_contents.extend([b"ab", b""] * 100_000)
    (packed,) = split_request(message.SerializeToString()).packed.values()
    assert byte_strings(packed.values, 200_000) == [b"ab", b""] * 100_000
    assert len(byte_strings(packed.values, 16)) == 17, "no more is read than is refused"
    for wrong in (b"B\x01a\x08\x01", b"B\x02a", b"B\xff"):
        with pytest.raises(MalformedMessageError):
            byte_strings(memoryview(wrong), 9)


def test_messages_that_never_end_are_bounded(server: RunningServer) -> None:
    """The server ends the connection, or refuses each message above three quarters of the limit on held bytes."""
    with closing(MuteClient(server.ports.grpc)) as client, suppress(ConnectionError, EOFError):
        for _ in range(100):
            client.send_request(f"{SERVICE}/ModelInfer", bytes(3 * MIB), announced=4 * MIB)
        assert server.server._inflight.held_bytes <= 48 * MIB
    with grpc.insecure_channel(server.address) as channel:
        assert channel.unary_unary(f"{SERVICE}/ServerLive")(b"", timeout=TIMEOUT_SECS)