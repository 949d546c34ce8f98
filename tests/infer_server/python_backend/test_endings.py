"""When a Python model's process ends, no request waits for ever and nothing is left behind."""
from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.python_backend.process import ModelProcess
from infer_server.repository.kinds import python_model as python_model_module
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.frontend_workers.several_workers import is_alive
from tests.infer_server.python_backend.test_async import CONFIG, DECOUPLED, streamed, tensor
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.repository.test_ensembles import write_chain
from tests.infer_server.serving import serving

# What these models have in common: files tell how far they are, and let them go on.
MARKS = HEAD + """
def mark(name, text=""):
    with open(f"{FOLDER}/.{name}", "w") as file:
        file.write(str(text))
    os.rename(f"{FOLDER}/.{name}", f"{FOLDER}/{name}")

def wait_for(name):
    while not os.path.exists(f"{FOLDER}/{name}"):
        time.sleep(0.001)

def one():
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1, np.float32))])
"""
WAITS = """
class TritonPythonModel:
    def execute(self, requests):
        mark("executes", os.getpid())
        wait_for("go on")
        return [one() for _ in requests]

    def finalize(self):
        mark("finalized")
"""
FORKS_AT_SIGNALS = """
import multiprocessing

class TritonPythonModel:
    def execute(self, requests):
        with multiprocessing.get_context("fork").Pool(1) as pool:       # which ends its processes by SIGTERM
            mark("executes", os.getpid())
            wait_for("go on")
        return [one() for _ in requests]

    def finalize(self):
        mark("finalized")
"""

ENDS_WHAT_IT_FORKS = """
import signal

class TritonPythonModel:
    def execute(self, requests):
        if not (child := os.fork()):
            time.sleep(1000)
        os.kill(child, signal.SIGTERM)          # at once: it may not have run yet
        ended = pb_utils.Tensor("y", np.array([os.waitpid(child, 0)[1]], np.float32))
        return [pb_utils.InferenceResponse([ended]) for _ in requests]
"""
LEAVES_A_CHILD = """
class TritonPythonModel:
    def execute(self, requests):
        if child := os.fork():
            mark("child", child)
            os._exit(3)
        time.sleep(1000)
"""
TAKES_ALL_DESCRIPTORS = """
import resource

class TritonPythonModel:
    def execute(self, requests):
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        try:
            while True:
                os.dup(0)
        except OSError:
            return [one() for _ in requests]
"""

ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        response = pb_utils.InferenceRequest(
            model_name="large", requested_output_names=["y"], inputs=request.inputs()).exec()
        return [pb_utils.InferenceResponse(error=response.error()) if response.has_error() else one()]
"""
LARGE = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(100_000, os.getpid(), np.float32))])
                for _ in requests]
"""

UNTIL_CANCELLED = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        mark("asked")
        while not request.is_cancelled():
            time.sleep(0.001)
        mark("cancelled")
        request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LEAVES_WHAT_IT_ASKED = """
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.InferenceRequest(model_name="counts", requested_output_names=["y"], inputs=requests[0].inputs()).exec(
            decoupled=True)
        wait_for("asked")
        os._exit(3)
"""
ANSWERS_LATER = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        mark("executes")
        while not os.path.exists(f"{FOLDER}/go on"):
            await asyncio.sleep(0.001)
        mark("went on", os.path.exists(f"{FOLDER}/finalized"))
        requests[0].get_response_sender().send(one(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        mark("finalized")
"""
ASKS_LATER = ANSWERS_LATER.replace("requests[0].get", """
        response = await pb_utils.InferenceRequest(model_name="affine_8", requested_output_names=["y"], inputs=[
            pb_utils.Tensor("x", np.zeros((1, 4), np.float32))]).async_exec()
        assert not response.has_error(), response.error().message()
        requests[0].get""".lstrip())
SAYS_WHETHER_CANCELLED = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        pb_utils.is_model_ready("none")         # so that what was said before is known
        y = pb_utils.Tensor("y", np.array([request.is_cancelled()], np.float32))
        mark("cancelled", request.is_cancelled())
        request.get_response_sender().send(
            pb_utils.InferenceResponse([y]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WARM_UP = """ model_warmup { name: "zeros"
  inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }"""
READS_NOTHING = """
import signal

class TritonPythonModel:
    def is_ready(self):
        return True

    def execute(self, requests):
        for _ in range(8):
            pb_utils.InferenceRequest(
                model_name="medium", requested_output_names=["y"], inputs=requests[0].inputs()).exec(decoupled=True)
        mark("executes", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        return [one() for _ in requests]
"""
MEDIUM = """
class TritonPythonModel:
    def execute(self, requests):
        wait_for("stopped")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(16_000, np.float32))]) for _ in requests]
"""
IS_THERE = """
class TritonPythonModel:
    def initialize(self, args):
        mark("is there", os.getpid())

    def execute(self, requests): ...
"""
STATE = """ sequence_batching { state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: 1
  initial_state { name: "s" data_type: TYPE_FP32 dims: 1 data_file: "none" } } }"""


def marking_model(folder: Path, name: str, source: str, config: str = CONFIG) -> None:
    """Write a Python model that writes marker files into the folder."""
    python_model(folder, name, f"FOLDER = {str(folder)!r}" + MARKS + source, config)


def marked(file: Path) -> str:
    assert eventually(file.exists)
    return file.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1,
                                    signal.SIGUSR2])
@pytest.mark.parametrize("source", [WAITS, FORKS_AT_SIGNALS])
def test_a_signal_to_all_processes_is_for_the_server_which_lets_its_models_end(
        tmp_path: Path, number: signal.Signals, source: str) -> None:
    """Terminals and service managers send signals to the whole process group."""
    marking_model(tmp_path, "m", source)
    with (serving(tmp_path) as server, ThreadPoolExecutor(1) as pool,
          triton.InferenceServerClient(server.address) as client):
        requested = pool.submit(client.infer, "m", [tensor(1)])
        os.kill(int(marked(tmp_path / "executes")), number)
        (tmp_path / "go on").touch()
        assert requested.result().as_numpy("y").tolist() == [1]
    assert (tmp_path / "finalized").exists()


def test_what_a_model_forks_and_ends_at_once_ends(tmp_path: Path) -> None:
    """A process pool does so on exit; formerly this waited for a process that had not started when the signal came."""
    marking_model(tmp_path, "m", ENDS_WHAT_IT_FORKS)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        ended = client.infer("m", [tensor(1)], client_timeout=TIMEOUT_SECS)
    assert ended.as_numpy("y").tolist() == [signal.SIGTERM]


@pytest.mark.parametrize("config", [CONFIG, DECOUPLED])
def test_requests_end_with_a_process_of_which_a_child_lives_on(tmp_path: Path, config: str) -> None:
    """A child, e.g. of a process pool, inherits the connection's descriptor, so the connection is not closed."""
    marking_model(tmp_path, "m", LEAVES_A_CHILD, config)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        (error,) = streamed(client, "m", tensor(1))
        os.kill(int(marked(tmp_path / "child")), signal.SIGKILL)
    assert "its process ended" in str(error) and "exit status 3" in str(error)


def test_a_process_that_cannot_take_a_tensor_ends_and_says_so(tmp_path: Path) -> None:
    """The process has no free descriptor for the shared memory; else the server would wait for execute_timeout_secs."""
    marking_model(tmp_path, "m", TAKES_ALL_DESCRIPTORS)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("m", [tensor(1)])
        with pytest.raises(InferenceServerException, match="its process ended in execute: exit status 1"):
            client.infer("m", [tensor(*range(100_000))], client_timeout=TIMEOUT_SECS)
        assert client.infer("m", [tensor(1)]).as_numpy("y").tolist() == [1]


def test_a_process_that_cannot_be_sent_a_large_tensor_serves_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has no free file descriptor; only clients with large tensors get an error."""
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    marking_model(tmp_path, "large", LARGE)
    marking_model(tmp_path, "asks", ASKS)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        before = client.infer("large", [tensor(1)]).as_numpy("y")[0]
        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", none_left)
            for model, values in (("large", range(100_000)), ("asks", [1])):
                with pytest.raises(InferenceServerException, match="Too many open files"):
                    client.infer(model, [tensor(*values)], client_timeout=TIMEOUT_SECS)
        assert client.infer("large", [tensor(1)]).as_numpy("y")[0] == before


@pytest.mark.parametrize("config", [CONFIG.removesuffix("}") + 'label_filename: "none.txt" }', CONFIG + STATE])
def test_a_process_ends_where_its_model_fails_for_a_file_that_is_missing(tmp_path: Path, config: str) -> None:
    marking_model(tmp_path, "m", IS_THERE, config)
    with serving(tmp_path) as server:
        assert "No such file" in server.server.failures()["m version 1"]
        started = tmp_path / "is there"
        assert not (started.exists() and is_alive(int(started.read_text())))


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "0", "many"])
@pytest.mark.parametrize("key", ["start_timeout_secs", "execute_timeout_secs"])
def test_a_time_that_nobody_can_wait_is_refused(tmp_path: Path, key: str, seconds: str) -> None:
    """Formerly every request failed, or the load with a traceback of the server."""
    marking_model(tmp_path, "m", IS_THERE,
                  CONFIG + f' parameters {{ key: "{key}" value {{ string_value: "{seconds}" }} }}')
    with serving(tmp_path) as server:
        assert f"parameter {key}: expected a number of seconds" in server.server.failures()["m version 1"]


def test_what_a_process_asked_of_another_model_is_withdrawn_when_it_ends(tmp_path: Path) -> None:
    marking_model(tmp_path, "counts", UNTIL_CANCELLED, DECOUPLED)
    marking_model(tmp_path, "m", LEAVES_WHAT_IT_ASKED)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException, match="exit status 3"):
            client.infer("m", [tensor(1)])
        assert eventually((tmp_path / "cancelled").exists)


def test_a_model_that_is_unloaded_sends_what_its_senders_have_yet_to_send(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    class Waits(ModelProcess):
        def close(self) -> None:
            waits.set()
            super().close()

    monkeypatch.setattr(python_model_module, "ModelProcess", Waits)
    marking_model(tmp_path, "m", ANSWERS_LATER, DECOUPLED)
    with (serving(tmp_path) as server, ThreadPoolExecutor(2) as pool,
          triton.InferenceServerClient(server.address) as client):
        requested = pool.submit(streamed, client, "m", tensor(1))
        marked(tmp_path / "executes")
        ended = pool.submit(lambda: server.run(server.server.repository.unload("m")))
        assert waits.wait(TIMEOUT_SECS)
        (tmp_path / "go on").touch()
        assert requested.result() == [1]
        ended.result()
    assert marked(tmp_path / "went on") == "False" and (tmp_path / "finalized").exists()


@pytest.mark.parametrize("source", [ANSWERS_LATER, ASKS_LATER])
def test_a_server_that_stops_has_its_models_answer_and_ask_for_what_was_accepted(tmp_path: Path, source: str) -> None:
    """An accepted request of a Python model may still call an ensemble and its models, which must not close before."""
    write_model(tmp_path, "affine")
    write_chain(tmp_path, "affine", max_batch=8, dims="4")
    marking_model(tmp_path, "m", source, DECOUPLED)
    with (serving(tmp_path, exit_timeout_secs=2 * TIMEOUT_SECS) as server, ThreadPoolExecutor(2) as pool,
          triton.InferenceServerClient(server.address) as client):
        requested = pool.submit(streamed, client, "m", tensor(1))
        marked(tmp_path / "executes")
        stopped = pool.submit(server.stop)
        assert eventually(lambda: refused(client, "affine"))
        (tmp_path / "go on").touch()
        assert requested.result() == [1] and stopped.result()
    assert marked(tmp_path / "went on") == "False" and (tmp_path / "finalized").exists()


def refused(client: triton.InferenceServerClient, model: str) -> bool:
    """Return True if the server refuses new requests or new connections."""
    x = triton.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.zeros((1, 4), np.float32))
    try:
        client.infer(model, [x])
    except InferenceServerException as error:
        return "takes no more requests" in str(error) or "failed to connect" in str(error)
    return False


@pytest.mark.parametrize("config", [CONFIG, DECOUPLED])
def test_a_warm_up_that_answers_by_its_sender_is_neither_cancelled_nor_counted(tmp_path: Path, config: str) -> None:
    marking_model(tmp_path, "m", SAYS_WHETHER_CANCELLED, config + WARM_UP)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        assert (tmp_path / "cancelled").read_text() == "False"
        assert streamed(client, "m", tensor(1)) == [0]          # whose outcome comes behind that of the warm-up
        statistics = server.server.repository.find("m").statistics
        assert eventually(lambda: statistics.snapshot().success.count == 1)
        assert not sum(statistics.snapshot().failures.values())


def test_a_process_that_does_not_read_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """The process is stopped by a signal; code that lets no other thread run has the same effect."""
    marking_model(tmp_path, "medium", MEDIUM)
    marking_model(tmp_path, "m", READS_NOTHING)
    with (serving(tmp_path) as server, ThreadPoolExecutor(2) as pool,
          triton.InferenceServerClient(server.address) as client):
        requested = pool.submit(client.infer, "m", [tensor(1)])
        stopped = int(marked(tmp_path / "executes"))
        channel = server.server.repository.find("m")._executors[0]._process._channel
        try:
            assert eventually(lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            channel._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)    # machines differ in it
            (tmp_path / "stopped").touch()
            assert eventually(channel._sending.locked)          # by an answer that finds no room
            says = pool.submit(client.is_model_ready, "m")
            assert client.is_server_live(client_timeout=TIMEOUT_SECS)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert requested.result().as_numpy("y").tolist() == [1] and says.result()
