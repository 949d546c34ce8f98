"""Tests of sequences of requests: each has its own state and is executed in order by one instance."""
from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.batching.statistics import Failure
from infer_server.config.config import from_message
from infer_server.errors import ModelConfigError
from infer_server.repository.roots import LocalFolder
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, check, write_model
from tests.infer_server.config.test_config import parsed
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import RunningServer, serving

PATIENT = 3_600_000_000         # microseconds that a sequence may be idle: however busy the machine is
SUM = """max_batch_size: 8 output {{ name: "sum" data_type: TYPE_FP32 dims: 4 }} instance_group {{ count: 2 }}
    sequence_batching {{ {} max_sequence_idle_microseconds: {}
        state {{ input_name: "x2" output_name: "sum" data_type: TYPE_FP32 dims: 4 {} }} }}"""
TOLD = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        assert len({request.correlation_id() for request in requests}) == len(requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("told", np.concatenate([
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().astype(np.float32)
            for name in ("start", "end", "id", "x")], axis=-1))]) for request in requests]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "sum", kind="two", config=SUM.format("direct {}", PATIENT, ""))
    write_model(folder, "few", kind="two", gate="few", config=SUM.format(
        "oldest { max_candidate_sequences: 1 }", 100_000,
        'initial_state { name: "s" data_type: TYPE_FP32 dims: 4 data_file: "ten" }'))
    (folder / "few" / "initial_state").mkdir()
    np.full(4, 10, np.float32).tofile(folder / "few" / "initial_state" / "ten")
    write_model(folder, "reshaped", kind="two", config="""max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [2, 2] reshape { shape: 4 } }
        output { name: "y" data_type: TYPE_FP32 dims: [2, 2] reshape { shape: 4 } }
        sequence_batching { max_sequence_idle_microseconds: 3600000000
          state { input_name: "x2" output_name: "sum" data_type: TYPE_FP32 dims: 4 } }""")
    python_model(folder, "told", TOLD, """backend: "python" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "told" data_type: TYPE_FP32 dims: 4 }
        sequence_batching { max_sequence_idle_microseconds: 3600000000
          control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
          control_input { name: "end" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 5] } }
          control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }""")
    with serving(folder) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def ask(client: triton.InferenceServerClient, model: str, sequence: int | str, value: float, start: bool = False,
        end: bool = False, extent: int = 4) -> list[float]:
    tensor = triton.InferInput("x", [1, extent], "FP32")
    tensor.set_data_from_numpy(np.full((1, extent), value, np.float32))
    result = client.infer(model, [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end)
    actual: list[float] = result.as_numpy("told" if model == "told" else "sum")[0].tolist()
    return actual


def test_each_sequence_has_a_state_of_its_own_from_its_start_to_its_end(client: triton.InferenceServerClient) -> None:
    def sequence(identity: int) -> list[float]:
        return [ask(client, "sum", identity, identity + i, start=i == 0, end=i == 4)[0] for i in range(5)]

    with ThreadPoolExecutor(8) as clients:
        for identity, sums in zip(range(1, 25), clients.map(sequence, range(1, 25)), strict=True):
            assert sums == np.cumsum([identity + i for i in range(5)]).tolist()
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        ask(client, "sum", 7, 1)
    assert ask(client, "sum", "text", 3, start=True) == [3] * 4
    assert ask(client, "sum", "text", 4, start=True) == [4] * 4, "a start begins anew"
    assert [tensor.name for tensor in client.get_model_metadata("sum").inputs] == ["x"]


def test_states_that_no_client_sees_are_kept_beside_tensors_of_another_shape_than_the_models(
        client: triton.InferenceServerClient) -> None:
    tensor = triton.InferInput("x", [1, 2, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2, 2), np.float32))
    for start in (True, False):
        result = client.infer("reshaped", [tensor], sequence_id=1, sequence_start=start)
        assert result.as_numpy("y").tolist() == [[[3, 3], [3, 3]]]
        assert [output.name for output in result.get_response().outputs] == ["y"]


def test_a_request_that_belongs_to_no_sequence_is_refused_and_counted(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    def failures() -> int:
        return server.server.repository.find("sum").statistics.snapshot().failures[Failure.OTHER]

    before = failures()
    with pytest.raises(InferenceServerException, match="must specify a non-zero or non-empty correlation ID"):
        ask(client, "sum", 0, 1, start=True)
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        ask(client, "sum", 1000, 1)
    assert failures() == before + 2


def test_what_finds_no_place_waits_until_a_sequence_ends_or_has_been_idle(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    model = server.server.repository.find("few")
    with ThreadPoolExecutor(3) as clients:
        with GATES["few"].closed():
            requested = [clients.submit(ask, client, "few", number, number, True, number == 1) for number in (1, 2, 3)]
            assert GATES["few"].holds(2)
            assert eventually(lambda: model.pending == 1)
        assert [future.result()[0] for future in requested] == [11, 12, 13]
    assert ask(client, "few", 4, 4, start=True)[0] == 14, "2 and 3 were not ended, but have been idle"


def test_a_model_is_told_of_start_end_and_correlation_id(client: triton.InferenceServerClient) -> None:
    assert ask(client, "told", 9, 7, start=True, extent=1) == [1, 0, 9, 7]
    assert ask(client, "told", 9, 8, extent=1) == [0, 0, 9, 8]
    assert ask(client, "told", 9, 9, end=True, extent=1) == [0, 5, 9, 9]
    with pytest.raises(InferenceServerException, match="data-type is 'BYTES', but model '.*' expects 'UINT64'"):
        ask(client, "told", "text", 7, start=True, extent=1)


@pytest.mark.parametrize("end", [True, False])
def test_sequences_of_one_id_that_are_sent_at_once_follow_each_other(
        client: triton.InferenceServerClient, end: bool) -> None:
    """The model refuses a batch with two requests of one id."""
    answers: queue.Queue[list[float] | Exception] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result.as_numpy("told")[0].tolist()))
    for number in range(12):
        tensor = triton.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), number, np.float32))
        client.async_stream_infer("told", [tensor], sequence_id=11, sequence_start=number % 3 == 0,
                                  sequence_end=end and number % 3 == 2)
    assert [answers.get(timeout=TIMEOUT_SECS) for _ in range(12)] == [
        [number % 3 == 0, 5 * (end and number % 3 == 2), 11, number] for number in range(12)]
    client.stop_stream()


@pytest.mark.parametrize("end", [True, False])
def test_a_model_that_is_unloaded_is_gone_whether_its_sequences_were_ended_or_not(tmp_path: Path, end: bool) -> None:
    def is_gone() -> bool:
        gc.collect()
        return model() is None

    write_model(tmp_path, "sum", kind="two", config=SUM.format("direct {}", PATIENT, ""))
    with (serving(tmp_path, explicit_control=True, load_models=None) as server,
          triton.InferenceServerClient(server.address) as client):
        model = weakref.ref(server.server.repository.find("sum"))
        assert ask(client, "sum", 1, 2, start=True, end=end) == [2] * 4
        client.unload_model("sum")
        assert eventually(is_gone)


@pytest.mark.parametrize(("text", "refusal"), [
    ("control_input { name: 'i' control { kind: CONTROL_SEQUENCE_START } }", "two values of int32_false_true"),
    ("control_input { name: 'i' control { kind: CONTROL_SEQUENCE_CORRID } }", "data_type must be TYPE_UINT64"),
    ("state { input_name: 'i' }", "give input_name, output_name and data_type"),
    ("state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: [4, -2] }", r"dims \[4, -2\] must be"),
    ("state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 initial_state { data_type: TYPE_INT8 } }",
     "the state's data_type"),
    ("iterative_sequence: true", "only a Python model can reschedule requests"),
])
def test_sequence_batching_that_makes_no_sense_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(ModelConfigError, match=refusal):
        from_message(parsed(f"sequence_batching {{ {text} }}"))


def test_the_zeros_of_texts_are_empty_ones() -> None:
    state = """sequence_batching {{ state {{ input_name: 'i' output_name: 'o' data_type: TYPE_STRING dims: 2 {} }} }}"""
    for initial in ("", "initial_state { name: 's' data_type: TYPE_STRING dims: 2 zero_data: true }"):
        config = from_message(parsed(state.format(initial)))
        assert config.sequences and config.sequences.policy.states[0].initial.tolist() == [b"", b""]


def test_iterative_sequences_and_states_are_refused_together() -> None:
    with pytest.raises(ModelConfigError, match=r"keep the state in model\.py"):
        from_message(parsed("""backend: 'python' sequence_batching { iterative_sequence: true
            state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 } }"""))


def test_a_model_with_sequences_is_served_beside_a_warm_up(tmp_path: Path) -> None:
    """Warm-up samples have control tensors, which no request has; the warm-up executes the model on zeros."""
    write_model(tmp_path, "sum", kind="two", config=SUM.format("direct {}", PATIENT, "") + """
        model_warmup { name: "w" batch_size: 8 inputs { key: "START" value { data_type: TYPE_INT32 dims: 1 } } }""")
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        assert not server.server.failures()
        assert ask(client, "sum", 1, 2, start=True, end=True) == [2] * 4
    (output,) = check([LocalFolder(tmp_path)], "cpu")
    assert "model_warmup: kept" in output.text and not output.is_error
