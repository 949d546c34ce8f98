"""Tests of triton_python_backend_utils as a model.py sees it: each of Triton's names, and its behaviour here."""
from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.python_backend import pb_utils
from infer_server.python_backend.pb_config import ModelConfig
from infer_server.repository.kinds.local import request_of
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_async import CONFIG, tensor
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

# Of python_backend of July 2026 (commit f9088ff): src/pb_stub.cc (what is set on the module, and what is defined on
# each class) and src/resources/triton_python_backend_utils.py.
TRITON = """
Tensor name as_numpy triton_dtype to_dlpack from_dlpack is_cpu shape __dlpack__ __dlpack_device__
InferenceRequest inputs request_id correlation_id flags set_flags timeout parameters trace exec async_exec
    requested_output_names get_response_sender is_cancelled set_release_flags
InferenceResponse output_tensors has_error error parameters
InferenceResponseSender send is_cancelled
ResponseIterator __iter__ __next__ cancel
InferenceTrace get_context
TritonError code message UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED
TritonModelException
PreferredMemory
TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU
Logger log log_info log_warn log_error log_verbose LogLevel INFO WARNING ERROR VERBOSE
MetricFamily Metric COUNTER GAUGE HISTOGRAM
Metric increment set observe value
ModelConfig as_dict set_max_batch_size set_dynamic_batching add_input add_output set_model_transaction_policy
load_model
unload_model
is_model_ready
get_model_dir
get_input_tensor_by_name
get_output_tensor_by_name
get_input_config_by_name
get_output_config_by_name
using_decoupled_model_transaction_policy
triton_to_numpy_type
numpy_to_triton_type
triton_string_to_numpy
TRITON_STRING_TO_NUMPY
serialize_byte_tensor
deserialize_bytes_tensor
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
TRITONSERVER_RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
"""
NAMES = [line.split() for line in TRITON.strip().replace("\n    ", " ").splitlines()]
# Counts up until nobody waits any more.
COUNTS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        n = 0
        while not request.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([n], np.float32))]))
            n += 1
            time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CANCELS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        counts = pb_utils.InferenceRequest(model_name="counts", requested_output_names=["y"], inputs=[
            pb_utils.Tensor("x", np.zeros(1, np.float32))]).exec(decoupled=True)
        first = next(counts)
        counts.cancel()
        codes = [response.error().code() for response in counts if response.has_error()]
        once_more = len(list(counts))
        counts.cancel()
        y = [first.output_tensors()[0].as_numpy()[0], *codes, once_more > 1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(y, np.float32))])]
"""
# What is kept of requests whose responses it does not read to the end.
DROPS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        def asked():
            return pb_utils.InferenceRequest(model_name="counts", requested_output_names=["y"], inputs=[
                pb_utils.Tensor("x", np.zeros(1, np.float32))]).exec(decoupled=True)

        begun = asked()
        next(begun)
        begun.cancel()
        asked().cancel()
        del begun
        y = np.array([len(pb_utils.server._calls)], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
"""
READY = HEAD + """
import sys

class TritonPythonModel:
    def initialize(self, args):
        self.says = os.path.join(args["model_repository"], "says")

    ASYNC def is_ready(self):
        said = open(self.says).read()
        return sys.exit() if said == "exit" else {"yes": True, "no": False, "1": 1}[said]

    def execute(self, requests):
        (request,) = requests
        while request.inputs()[0].as_numpy()[0] and not os.path.exists(self.says + ", go on"):
            time.sleep(0.001)
        name = json.loads(request.parameters()).get("of", "says")
        ready = np.array([pb_utils.is_model_ready(name)], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", ready)])]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, "counts", COUNTS, CONFIG + " model_transaction_policy { decoupled: true }")
    python_model(folder, "cancels", CANCELS, CONFIG)
    python_model(folder, "drops", DROPS, CONFIG)
    for name, kind in (("says", ""), ("says_later", "async ")):
        python_model(folder, name, READY.replace("ASYNC ", kind), CONFIG)
        (folder / name / "says").write_text("no")
    with serving(folder) as running:
        yield running


def test_all_names_of_triton_exist_and_are_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "python-backend.md").read_text()
    table = text.partition("Support for the members of `triton_python_backend_utils`")[2].partition("\n\n## ")[0]
    written = {name for quoted in re.findall(r"`([^`]+)`", table) for name in re.findall(r"\w+", quoted)}
    for owner, *members in NAMES:
        held = getattr(pb_utils, owner)
        for member in members:
            assert hasattr(held, member), f"{owner}.{member}"
        assert {owner, *members} <= written, f"{owner}: {sorted({owner, *members} - written)}"


def test_what_a_model_asked_of_a_decoupled_one_is_withdrawn_when_it_cancels(
        client: triton.InferenceServerClient, server: RunningServer) -> None:
    cancelled = pb_utils.TritonError.CANCELLED
    counts = server.server.repository.find("counts")

    def withdrawn() -> int:
        return sum(counts.statistics.snapshot().failures.values())
    for _ in range(2):
        before = withdrawn()
        assert client.infer("cancels", [tensor(0)]).as_numpy("y").tolist() == [0, cancelled, 1]
        assert eventually(lambda before=before: withdrawn() == before + 1)


def test_a_request_that_nobody_waits_for_when_it_is_executed_is_cancelled_for_its_model(server: RunningServer) -> None:
    class Gone:
        gone = True

        def send(self, response: object) -> None: ...

        def fail(self, error: Exception) -> None: ...

    counts = server.server.repository.find("counts")
    failed = sum(counts.statistics.snapshot().failures.values())
    request = request_of(counts, {"x": np.zeros(1, np.float32)}, ["y"], lambda computed: None, Gone())
    server.loop.call_soon_threadsafe(counts.submit, request)
    assert eventually(lambda: sum(counts.statistics.snapshot().failures.values()) == failed + 1)


def test_responses_that_a_model_does_not_read_are_not_kept_for_it(client: triton.InferenceServerClient) -> None:
    assert [client.infer("drops", [tensor(0)]).as_numpy("y").item() for _ in range(2)] == [0, 0]


def test_a_model_whose_is_ready_exits_is_not_ready_and_is_asked_again(
        client: triton.InferenceServerClient, server: RunningServer) -> None:
    for output, ready in (("exit", False), ("yes", True)):
        (server.folder / "says" / "says").write_text(output)
        assert client.is_model_ready("says") == ready


@pytest.mark.parametrize("model", ["says", "says_later"])
def test_a_model_says_whether_it_is_ready_while_it_executes_and_over_every_protocol(
        client: triton.InferenceServerClient, server: RunningServer, model: str) -> None:
    def over_http() -> int:
        try:
            with urlopen(f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/ready") as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    says = server.folder / model / "says"
    for output, ready in (("no", False), ("yes", True), ("nonsense", False), ("1", False), ("yes", True)):
        says.write_text(output)
        assert client.is_model_ready(model) == ready and (over_http() == 200) == ready
        assert client.infer(model, [tensor(0)], parameters={"of": model}).as_numpy("y").item() == ready
    with ThreadPoolExecutor(9) as pool:
        executing = pool.submit(client.infer, model, [tensor(1)], parameters={"of": model})
        assert eventually(lambda: server.server.repository.find(model)._executors[0]._process._executing)
        assert all(pool.map(client.is_model_ready, [model] * 8)) and not executing.done()
        (server.folder / model / "says, go on").touch()
        executing.result(TIMEOUT_SECS)


def test_tensors_pass_over_dlpack_as_objects_and_as_capsules() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    first = pb_utils.Tensor("x", array)
    for given in (array, first, first.to_dlpack()):
        actual = pb_utils.Tensor.from_dlpack("y", given)
        assert actual.name() == "y" and actual.shape() == [2, 3]
        assert np.shares_memory(actual.as_numpy(), array)
    with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
        pb_utils.Tensor.from_dlpack("y", array.T)
    with pytest.raises(pb_utils.TritonModelException, match="empty string"):
        pb_utils.Tensor("", array)


def test_parameters_of_what_a_model_asks_are_checked_as_those_of_its_responses() -> None:
    for kind in (pb_utils.InferenceRequest, pb_utils.InferenceResponse):
        with pytest.raises(pb_utils.TritonModelException, match="bool/int/str"):
            kind(parameters={"a": 0.5})


def test_a_model_completes_what_its_configuration_leaves_open_and_contradicts_nothing() -> None:
    config = ModelConfig({"max_batch_size": 4, "input": [{"name": "x", "dims": []}]})
    x = {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}
    config.add_input(x)
    config.add_input({**x, "optional": True})
    config.add_output({**x, "name": "y"})
    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    assert config.as_dict() == {
        "max_batch_size": 8, "input": [{**x, "optional": True}], "output": [{**x, "name": "y"}],
        "dynamic_batching": {}, "model_transaction_policy": {"decoupled": True}}
    for refused, output in (
            (lambda: config.add_input({**x, "dims": [4]}), r"input 'x': dims: config.pbtxt says \[3\]"),
            (lambda: config.add_input({**x, "data_type": "TYPE_FP16"}), "data_type: config.pbtxt says TYPE_FP32"),
            (lambda: config.add_output({"name": "z", "dims": [1]}), "has no data_type"),
            (lambda: config.add_output({**x, "optional": True}), "has 'optional'; expected name"),
            (lambda: config.set_max_batch_size(2), "says 8, but auto_complete_config 2"),
            (lambda: config.set_model_transaction_policy({"decoupled": False}), "decoupled: config.pbtxt says True"),
            (lambda: ModelConfig({"sequence_batching": {}}).set_dynamic_batching(), "sequence_batching")):
        with pytest.raises(ValueError, match=output):
            refused()
