"""Python clients: grpcio, Triton's four, and the calls of health probes."""
from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from infer_server.protos import health
from scripts.interop.peers import TIMEOUT_SECS, Check, Peer, Target, wait_until
from scripts.interop.servers import COUNTED, ECHO, LARGE, SLOW

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_CANCELLED = rf'nv_inference_request_failure{{model="{SLOW}",reason="CANCELED",version="1"}} (\d+)'
_RESPONSES = 4                      # responses per request of the model COUNTED


def request(model: str, values: np.ndarray) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[values.astype("<f4").tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[1, values.size])
    return message


def small(model: str = ECHO) -> Any:
    return request(model, np.full(3, _RESPONSES, np.float32))


def large() -> Any:
    return request(ECHO, np.arange(LARGE, dtype=np.float32))


def credentials(target: Target) -> grpc.ChannelCredentials | None:
    return grpc.ssl_channel_credentials(target.root.read_bytes()) if target.root else None


@contextmanager
def channel_to(target: Target) -> Iterator[Any]:
    secrets = credentials(target)
    with (grpc.secure_channel(target.grpc, secrets, _OPTIONS) if secrets else
          grpc.insecure_channel(target.grpc, _OPTIONS)) as channel:
        yield channel


@contextmanager
def stub_to(target: Target) -> Iterator[Any]:
    with channel_to(target) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def cancelled_by_clients(target: Target) -> int:
    """Return the number of cancelled inferences of SLOW, from the server's metrics."""
    with urlopen(f"http://{target.metrics}/metrics", timeout=TIMEOUT_SECS) as page:
        match = re.search(_CANCELLED, page.read().decode())
    return int(match.group(1)) if match else 0


def _code(call: Callable[[], Any]) -> str:
    """Return the status of a call, which must fail."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    except InferenceServerException as error:
        return str(error.status())
    return "OK"


def _is(status: str, call: Callable[[], Any]) -> None:
    code = _code(call)
    assert status in code, f"{code} instead of {status}"


# ---- grpcio, synchronous: these checks also run through proxies
def unary(target: Target) -> None:
    with stub_to(target) as stub:
        for _ in range(20):
            sent = small()
            assert stub.ModelInfer(sent, timeout=TIMEOUT_SECS).raw_output_contents[:] == sent.raw_input_contents[:]


def concurrent(target: Target) -> None:
    with stub_to(target) as stub:
        sent = small()
        for call in [stub.ModelInfer.future(sent, timeout=TIMEOUT_SECS) for _ in range(200)]:
            assert call.result().raw_output_contents[:] == sent.raw_input_contents[:]


def errors(target: Target) -> None:
    with stub_to(target) as stub:
        _is("NOT_FOUND", lambda: stub.ModelInfer(small("no_model"), timeout=TIMEOUT_SECS))
        _is("INVALID_ARGUMENT", lambda: stub.ModelInfer(service_pb2.ModelInferRequest(model_name=ECHO),
                                                        timeout=TIMEOUT_SECS))
    with channel_to(target) as channel:
        _is("UNIMPLEMENTED", lambda: channel.unary_unary("/no.Service/Call")(b"", timeout=TIMEOUT_SECS))


def large_messages(target: Target) -> None:
    with stub_to(target) as stub:
        for _ in range(4):
            sent = large()
            assert stub.ModelInfer(sent, timeout=TIMEOUT_SECS).raw_output_contents[:] == sent.raw_input_contents[:]


def streams(target: Target) -> None:
    with stub_to(target) as stub:
        answers = list(stub.ModelStreamInfer(iter([small(COUNTED)] * 3), timeout=TIMEOUT_SECS))
        assert not any(answer.error_message for answer in answers) and len(answers) == 3 * _RESPONSES


def large_streams(target: Target) -> None:
    with stub_to(target) as stub:
        answers = list(stub.ModelStreamInfer(iter([large()] * 3), timeout=TIMEOUT_SECS))
        assert [len(answer.infer_response.raw_output_contents[0]) for answer in answers] == [4 * LARGE] * 3


def deadlines(target: Target) -> None:
    with stub_to(target) as stub:
        _is("DEADLINE_EXCEEDED", lambda: stub.ModelInfer(small(SLOW), timeout=0.2))


def cancellation(target: Target) -> None:
    """Cancel a unary call and a stream, and wait until the server has cancelled the call."""
    before = cancelled_by_clients(target)
    with stub_to(target) as stub:
        call = stub.ModelInfer.future(small(SLOW), timeout=TIMEOUT_SECS)
        threading.Event().wait(0.3)
        call.cancel()
        wait_until(lambda: cancelled_by_clients(target) > before, "the server notices that a call is cancelled")
        stream = stub.ModelStreamInfer(iter([small(SLOW)]), timeout=TIMEOUT_SECS)
        threading.Event().wait(0.3)
        stream.cancel()
        _is("CANCELLED", lambda: list(stream))
        stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=TIMEOUT_SECS)


def compression(target: Target) -> None:
    with stub_to(target) as stub:
        sent = request(ECHO, np.zeros(LARGE, np.float32))
        for coding in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            answer = stub.ModelInfer(sent, timeout=TIMEOUT_SECS, compression=coding)
            assert answer.raw_output_contents[:] == sent.raw_input_contents[:]


def health_probe(target: Target) -> None:
    """Make the calls of grpc_health_probe and of Kubernetes' probes."""
    with channel_to(target) as channel:
        path = "/grpc.health.v1.Health/"
        check = channel.unary_unary(path + "Check", health.HealthCheckRequest.SerializeToString,
                                    health.HealthCheckResponse.FromString)
        watch = channel.unary_stream(path + "Watch", health.HealthCheckRequest.SerializeToString,
                                     health.HealthCheckResponse.FromString)
        serving = health.HealthCheckResponse.SERVING
        for service in ("", "inference.GRPCInferenceService"):
            assert check(health.HealthCheckRequest(service=service), timeout=TIMEOUT_SECS).status == serving
        _is("NOT_FOUND", lambda: check(health.HealthCheckRequest(service="no.Service"), timeout=TIMEOUT_SECS))
        watching = watch(health.HealthCheckRequest(), timeout=TIMEOUT_SECS)
        assert next(watching).status == serving
        watching.cancel()


GRPC_CHECKS: dict[str, Check] = {
    "unary": unary, "200 at a time": concurrent, "errors": errors, "5 MB": large_messages, "streams": streams,
    "streams of 5 MB": large_streams, "deadlines": deadlines, "cancellation": cancellation,
    "gzip and deflate": compression, "health": health_probe}


# ---- grpcio, asyncio
def aio_calls(target: Target) -> None:
    async def calls() -> None:
        secrets = credentials(target)
        async with (grpc.aio.secure_channel(target.grpc, secrets, _OPTIONS) if secrets else
                    grpc.aio.insecure_channel(target.grpc, _OPTIONS)) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for sent in (small(), large()):
                for answer in await asyncio.gather(*(stub.ModelInfer(sent, timeout=TIMEOUT_SECS) for _ in range(4))):
                    assert answer.raw_output_contents[:] == sent.raw_input_contents[:]
            stream = stub.ModelStreamInfer(iter([small(COUNTED)] * 3), timeout=TIMEOUT_SECS)
            assert len([answer async for answer in stream]) == 3 * _RESPONSES
            for ended, expected in ((stub.ModelInfer(small(SLOW), timeout=0.2), "DEADLINE_EXCEEDED"),
                                    (stub.ModelInfer(small("no_model"), timeout=TIMEOUT_SECS), "NOT_FOUND")):
                code = await ended.code()
                assert code.name == expected, f"{code} instead of {expected}"
            before = await asyncio.to_thread(cancelled_by_clients, target)
            call = stub.ModelInfer(small(SLOW), timeout=TIMEOUT_SECS)
            await asyncio.sleep(0.3)
            call.cancel()
            await asyncio.to_thread(wait_until, lambda: cancelled_by_clients(target) > before, "the call is cancelled")

    asyncio.run(calls())


# ---- Triton's
def triton_calls(library: Any) -> Check:
    """Return a check that makes the calls of one of Triton's client libraries."""
    is_grpc, is_aio = "grpc" in library.__name__, library.__name__.endswith("aio")

    def connect(target: Target) -> Any:
        address = target.grpc if is_grpc else target.http
        if is_grpc:
            return library.InferenceServerClient(address, ssl=bool(target.root),
                                                 root_certificates=str(target.root) if target.root else None)
        return library.InferenceServerClient(address)

    def tensors(values: np.ndarray) -> list[Any]:
        tensor = library.InferInput("x", [1, values.size], "FP32")
        tensor.set_data_from_numpy(values[None])
        return [tensor]

    async def calls(target: Target) -> None:
        async def done(value: Any) -> Any:
            return await value if inspect.isawaitable(value) else value

        client = connect(target)
        try:
            assert await done(client.is_server_ready()) and await done(client.is_model_ready(ECHO))
            for size in (3, LARGE):
                values = np.arange(size, dtype=np.float32)
                result = await done(client.infer(ECHO, tensors(values)))
                assert np.array_equal(result.as_numpy("y")[0], values)
            try:
                await done(client.infer("no_model", tensors(values[:3])))
            except InferenceServerException as error:
                assert "unknown" in str(error), str(error)
            if is_grpc:
                assert await answers(client) == 3 * _RESPONSES
        finally:
            await done(client.close())

    async def answers(client: Any) -> int:
        values = np.full(3, _RESPONSES, np.float32)
        if is_aio:
            async def requests() -> Any:
                for _ in range(3):
                    yield {"model_name": COUNTED, "inputs": tensors(values)}
            return len([result async for result, error in client.stream_infer(requests()) if error is None])
        results: list[Any] = []
        client.start_stream(lambda result, error: results.append(error or result))
        for _ in range(3):
            client.async_stream_infer(COUNTED, tensors(values))
        client.stop_stream()
        return sum(not isinstance(each, Exception) for each in results)

    return lambda target: asyncio.run(calls(target))


_TRITON: Sequence[Any] = (tritonclient.grpc, tritonclient.grpc.aio, tritonclient.http, tritonclient.http.aio)
PEERS = (
    Peer("grpcio", lambda: version("grpcio"), GRPC_CHECKS),
    Peer("grpcio, asyncio", lambda: version("grpcio"),
         {"unary, 5 MB, streams, deadlines, cancellation, errors": aio_calls}),
    *(Peer(library.__name__, lambda: version("tritonclient"),
           {"unary, 5 MB, errors" + (", streams" if "grpc" in library.__name__ else ""): triton_calls(library)})
      for library in _TRITON))
