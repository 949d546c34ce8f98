"""Tests of Python models, alone and around an engine, through Triton's client."""
from __future__ import annotations

import os
import queue
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving

HEAD = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils
"""
PREPROCESS = HEAD + """
class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "x")
        self.shape, self.dtype = [-1, *output["dims"]], pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            rows = np.array([[float(word) for word in text.decode().split()] for text in texts[:, 0]], self.dtype)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("x", rows.reshape(self.shape))]))
        return responses
"""
POSTPROCESS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            y = pb_utils.get_input_tensor_by_name(request, "y").as_numpy()
            label = np.array([[f"class {row.argmax()}".encode()] for row in y], np.object_)
            answers.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("label", label)]))
        return answers
"""
ROWS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0]):
                row = pb_utils.Tensor("row", np.full((1, 4), i, np.float32))
                sender.send(pb_utils.InferenceResponse([row]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
MISC = HEAD + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "what", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1], "optional": True})
        config.add_output({"name": "out", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "lengths", "data_type": "TYPE_INT8", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        what = pb_utils.get_input_tensor_by_name(request, "what").as_numpy()[0].decode()
        x = pb_utils.get_input_tensor_by_name(request, "x")
        x = np.zeros(1, np.float32) if x is None else x.as_numpy()
        if what == "die":
            os.kill(os.getpid(), 9)
        if what == "raise":
            raise ValueError("a bug in the model")
        if what.startswith("refuse "):
            code = getattr(pb_utils.TritonError, what.split()[1])
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("not like this", code))
        if what == "no text":
            return pb_utils.InferenceResponse([pb_utils.Tensor("out", np.array([chr(0xdc80)], np.object_))])
        if what == "measure":
            Family = pb_utils.MetricFamily
            rows = Family("rows_seen", "Rows that were seen", Family.COUNTER).Metric({"model": 'm "1"'})
            rows.increment(2)
            rows.increment(len(x))
            load = Family(name="load", description="", kind=Family.GAUGE).Metric(labels=None)
            load.set(0.5)
            load.increment(-0.25)
            times = Family("seconds", "Seconds", Family.HISTOGRAM).Metric(buckets=[0.5, 2])
            for seconds in (0.5, 1, 3):
                times.observe(seconds)
            ready = [pb_utils.is_model_ready("affine"), pb_utils.is_model_ready("affine", "7")]
            return pb_utils.InferenceResponse([pb_utils.Tensor(
                "out", np.array([rows.value(), load.value(), *ready], np.float32))])
        if what == "measure badly":
            pb_utils.MetricFamily("nv_mine", "", pb_utils.MetricFamily.GAUGE).Metric()
        if what == "ask oddly":
            Family = pb_utils.MetricFamily
            self.refused(lambda: Family(5, "", "counter").Metric())
            self.refused(lambda: Family("odd", None, "counter").Metric())
            self.refused(lambda: Family("odd", "", "histogram").Metric(buckets=["x", 1.0]))
            self.refused(lambda: Family("odd", "", "histogram").Metric(buckets=np.array([False, True])))
            self.refused(lambda: pb_utils.is_model_ready(["affine"]))
            Family("steps", "", "histogram").Metric(buckets=np.arange(1, 3))
            return pb_utils.InferenceResponse([pb_utils.Tensor("out", np.array([
                pb_utils.is_model_ready("affine", 1), pb_utils.is_model_ready("affine", None)], np.float32))])
        if what == "babble":
            pb_utils.server.notify("response")
            time.sleep(1000)
        if what == "ask nobody":
            response = pb_utils.InferenceRequest(
                model_name="nobody", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)]).exec()
            return pb_utils.InferenceResponse(error=response.error())
        if what == "call":
            inner = pb_utils.InferenceRequest(model_name="affine", requested_output_names=["y"],
                                              inputs=[pb_utils.Tensor("x", x.reshape(1, 4))])
            response = inner.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            y = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("out", y.reshape(-1))])
        if what.startswith("as "):
            x = x.astype(what.split()[1])
        if what == "too large":
            x = np.array([1e39, np.inf])
        if what.startswith("long "):
            return pb_utils.InferenceResponse([pb_utils.Tensor("lengths", np.array([int(what.split()[1])]))])
        if what == "texts":
            texts = pb_utils.serialize_byte_tensor(np.array([b"one", b"", b"three"], np.object_))
            pb_utils.Logger.log(message="texts", level=pb_utils.Logger.INFO)
            x = np.array([len(text) for text in pb_utils.deserialize_bytes_tensor(texts)])
            return pb_utils.InferenceResponse([pb_utils.Tensor("lengths", x)])
        return pb_utils.InferenceResponse([pb_utils.Tensor("out", x)])

    def refused(self, ask):
        try:
            ask()
        except pb_utils.TritonModelException:
            return
        raise AssertionError("what makes no sense was answered")
"""

HANGS = HEAD + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def initialize(self, args):
        open(os.path.join(args["model_repository"], f"{os.getpid()}.pid"), "w").close()

    def execute(self, requests):
        time.sleep(1000)
"""


def python_model(folder: Path, name: str, source: str, config: str = "") -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(textwrap.dedent(source))
    (folder / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    python_model(folder, "before", PREPROCESS, """
        backend: "python" max_batch_size: 8  instance_group { kind: KIND_GPU }
        input { name: "text" data_type: TYPE_STRING dims: 1 } output { name: "x" data_type: TYPE_FP32 dims: 4 }""")
    python_model(folder, "after", POSTPROCESS, """
        backend: "python" max_batch_size: 8
        input { name: "y" data_type: TYPE_FP32 dims: 4 } output { name: "label" data_type: TYPE_STRING dims: 1 }""")
    python_model(folder, "misc", MISC)
    python_model(folder, "hangs", HANGS, 'parameters { key: "execute_timeout_secs" value { string_value: "0.2" } }')
    (folder / "classify").mkdir()
    (folder / "classify" / "config.pbtxt").write_text("""
        platform: "ensemble" max_batch_size: 8
        input { name: "sentence" data_type: TYPE_STRING dims: 1 }
        output { name: "class" data_type: TYPE_STRING dims: 1 } output { name: "scores" data_type: TYPE_FP32 dims: 4 }
        ensemble_scheduling {
          step { model_name: "after" model_version: -1 input_map { key: "y" value: "scores" }
                 output_map { key: "label" value: "class" } }
          step { model_name: "before" model_version: -1 input_map { key: "text" value: "sentence" }
                 output_map { key: "x" value: "numbers" } }
          step { model_name: "affine" model_version: -1 input_map { key: "x" value: "numbers" }
                 output_map { key: "y" value: "scores" } }
        }""")
    python_model(folder, "rows", ROWS, """backend: "python" model_transaction_policy { decoupled: true }
        input { name: "count" data_type: TYPE_INT32 dims: 1 }
        output { name: "row" data_type: TYPE_FP32 dims: [1, 4] }""")
    (folder / "stream").mkdir()
    (folder / "stream" / "config.pbtxt").write_text("""
        platform: "ensemble" input { name: "count" data_type: TYPE_INT32 dims: 1 }
        output { name: "y" data_type: TYPE_FP32 dims: [1, 4] }
        ensemble_scheduling {
          step { model_name: "rows" input_map { key: "count" value: "count" } output_map { key: "row" value: "row" } }
          step { model_name: "affine" input_map { key: "x" value: "row" } output_map { key: "y" value: "y" } }
        }""")
    with serving(folder) as running:
        yield running


def tensor(name: str, array: NDArray[np.generic]) -> triton.InferInput:
    kinds = {"f": "FP32", "i": "INT32", "O": "BYTES"}
    created = triton.InferInput(name, list(array.shape), kinds[array.dtype.kind])
    created.set_data_from_numpy(array)
    return created


def misc(client: triton.InferenceServerClient, what: str, x: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    inputs = [tensor("what", np.array([what.encode()], np.object_))] + ([] if x is None else [tensor("x", x)])
    out: NDArray[np.float32] = client.infer("misc", inputs).as_numpy("out")
    return out


def inferences(client: triton.InferenceServerClient) -> dict[str, int]:
    """Return the number of items that each model has executed."""
    return {model.name: model.inference_count for model in client.get_inference_statistics().model_stats}


def test_an_ensemble_of_python_steps_around_an_engine_gives_labels_for_text(
        client: triton.InferenceServerClient) -> None:
    before, sentence = inferences(client), np.array([[b"1 2 9 4"], [b"7 0 0 1"]], np.object_)
    result = client.infer("classify", [tensor("sentence", sentence)])
    assert result.as_numpy("class").tolist() == [[b"class 2"], [b"class 0"]]
    np.testing.assert_array_equal(result.as_numpy("scores"), [[3, 5, 19, 9], [15, 1, 1, 3]])
    assert client.get_model_metadata("classify").platform == "ensemble"
    assert client.get_model_config("before").config.backend == "python"
    assert {name: count - before[name] for name, count in inferences(client).items() if count != before[name]} == {
        "classify": 2, "before": 2, "after": 2, "affine": 2}


def test_an_error_of_a_step_names_the_step(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"step 1 \('before'\): .*could not convert string to float"):
        client.infer("classify", [tensor("sentence", np.array([[b"no numbers"]], np.object_))])


def test_each_response_of_a_decoupled_step_goes_on_through_the_ensemble_in_order(
        client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for count in (20, 0):
        client.async_stream_infer("stream", [tensor("count", np.array([count], np.int32))], request_id=str(count),
                                  enable_empty_final_response=True)
    actual = [answers.get(timeout=TIMEOUT_SECS) for _ in range(22)]
    client.stop_stream()
    assert not any(error for _, error in actual)
    results = [result for result, _ in actual if result is not None and result.as_numpy("y") is not None]
    assert [result.as_numpy("y")[0, 0] for result in results] == [2 * i + 1 for i in range(20)]
    with pytest.raises(InferenceServerException, match="decoupled transaction policy: model 'stream'"):
        client.infer("stream", [tensor("count", np.array([1], np.int32))])


def test_a_model_completes_its_configuration_and_may_be_sent_large_tensors_or_none(
        client: triton.InferenceServerClient) -> None:
    assert client.get_model_config("misc").config.input[1].optional
    x = np.arange(100_000, dtype=np.float32)
    np.testing.assert_array_equal(misc(client, "echo", x), x)
    assert misc(client, "echo").tolist() == [0]


def test_what_numpy_makes_of_more_bits_is_answered_as_it_was_declared(client: triton.InferenceServerClient) -> None:
    actual = misc(client, "as float64", np.array([0.1, 2], np.float32))
    assert actual.dtype == np.float32 and actual.tolist() == [np.float32(0.1), 2]
    assert misc(client, "as float64", np.array([np.inf, 2], np.float32)).tolist() == [np.inf, 2]
    for what, lengths in (("long -128", [-128]), ("texts", [3, 0, 5])):
        result = client.infer("misc", [tensor("what", np.array([what.encode()], np.object_))])
        assert result.as_numpy("lengths").dtype == np.int8 and result.as_numpy("lengths").tolist() == lengths


def test_a_model_asks_another_one(client: triton.InferenceServerClient) -> None:
    assert misc(client, "call", np.arange(4, dtype=np.float32)).tolist() == [1, 3, 5, 7]
    with pytest.raises(InferenceServerException, match="cannot reshape"):
        misc(client, "call", np.arange(3, dtype=np.float32))


@pytest.mark.parametrize(("what", "status", "said"), [
    ("raise", "INTERNAL", "ValueError: a bug in the model"),
    ("refuse INVALID_ARG", "INVALID_ARGUMENT", "not like this"),
    ("refuse UNKNOWN", "UNKNOWN", "not like this"),
    ("refuse ALREADY_EXISTS", "ALREADY_EXISTS", "not like this"),
    ("refuse CANCELLED", "CANCELLED", "not like this"),
    ("ask nobody", "NOT_FOUND", "nobody"),
    ("measure badly", "INTERNAL", "'nv_mine' .* is not a valid metric name"),
    ("as int32", "INTERNAL", "output 'out' is of int32, but its configuration says FP32"),
    ("long 128", "INTERNAL", "output 'lengths' is of int64, and has numbers that are too large for INT8"),
    ("too large", "INTERNAL", "output 'out' is of float64, and has numbers that are too large for FP32"),
    ("no text", "INTERNAL", "of model 'misc_0_0' cannot be sent, message: .* surrogates not allowed"),
    ("babble", "INTERNAL", "misc_0_0: its process ended in execute: killed by SIGKILL; it is restarted"),
    ("die", "INTERNAL", "misc_0_0: its process ended in execute: killed by SIGKILL; it is restarted"),
])
def test_a_model_that_fails_says_why_and_serves_on(
        client: triton.InferenceServerClient, what: str, status: str, said: str) -> None:
    with pytest.raises(InferenceServerException, match=said) as caught:
        misc(client, what)
    assert caught.value.status() == f"StatusCode.{status}"
    assert misc(client, "echo", np.ones(2, np.float32)).tolist() == [1, 1]


def test_a_model_has_metrics_of_its_own_and_asks_which_models_are_ready(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert misc(client, "measure", np.ones(3, np.float32)).tolist() == [5, 0.25, 1, 0]
    with urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    for line in ("# HELP rows_seen Rows that were seen", "# TYPE rows_seen counter", r'rows_seen{model="m \"1\""} 5.0',
                 "load 0.25", "# TYPE seconds histogram", 'seconds_bucket{le="0.5"} 1', 'seconds_bucket{le="2"} 2',
                 'seconds_bucket{le="+Inf"} 3', "seconds_sum 4.5", "seconds_count 3"):
        assert line in lines


def test_a_model_that_asks_with_arguments_of_wrong_types_is_answered(client: triton.InferenceServerClient) -> None:
    assert misc(client, "ask oddly").tolist() == [1, 0]


def test_a_model_that_hangs_is_killed_and_started_again(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    for _ in range(2):
        with pytest.raises(InferenceServerException, match=r"hangs_0_0: execute took more than 0\.2 s, and its process "
                                                           "was killed; it is restarted"):
            client.infer("hangs", [tensor("x", np.ones(1, np.float32))])
    assert len(list((server.folder / "hangs").glob("*.pid"))) == 2


def test_executions_that_sent_their_responses_one_by_one_are_counted(
        client: triton.InferenceServerClient, caplog: pytest.LogCaptureFixture) -> None:
    def counted() -> list[int]:
        (model,) = client.get_inference_statistics("rows").model_stats
        each = model.inference_stats
        return [model.inference_count, *(phase.count for phase in (
            each.success, each.queue, each.compute_input, each.compute_infer, each.compute_output))]

    before = counted()
    answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("rows", [tensor("count", np.array([0], np.int32))], enable_empty_final_response=True)
    assert answers.get(timeout=TIMEOUT_SECS)[1] is None
    client.stop_stream()
    assert eventually(lambda: counted() == [count + 1 for count in before])
    assert "Traceback" not in caplog.text


def test_a_model_that_cannot_be_initialised_says_why(tmp_path: Path) -> None:
    python_model(tmp_path, "broken", "import no_such_module", 'backend: "python"')
    python_model(tmp_path, "empty", "x = 1", 'backend: "python"')
    with serving(tmp_path) as running:
        failures = running.server.failures()
    assert "No module named 'no_such_module'" in failures["broken version 1"]
    assert "has no class TritonPythonModel" in failures["empty version 1"]


def test_what_lies_beside_a_model_is_imported_by_its_name_or_relative_to_the_version(tmp_path: Path) -> None:
    python_model(tmp_path, "m", HEAD + """
from .part.of_it import NAME
from whole import NAME as AGAIN
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([f"{NAME} {AGAIN} {__name__}"], object))])]
""", """backend: "python"
        input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_STRING dims: 1 }""")
    (tmp_path / "m" / "1" / "part").mkdir()
    (tmp_path / "m" / "1" / "part" / "of_it.py").write_text("from ..whole import NAME")
    (tmp_path / "m" / "1" / "whole.py").write_text("NAME = 'whole'")
    with serving(tmp_path) as running, triton.InferenceServerClient(running.address) as connected:
        result = connected.infer("m", [tensor("x", np.ones(4, np.float32))])
    assert result.as_numpy("y").tolist() == [b"whole whole 1.model"]


def test_processes_end_with_their_model(tmp_path: Path) -> None:
    python_model(tmp_path, "m", HEAD + """
class TritonPythonModel:
    def initialize(self, args):
        self.folder = os.path.dirname(args["model_repository"])
        open(f"{self.folder}/{os.getpid()}.pid", "w").close()
    def execute(self, requests):
        return []
    def finalize(self):
        open(f"{self.folder}/finalized", "w").close()
""", """backend: "python"
        input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }""")
    with serving(tmp_path):
        (pid,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
        os.kill(pid, 0)
    assert (tmp_path / "finalized").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
