"""Clients that send too much, do not read, or send invalid messages. scripts/stress.py is the same at full size."""
from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
import weakref
from collections import Counter
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server import protos
from infer_server.batching.request import Request
from infer_server.endpoints import inflight
from infer_server.endpoints.grpc.context import CallContext, unary
from infer_server.endpoints.grpc.grpcio.server import Handlers
from infer_server.endpoints.grpc.methods import INFER_PATH, Methods
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import InvalidRequestError
from scripts.stress import INFER, request, send_on
from scripts.testing.mute_client import MuteClient
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.awaited_reply import AwaitedReply
from tests.infer_server.endpoints.test_serving import eventually, executions, infer
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

VALUES = 512 << 10                              # values of an input and of an output: 2 MiB
ONE_CALL = 3 * 4 * VALUES                       # bytes that the server counts: an input, and an output twice


def held(server: RunningServer) -> int:
    return server.server._inflight.held_bytes


@pytest.mark.parametrize("persistent", [False, True])
def test_a_server_that_stops_under_load_ends_no_request_otherwise_than_answered_or_unavailable(
        tmp_path: Path, persistent: bool) -> None:
    write_model(tmp_path, "m", seconds=0.002)

    async def ask_until_nobody_listens() -> Counter[str]:
        asking = [asyncio.create_task(send_on(server.address, persistent)) for _ in range(32)]
        assert await asyncio.to_thread(eventually, lambda: executions(server) > 8)
        await asyncio.to_thread(server.stop)
        return sum(await asyncio.gather(*asking), Counter[str]())

    with serving(tmp_path) as server:
        ended = asyncio.run(ask_until_nobody_listens())
    assert ended.keys() == {"OK", "UNAVAILABLE"}


def is_served(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(infer(client).all())
    except InferenceServerException as error:
        assert error.status() == "StatusCode.RESOURCE_EXHAUSTED"
        return False


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_answers_that_nobody_reads_are_held_up_to_the_bound_and_no_further(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "large", shape=[VALUES], max_batch=1)
    write_model(tmp_path, "m")
    bound = 3 * ONE_CALL + 1000
    large = triton.InferInput("x", [1, VALUES], "FP32")
    large.set_data_from_numpy(np.zeros((1, VALUES), np.float32))
    with (serving(tmp_path, max_inflight_bytes=bound, grpc_front=front) as server,
          triton.InferenceServerClient(server.address) as client):
        with closing(MuteClient(server.ports.grpc)) as one, closing(MuteClient(server.ports.grpc)) as another:
            with pytest.raises(InferenceServerException, match="--max-inflight-mib") as caught:
                for _ in range(50):                 # while little is missing, it may be the mute ones who are refused
                    for mute in (one, another):
                        mute.send_request(INFER, request("large", VALUES))
                        client.infer("large", [large])
            assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            assert held(server) <= bound
            assert eventually(lambda: is_served(client)), "what is small still fits, once the refused call has ended"
        assert eventually(lambda: held(server) == 0)
        for _ in range(9):
            client.infer("large", [large])          # what is read does not count


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_a_client_that_does_not_read_its_answer_in_time_is_disconnected(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, front: str) -> None:
    write_model(tmp_path, "large", shape=[VALUES], max_batch=1)
    with (serving(tmp_path, send_timeout_secs=0.5, grpc_front=front) as server,
          triton.InferenceServerClient(server.address) as client):
        large = triton.InferInput("x", [1, VALUES], "FP32")
        large.set_data_from_numpy(np.zeros((1, VALUES), np.float32))
        client.infer("large", [large])              # over another connection, before the one who does not read
        with closing(MuteClient(server.ports.grpc)) as mute:
            mute.send_request(INFER, request("large", VALUES))
            client.infer("large", [large])          # and after
            assert eventually(lambda: "has not read its answer in 0.5 s" in caplog.text)
            with pytest.raises((EOFError, ConnectionError)):
                while True:
                    mute.read_frame()
            assert eventually(lambda: held(server) == 0)
        client.infer("large", [large])
    assert caplog.text.count("has not read") == 1 and "Traceback" not in caplog.text


@pytest.mark.parametrize("method", [method.name for method in protos.methods(protos.INFERENCE_SERVICE)
                                    if method.name != "ModelStreamInfer"])      # the test below
def test_bytes_that_are_no_message_are_an_invalid_argument_of_every_call(
        method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, explicit_control=True) as server, grpc.insecure_channel(server.address) as channel:
        caplog.clear()
        code = status(channel, f"/{protos.INFERENCE_SERVICE}/{method}", b"\x0a\xff")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    complaints = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(complaints) == 1 and f"not a {method}Request" in complaints[0].getMessage()
    assert not complaints[0].exc_info


def test_bytes_that_are_no_message_are_answered_as_an_error_in_their_stream(tmp_path: Path) -> None:
    with serving(tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        stream = channel.stream_stream(f"/{protos.INFERENCE_SERVICE}/ModelStreamInfer")
        answers = list(stream(iter([b"\x0a\xff"] * 2), timeout=TIMEOUT_SECS))
    assert len(answers) == 2 and all(b"not a ModelInferRequest" in answer for answer in answers)


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_bytes_that_are_no_message_are_an_invalid_argument_of_health_checks(method: str, tmp_path: Path) -> None:
    with serving(tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        assert status(channel, f"/{protos.HEALTH_SERVICE}/{method}", b"\x0a\xff") is grpc.StatusCode.INVALID_ARGUMENT


def status(channel: grpc.Channel, path: str, data: bytes) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream(path)(data, timeout=TIMEOUT_SECS))
    code: grpc.StatusCode = caught.value.code()
    return code


class Refusing:
    """gRPC context that keeps the exception of abort(), as grpcio does."""
    kept: Exception

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.kept = RuntimeError(code, details)
        raise self.kept


class Details:
    """Stand-in for grpc.HandlerCallDetails."""
    method = INFER_PATH


class Message:
    """Message object, since weak references to bytes are impossible."""


def test_a_refused_request_is_let_go_of_at_once() -> None:
    async def refuse(_: bytes, __: CallContext) -> bytes:
        raise InvalidRequestError("no")

    handler = Handlers(Methods({INFER_PATH: unary(refuse)}.get), lambda peer: None).service(Details())

    async def send(context: Refusing) -> weakref.ref[Message]:
        message = Message()
        handled = handler.unary_unary(message, context)
        watched = weakref.ref(message)
        del message
        with pytest.raises(RuntimeError):
            await handled
        return watched

    gc.disable()
    try:
        context = Refusing()
        assert asyncio.run(send(context))() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("front", FRONTS + WORKERS)
def test_an_idle_server_keeps_nothing_of_the_last_request(front: str, tmp_path: Path) -> None:
    values = 4 << 20
    write_model(tmp_path, "large", shape=[values], max_batch=1)
    with (serving(tmp_path, grpc_front=front) as server,
          grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel):
        ask = channel.unary_unary(INFER)
        ask(request("large", values))               # what stays of a first one is the model's
        tracemalloc.start()
        try:
            for _ in range(2):
                ask(request("large", values))
            answer_bytes = 4 * values
            assert eventually(lambda: tracemalloc.get_traced_memory()[0] < 1.5 * answer_bytes)
        finally:
            tracemalloc.stop()


class Looking(Inflight):
    """Inflight that checks memory again only when the previous trim has ended, however long that took."""
    looks = 0

    def _check_memory(self) -> None:
        returning = getattr(self, "_returning", None)
        if returning and not returning.done():
            self._loop.call_later(0.001, self._check_memory)
        else:
            self.looks += 1
            super()._check_memory()


def test_memory_that_no_call_tells_of_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps memory that transports free, e.g. of cancelled messages."""
    resident, trimmed_at = [100 << 20], list[int]()

    def trim() -> None:
        trimmed_at.append(resident[0] >> 20)
        resident[0] = 130 << 20

    async def grow() -> None:
        limits = Looking(1 << 30, 60.0)

        async def look(mib: int) -> list[int]:
            resident[0], looks = mib << 20, limits.looks
            while limits.looks < looks + 2:
                await asyncio.sleep(0.001)
            return trimmed_at

        assert await look(150) == [], "it is not much"
        call = limits.begin(Nobody(), 2 << 20)
        assert await look(170) == [], "something is held"
        limits.end(call)
        assert await look(170) == [170]
        assert await look(180) == [170], "not much has come since"
        assert await look(195) == [170, 195]

    monkeypatch.setattr("infer_server.engines.capacity.trim", trim)
    monkeypatch.setattr(inflight, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(inflight, "_CHECK_SECS", 0.001)
    asyncio.run(grow())


class Nobody:
    """Client whose call ends without a disconnection."""

    def peer(self) -> str:
        return ""

    def disconnect(self) -> None:
        raise AssertionError("it is not late")


class BrokenReply:
    """Reply whose frontend fails to send the response."""
    gone = False
    failed: Exception | None = None

    def send(self, response: bytes) -> None:
        raise RuntimeError("a bug of a front")

    def fail(self, error: Exception) -> None:
        self.gone, self.failed = True, error


def test_an_answer_that_cannot_be_sent_leaves_the_others_of_its_batch_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config="max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 20000 }")

    async def send(server: RunningServer) -> tuple[BrokenReply, bytes]:
        model = server.server.repository.find("m")
        broken, whole = BrokenReply(), AwaitedReply(asyncio.get_running_loop())
        for reply in (broken, whole):
            model.submit(Request({"x": np.zeros((1, 4), np.float32)}, 1, (), lambda _: b"answer", reply))
        return broken, await whole.response

    with serving(tmp_path) as server:
        broken, answer = server.run(send(server))
        assert answer == b"answer" and isinstance(broken.failed, RuntimeError)
        counters = server.server.repository.find("m").statistics.snapshot()
        assert counters.execution_count == 1
