"""A full disk, refused threads or a changed clock on the server's machine do not affect clients."""
from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import infer_server
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually, infer
from tests.infer_server.serving import serving

KIB = 1 << 10
# What may ask for the time of day, which can be set: it is told to people, and nothing is decided by it.
TOLD = {"observing/access_log.py": 1, "observing/spans.py": 1, "batching/statistics.py": 1}


def test_a_disk_that_takes_no_more_ends_a_load_and_nothing_else(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with subprocess.Popen(
            [sys.executable, "-m", "scripts.testing.numpy_server", "--model-repository", str(tmp_path),
             "--model-control-mode", "explicit", "--load-model", "m", "--drain-grace-secs", "0",
             *(word for port in ("grpc", "http", "metrics") for word in (f"--{port}-port", "0"))],
            stderr=subprocess.PIPE, text=True) as running, ExitStack() as until_ended:
        assert running.stderr is not None
        until_ended.callback(running.kill)
        address = next(match[1] for line in running.stderr if (match := re.search(r"gRPC on (\S+),", line)))
        Thread(target=running.stderr.read, daemon=True).start()     # a pipe that is full would hold the server up
        with triton.InferenceServerClient(address) as client:
            assert eventually(lambda: client.is_model_ready("m"))
            resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (64 * KIB, 64 * KIB))
            for _ in range(2):
                with pytest.raises(InferenceServerException, match="cannot be written: File too large") as caught:
                    client.load_model("new", config="{}", files={"file:1/model.onnx": bytes(65 * KIB)})
                assert caught.value.status() == "StatusCode.UNAVAILABLE", "it is not the client's fault"
                np.testing.assert_array_equal(infer(client), 3 * np.ones((1, 4), np.float32))
        running.terminate()
        assert running.wait(TIMEOUT_SECS) == 0


def test_nothing_is_decided_by_a_clock_that_can_be_set() -> None:
    root = Path(infer_server.__file__).parent
    asks = re.compile(r"\b(?:time\.time(?:_ns)?|datetime\.(?:utc)?now)\(")
    actual = {path.relative_to(root).as_posix(): count for path in root.rglob("*.py")
              if (count := len(asks.findall(path.read_text())))}
    assert actual == TOLD


def test_threads_that_the_system_refuses_end_a_load_and_nothing_else(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused are the threads of the load itself, of the model's first instance, or of its second."""
    started, begin = [0], Thread.start

    def refused(thread: Thread) -> None:
        if started[0] <= 0:
            raise RuntimeError("can't start new thread")
        started[0] -= 1
        begin(thread)

    write_model(tmp_path, "m")
    write_model(tmp_path, "new", config="instance_group { count: 2 }")
    with (serving(tmp_path, explicit_control=True, load_models=("m",)) as running,
          triton.InferenceServerClient(running.address) as client):
        for more in range(4):
            started[0] = more               # a worker reads the model, and another one loads it
            with monkeypatch.context() as patch:
                patch.setattr(Thread, "start", refused)
                with pytest.raises(InferenceServerException, match="no more threads .* serve fewer models"):
                    client.load_model("new")
                np.testing.assert_array_equal(infer(client), 3 * np.ones((1, 4), np.float32))
            assert eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("new/")])
        client.load_model("new")
        np.testing.assert_array_equal(infer(client, "new"), 3 * np.ones((1, 4), np.float32))
