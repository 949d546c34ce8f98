"""Tests of ensembles whose steps differ in their batch axis or labels."""
from __future__ import annotations

import queue
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.repository.roots import LocalFolder
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, check, write_model
from tests.infer_server.endpoints.test_serving import eventually, scrape
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import serving

DECOUPLED = "model_transaction_policy { decoupled: true }"
COUNTING = HEAD + """
class TritonPythonModel:
    def initialize(self, args):
        self.count, self.is_decoupled = 0, pb_utils.using_decoupled_model_transaction_policy(
            json.loads(args["model_config"]))

    def execute(self, requests):
        return self.send(requests) if self.is_decoupled else [self.next() for _ in requests]

    def send(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(3):
                sender.send(self.next())
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def next(self):
        self.count += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 4), self.count, np.float32))])
"""


def write_chain(repository: Path, *models: str, max_batch: int, dims: str, reshape: str = "") -> str:
    """Write an ensemble of models in sequence, from x to y, and return its name."""
    tensors = ("x", *(f"t{number}" for number in range(1, len(models))), "y")
    steps = " ".join(f'step {{ model_name: "{model}" input_map {{ key: "x" value: "{before}" }} '
                     f'output_map {{ key: "y" value: "{behind}" }} }}'
                     for model, before, behind in zip(models, tensors, tensors[1:], strict=False))
    name = "_".join((*models, str(max_batch)))
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: {max_batch} ensemble_scheduling {{ {steps} }} '
        f'input {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] {reshape} }} '
        f'output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] {reshape} }}')
    return name


def asked(client: triton.InferenceServerClient, model: str, shape: list[int], classes: int = 0) -> np.ndarray:
    tensor = triton.InferInput("x", shape, "FP32")
    tensor.set_data_from_numpy(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    answer = client.infer(model, [tensor], outputs=[triton.InferRequestedOutput("y", class_count=classes)])
    return answer.as_numpy("y")


def make_cached(repository: Path, name: str) -> None:
    config = repository / name / "config.pbtxt"
    config.write_text(config.read_text() + "response_cache { enable: true }")


def counting(repository: Path, config: str = "") -> None:
    """Write the model "own", from x to y, which counts its responses; the decoupled variant sends three per request."""
    tensors = " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}'
                       for kind, name in (("input", "x"), ("output", "y")))
    shutil.rmtree(repository / "own", ignore_errors=True)
    python_model(repository, "own", COUNTING, f"max_batch_size: 8 {tensors} {config}")


def streamed(client: triton.InferenceServerClient, model: str, meanwhile: Callable[[], None] = lambda: None
             ) -> list[float]:
    """Return the first elements of all responses to a request of a stream."""
    answers = queue.SimpleQueue[Any]()
    client.start_stream(lambda result, error: answers.put((result, error)))
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
    client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
    meanwhile()
    actual, final = [], False
    while not final:
        result, error = answers.get(timeout=TIMEOUT_SECS)
        if error:
            raise error
        final = result.get_response().parameters["triton_final_response"].bool_param
        if (array := result.as_numpy("y")) is not None:
            actual.append(float(array.flat[0]))
    client.stop_stream()
    return actual


def test_steps_with_a_batch_axis_and_without_follow_each_other(tmp_path: Path) -> None:
    write_model(tmp_path, "items", shape=[4], max_batch=8)
    write_model(tmp_path, "whole", shape=[4], max_batch=0)
    write_model(tmp_path, "pair", shape=[2, 4], max_batch=0)
    of_one = [write_chain(tmp_path, *models, max_batch=0, dims="4")
              for models in (("items",), ("items", "whole"), ("whole", "items"))]
    of_items = write_chain(tmp_path, "items", "whole", "items", max_batch=8, dims="4")
    of_pairs = write_chain(tmp_path, "items", "pair", max_batch=8, dims="4")
    with serving(tmp_path) as server, triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        for name in of_one:
            expected = np.arange(4, dtype=np.float32)
            for _ in name.split("_")[:-1]:
                expected = 2 * expected + 1
            np.testing.assert_array_equal(asked(client, name, [4]), expected)
        np.testing.assert_array_equal(asked(client, of_items, [1, 4]), 8 * np.arange(4, dtype=np.float32)[None] + 7)
        with pytest.raises(InferenceServerException, match=r"step 1 \('whole'\): unexpected shape .* got \[2,4\]"):
            asked(client, of_items, [2, 4])                     # two items are not the whole of one
        np.testing.assert_array_equal(asked(client, of_pairs, [2, 4]),
                                      4 * np.arange(8, dtype=np.float32).reshape(2, 4) + 3)


def test_classes_of_an_ensemble_have_the_labels_of_the_step_unless_it_has_its_own(tmp_path: Path) -> None:
    config = 'output { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "l.txt" }'
    (write_model(tmp_path, "items", shape=[4], config=config) / "l.txt").write_text("a\nb\nc\nd\n")
    inherited, own = (write_chain(tmp_path, "items", max_batch=most, dims="4") for most in (8, 4))
    settings = tmp_path / own / "config.pbtxt"
    settings.write_text(settings.read_text().removesuffix("}")
                        + 'label_filename: "own.txt" }')
    (tmp_path / own / "own.txt").write_text("e\nf\ng\nh\n")
    with serving(tmp_path) as server, triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        assert asked(client, inherited, [1, 4], classes=1).tolist() == [[b"7.000000:3:d"]]
        assert asked(client, own, [1, 4], classes=1).tolist() == [[b"7.000000:3:h"]]


FORK = """platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 } output { name: "z" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
step { model_name: "last" input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
step { model_name: "first" input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
step { model_name: "other" input_map { key: "x" value: "x" } output_map { key: "y" value: "z" } } }"""


def test_only_the_steps_are_executed_that_the_outputs_asked_for_need(tmp_path: Path) -> None:
    for name in ("first", "last", "other"):
        write_model(tmp_path, name, shape=[4], max_batch=0)
    (tmp_path / "fork" / "1").mkdir(parents=True)
    (tmp_path / "fork" / "config.pbtxt").write_text(FORK)
    with serving(tmp_path) as server, triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        def executions() -> dict[str, int]:
            return {each.name: each.execution_count for each in client.get_inference_statistics().model_stats}

        asked(client, "fork", [4])
        assert executions() == {"fork": 1, "first": 1, "last": 1, "other": 0}
        tensor = triton.InferInput("x", [4], "FP32")
        tensor.set_data_from_numpy(np.zeros(4, np.float32))
        client.infer("fork", [tensor])
        assert executions() == {"fork": 2, "first": 2, "last": 2, "other": 1}


def test_an_ensemble_is_ready_while_its_steps_are(tmp_path: Path) -> None:
    write_model(tmp_path, "items", shape=[4])
    name = write_chain(tmp_path, "items", max_batch=8, dims="4")
    with (serving(tmp_path, explicit_control=True, load_models=[name]) as server,
          triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client):
        assert client.is_model_ready(name)
        client.unload_model("items")
        assert not client.is_model_ready(name)
        client.load_model("items")
        assert client.is_model_ready(name)


ADAPTERS = [("INT32", "4", 8, 8,
             r"'t1' is FP32 \[-1, 4\] for model 'items' of step 0, but INT32 \[-1, 4\] for model 'next' of step 1"),
            ("FP32", "5", 8, 8, r"'t1' is FP32 \[-1, 4\] .* but FP32 \[-1, 5\] for"),
            ("FP32", "-1, 4", 8, 8, r"'t1' is FP32 \[-1, 4\] .* but FP32 \[-1, -1, 4\] for"),
            ("FP32", "4, 4, 4", 0, 8, r"'t1' is FP32 \[-1, 4\] .* but FP32 \[4, 4, 4\] for"),
            ("FP32", "4", 4, 8, "max_batch_size: the ensemble allows 8, but model 'next' of step 1 only 4; write "
                                "max_batch_size: 4"),
            ("FP32", "-1", 8, 8, ""), ("FP32", "-1", 4, 4, ""), ("FP32", "-1, -1", 0, 8, "")]


@pytest.mark.parametrize(("datatype", "dims", "batch", "most", "why"), ADAPTERS)
def test_models_that_differ_about_a_tensor_are_refused_as_an_ensemble(
        tmp_path: Path, datatype: str, dims: str, batch: int, most: int, why: str) -> None:
    tensor = 'data_type: TYPE_FP32 dims: 4'
    write_model(tmp_path, "items", shape=[4], max_batch=8, config=(
        f'max_batch_size: 8 input {{ name: "x" {tensor} }} output {{ name: "y" {tensor} }}'))
    (tmp_path / "next" / "1").mkdir(parents=True)
    (tmp_path / "next" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests): ...")
    (tmp_path / "next" / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: {batch} input {{ name: "x" data_type: TYPE_{datatype} dims: [ {dims} ] }} '
        f'output {{ name: "y" {tensor} }}')
    name = write_chain(tmp_path, "items", "next", max_batch=most, dims="4")
    output = [remark for remark in check([LocalFolder(tmp_path)], "cpu") if remark.model == name]
    with serving(tmp_path) as server:
        failures = server.server.failures()
    assert failures.keys() == {f"{name} version 1"} if why else not failures
    assert [remark.is_error for remark in output] == [bool(why)]
    for each in (*failures.values(), *(remark.text for remark in output if remark.is_error)):
        assert re.search(why, each)


def test_a_reshape_of_an_ensemble_is_what_its_steps_have(tmp_path: Path) -> None:
    write_model(tmp_path, "items", shape=[4], max_batch=8)
    name = write_chain(tmp_path, "items", max_batch=8, dims="2, 2", reshape="reshape { shape: 4 }")
    assert not [remark for remark in check([LocalFolder(tmp_path)], "cpu") if remark.is_error]
    with serving(tmp_path) as server, triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        np.testing.assert_array_equal(asked(client, name, [3, 2, 2]),
                                      2 * np.arange(12, dtype=np.float32).reshape(3, 2, 2) + 1)


def test_an_ensemble_has_the_versions_of_its_folders_that_its_policy_chooses(tmp_path: Path) -> None:
    write_model(tmp_path, "items", shape=[4])
    first, chosen = (write_chain(tmp_path, "items", max_batch=most, dims="4") for most in (8, 4))
    (tmp_path / first / "1").rmdir()
    for version in ("2", "3"):
        (tmp_path / chosen / version).mkdir()
    with (tmp_path / chosen / "config.pbtxt").open("a") as settings:
        settings.write(" version_policy { specific { versions: [ 1, 3, 4 ] } }")
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        assert client.get_model_metadata(first).versions == ["1"], "Triton wants a folder; this server needs none"
        assert sorted(client.get_model_metadata(chosen).versions) == ["1", "3"]
        np.testing.assert_array_equal(asked(client, chosen, [1, 4]), 2 * np.arange(4, dtype=np.float32)[None] + 1)
        counted = client.get_inference_statistics(chosen).model_stats
    assert [(output.version, output.inference_count) for output in counted] == [("1", 0), ("3", 1)]


def test_requests_of_an_ensemble_wait_at_the_models_of_its_steps(tmp_path: Path) -> None:
    write_model(tmp_path, "items", shape=[4], config="max_batch_size: 1", max_batch=1, gate="below")
    name = write_chain(tmp_path, "items", max_batch=1, dims="4")
    with (serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(2) as clients):
        ensemble, items = (server.server.repository.find(model) for model in (name, "items"))
        with GATES["below"].closed():
            asking = [clients.submit(asked, client, name, [1, 4]) for _ in range(2)]
            assert GATES["below"].holds(1) and eventually(lambda: items.pending == 1)
            assert ensemble.pending == 0 and ensemble.is_busy
        for each in asking:
            each.result()
        assert not ensemble.is_busy


def test_the_model_of_a_step_has_the_reason_of_a_failure_and_the_ensemble_another(tmp_path: Path) -> None:
    write_model(tmp_path, "items", kind="fails_on_negative", shape=[4])
    name = write_chain(tmp_path, "items", max_batch=8, dims="4")
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.full((1, 4), -1, np.float32))
        with pytest.raises(InferenceServerException, match="a negative value"):
            client.infer(name, [tensor])
        output = scrape(server)
    for model, reason in (("items", "BACKEND"), (name, "OTHER")):
        assert f'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}} 1' in output


def test_responses_of_an_ensemble_are_cached_until_a_model_of_its_steps_is_another(tmp_path: Path) -> None:
    write_model(tmp_path, "items", shape=[4])
    name = write_chain(tmp_path, "items", max_batch=8, dims="4")
    make_cached(tmp_path, name)
    with (serving(tmp_path, explicit_control=True, load_models=(name,)) as server,
          triton.InferenceServerClient(server.address) as client):
        def counts() -> tuple[int, ...]:
            stats = client.get_inference_statistics(name).model_stats[0].inference_stats
            return stats.success.count, stats.cache_hit.count, stats.cache_miss.count, (
                client.get_inference_statistics("items").model_stats[0].execution_count)

        for _ in range(3):
            np.testing.assert_array_equal(asked(client, name, [1, 4]), [[1, 3, 5, 7]])
        assert counts() == (3, 2, 1, 1)
        write_model(tmp_path, "items", shape=[4], kind="echo")
        client.load_model("items")
        np.testing.assert_array_equal(asked(client, name, [1, 4]), [[0, 1, 2, 3]])
        assert counts() == (4, 2, 2, 1)
        client.unload_model("items")
        with pytest.raises(InferenceServerException, match="step 0 .*: .*'items' has no available versions"):
            asked(client, name, [1, 4])


@pytest.mark.parametrize(("config", "said"), [
    (DECOUPLED, "a decoupled model's responses are not cached"),
    ("sequence_batching {}", "a sequence's responses are not cached")])
@pytest.mark.parametrize("within", [False, True], ids=["a step", "a step of a step"])
def test_responses_that_follow_from_more_than_the_request_are_not_cached_for_an_ensemble(
        tmp_path: Path, config: str, said: str, within: bool) -> None:
    counting(tmp_path, config)
    name = write_chain(tmp_path, "own", max_batch=8, dims="4")
    if within:
        name = write_chain(tmp_path, name, max_batch=8, dims="4")
    make_cached(tmp_path, name)
    with serving(tmp_path) as server:
        assert said in server.server.failures()[f"{name} version 1"]


@pytest.mark.parametrize("within", [False, True], ids=["a step", "a step of a step"])
def test_responses_of_an_ensemble_are_cached_no_more_when_a_model_of_its_steps_has_others(
        tmp_path: Path, within: bool) -> None:
    counting(tmp_path)
    name = write_chain(tmp_path, "own", max_batch=8, dims="4")
    if within:
        name = write_chain(tmp_path, name, max_batch=8, dims="4")
    make_cached(tmp_path, name)
    with (serving(tmp_path, explicit_control=True, load_models=(name,)) as server,
          triton.InferenceServerClient(server.address) as client):
        assert [streamed(client, name) for _ in range(2)] == [[1], [1]]
        counting(tmp_path, DECOUPLED)
        client.load_model("own")
        assert [streamed(client, name) for _ in range(2)] == [[1, 2, 3], [4, 5, 6]]
        counting(tmp_path, "sequence_batching {}")
        client.load_model("own")
        for number in (1, 2):
            tensor = triton.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
            answer = client.infer(name, [tensor], sequence_id=number, sequence_start=True)
            np.testing.assert_array_equal(answer.as_numpy("y"), [[number] * 4])


@pytest.mark.parametrize("becomes", [DECOUPLED, ""], ids=["decoupled", "one of single responses"])
def test_a_request_ends_when_an_ensemble_within_an_ensemble_becomes_another_meanwhile(
        tmp_path: Path, becomes: str) -> None:
    write_model(tmp_path, "held", shape=[4], gate="before")
    counting(tmp_path, "" if becomes else DECOUPLED)
    name = write_chain(tmp_path, write_chain(tmp_path, "held", "own", max_batch=8, dims="4"), max_batch=8, dims="4")
    with (serving(tmp_path, explicit_control=True, load_models=(name,)) as server,
          triton.InferenceServerClient(server.address) as client):
        def become_another() -> None:
            assert GATES["before"].holds(1)
            counting(tmp_path, becomes)
            client.load_model("own")
            closed.close()

        with ExitStack() as closed, pytest.raises(InferenceServerException, match="became decoupled meanwhile") if (
                becomes) else nullcontext():
            closed.enter_context(GATES["before"].closed())
            assert streamed(client, name, become_another) == [1]


@pytest.mark.parametrize("behind", [False, True], ids=["the first step", "the second"])
def test_a_request_of_an_ensemble_ends_when_a_model_of_its_steps_has_other_inputs_than_it_had(
        tmp_path: Path, behind: bool) -> None:
    tensors = " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}'
                       for kind, name in (("input", "z"), ("output", "y")))
    write_model(tmp_path, "items", shape=[4], max_batch=0)
    write_model(tmp_path, "own", shape=[4], max_batch=0)
    name = write_chain(tmp_path, *(["items"] * behind), "own", max_batch=0, dims="4")
    with (serving(tmp_path, explicit_control=True, load_models=(name,)) as server,
          triton.InferenceServerClient(server.address) as client):
        shutil.rmtree(tmp_path / "own")
        python_model(tmp_path, "own", "class TritonPythonModel:\n    def execute(self, requests): ...",
                     f"max_batch_size: 8 {tensors}")
        client.load_model("own")
        with pytest.raises(InferenceServerException, match=r"step \d \('own'\): unexpected inference input 'x'"):
            asked(client, name, [4])


def test_a_check_says_of_ensembles_that_they_are_a_circle(tmp_path: Path) -> None:
    names = [write_chain(tmp_path, step, max_batch=8, dims="4") for step in ("b_8", "b")]
    (tmp_path / names[0]).rename(tmp_path / "b")
    output = {remark.model: remark for remark in check([LocalFolder(tmp_path)], "cpu")}
    assert output.keys() == {"b", "b_8"} and output["b"].is_error and output["b_8"].is_error
    assert "b -> b_8 -> b is a cycle" in output["b"].text
