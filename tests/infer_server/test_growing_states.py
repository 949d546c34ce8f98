"""Implicit states with use_growable_memory grow in place: each sequence appends to a cache of its own."""
from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from benchmarks.measure.decoders import Decoder
from infer_server.backend import load_plan
from infer_server.batching.request import SequenceCache
from infer_server.config.config import from_message
from infer_server.engines import build_engine
from infer_server.engines.ir.graph import Array
from infer_server.errors import ModelConfigError
from infer_server.repository.model import QueuedModel
from tests.engines.compiler.open_models import growing_net, node, random
from tests.engines.compiler.small_models import small_model
from tests.infer_server.config.test_config import parsed
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving

DECODER = Decoder(layers=2, hidden=32, heads=4, shared_heads=2, inner=48, words=64)
CACHES = [(f"past.{layer}.{kind}", f"present.{layer}.{kind}") for layer in range(2) for kind in ("key", "value")]
EMPTY = "dims: [2, -1, 8] initial_state { name: 'none' data_type: TYPE_FP32 dims: [2, 0, 8] zero_data: true }"
PATIENT = 3_600_000_000         # microseconds that a sequence may be idle: however busy the machine is
GROWS = "use_growable_memory: true"


def sequences(*states: str, idle_us: int = PATIENT, more: str = "") -> str:
    return f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {more} {' '.join(states)} }}"


def state(past: str, present: str, dims: str, more: str = GROWS) -> str:
    return f"state {{ input_name: '{past}' output_name: '{present}' data_type: TYPE_FP32 {dims} {more} }}"


def capacity(tokens: int) -> str:
    return f'parameters {{ key: "state_capacity" value {{ string_value: "{tokens}" }} }}'


def states_of_net(more: str = GROWS) -> list[str]:
    return [state(past, present, "dims: [4, -1, 4]", more) for past, present in (
        ("keys", "keys_out"), ("values", "values_out"))]


def write(folder: Path, name: str, plan: bytes, config: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.plan").write_bytes(plan)
    (folder / name / "config.pbtxt").write_text(config)


def plan_of(model: onnx.ModelProto, file: Path) -> bytes:
    build_engine(model, timing=False, cache=False).save(file)
    return file.read_bytes()


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return plan_of(growing_net(), tmp_path_factory.mktemp("net") / "net.plan")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, net: bytes) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    decoder = plan_of(DECODER.model(), folder.parent / "decoder.plan")
    for name, more in (("decoder", GROWS), ("decoder_copied", "")):
        write(folder, name, decoder, sequences(*(state(past, present, EMPTY, more) for past, present in CACHES)))
    for name, more in (("net", GROWS), ("net_copied", "")):
        write(folder, name, net, sequences(*states_of_net(more)))
    write(folder, "small", net, sequences(*states_of_net()) + capacity(4))
    write(folder, "brief", net, sequences(*states_of_net(), idle_us=100_000))
    with serving(folder, load_plan) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def infer(client: triton.InferenceServerClient, model: str, feeds: Mapping[str, Array], sequence: int,
          start: bool = False, end: bool = False) -> Array:
    tensors = []
    for name, array in feeds.items():
        tensors.append(triton.InferInput(name, list(array.shape), "FP32" if array.dtype == np.float32 else "INT64"))
        tensors[-1].set_data_from_numpy(array)
    result = client.infer(model, tensors, sequence_id=sequence, sequence_start=start, sequence_end=end)
    output: Array = result.as_numpy("logits" if "decoder" in model else "y")
    return output


def step(client: triton.InferenceServerClient, model: str, sequence: int, seed: int = 0, start: bool = False,
         end: bool = False) -> Array:
    """Run a token of the net, whose sequences begin with a token of zeros, as without the option."""
    return infer(client, model, {"x": random(1, 1, 16, seed=seed)}, sequence, start, end)


def cache_of(server: RunningServer, model: str, sequence: int) -> SequenceCache | None:
    loaded = server.server.repository.find(model)
    assert isinstance(loaded, QueuedModel) and loaded._sequences
    active = loaded._sequences._active.get(sequence)
    return active.cache if active else None


def context_of(server: RunningServer, model: str, sequence: int) -> weakref.ref[object]:
    cache = cache_of(server, model, sequence)
    assert cache and cache.context
    return weakref.ref(cache.context)


def test_interleaved_sequences_compute_what_copied_states_compute(client: triton.InferenceServerClient) -> None:
    random_ids = np.random.default_rng(0)
    past = dict.fromkeys((1, 2, 3), 0)
    for turn in range(4):
        for sequence in past:
            new = (3, 5, 1)[sequence - 1] if not turn else 2 if turn == 2 else 1
            feeds = {"input_ids": random_ids.integers(0, DECODER.words, (1, new)),
                     "attention_mask": np.ones((1, past[sequence] + new), np.int64)}
            outputs = [infer(client, model, feeds, sequence, start=not turn, end=turn == 3)
                       for model in ("decoder", "decoder_copied")]
            past[sequence] += new
            assert outputs[0].shape == (1, new, DECODER.words)
            np.testing.assert_allclose(*outputs, 1e-4, 1e-5)


def test_a_sequence_begins_with_its_initial_state_and_anew_with_each_start(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    for position in (0, 1, 2, 0, 1):
        outputs = [step(client, model, 1, position, start=not position) for model in ("net", "net_copied")]
        np.testing.assert_allclose(*outputs, 1e-5, 1e-6)
    before = context_of(server, "net", 1)
    outputs = [step(client, model, 1, 7, start=True, end=True) for model in ("net", "net_copied")]
    np.testing.assert_allclose(*outputs, 1e-5, 1e-6)
    assert before() is None
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        step(client, "net", 1)


def test_a_full_sequence_is_refused_until_it_starts_anew(client: triton.InferenceServerClient) -> None:
    first = step(client, "small", 1, start=True)
    for _ in range(2):                      # the initial state has a token
        step(client, "small", 1)
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="4 of 4 tokens.* raise the parameter state_capacity of "
                                                           "model 'small', which is 4") as refusal:
            step(client, "small", 1)
        assert refusal.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    np.testing.assert_array_equal(step(client, "small", 2, start=True), first)
    np.testing.assert_array_equal(step(client, "small", 1, start=True, end=True), first)


def test_a_prompt_beyond_the_capacity_is_refused_and_the_sequence_goes_on(
        tmp_path: Path, server: RunningServer, client: triton.InferenceServerClient) -> None:
    def feeds(new: int, past: int) -> dict[str, Array]:
        return {"input_ids": np.arange(new)[None], "attention_mask": np.ones((1, new + past), np.int64)}

    plan = (server.folder / "decoder" / "1" / "model.plan").read_bytes()
    write(tmp_path, "decoder", plan, sequences(*(state(past, present, EMPTY) for past, present in CACHES))
          + capacity(6))
    with serving(tmp_path, load_plan) as small, triton.InferenceServerClient(small.address) as other:
        for past, new in ((0, 7), (0, 4), (4, 3)):
            if past + new > 6:
                with pytest.raises(InferenceServerException, match=f"no room for {past + new} tokens"):
                    infer(other, "decoder", feeds(new, past), 1, start=not past)
            else:
                infer(other, "decoder", feeds(new, past), 1)
        with pytest.raises(InferenceServerException, match="StatusCode.INVALID_ARGUMENT.*missing"):
            infer(other, "decoder", {"input_ids": np.ones((1, 1), np.int64)}, 1)
        last = infer(other, "decoder", feeds(2, 4), 1, end=True)
    infer(client, "decoder_copied", feeds(4, 0), 1, start=True)
    np.testing.assert_allclose(last, infer(client, "decoder_copied", feeds(2, 4), 1, end=True), 1e-4, 1e-5)


def test_memory_is_freed_when_a_sequence_ends_or_has_been_idle(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    for model in ("net", "brief"):
        step(client, model, 5, start=True)
    ended, idle = context_of(server, "net", 5), context_of(server, "brief", 5)
    step(client, "net", 5, end=True)
    assert eventually(lambda: ended() is None)
    assert eventually(lambda: cache_of(server, "brief", 5) is None and idle() is None)


def test_memory_is_freed_when_the_model_is_unloaded(tmp_path: Path, net: bytes) -> None:
    write(tmp_path, "net", net, sequences(*states_of_net()))
    with (serving(tmp_path, load_plan, explicit_control=True, load_models=None) as server,
          triton.InferenceServerClient(server.address) as client):
        step(client, "net", 1, start=True)
        context = context_of(server, "net", 1)
        client.unload_model("net")
        assert eventually(lambda: context() is None)


SUM = small_model([node("Add", "x past", "sum")], {"x": ["N", "T", 4], "past": ["N", "T", 4]}, ["sum"])
FIXED = small_model([node("Concat", "past x", "y", axis=1)], {"past": ["N", 4, 8], "x": ["N", 1, 8]}, ["y"])


@pytest.mark.parametrize(("model", "config", "reason"), [
    (SUM, sequences(state("past", "sum", "dims: [-1, 4]")), "no output is an input with further tokens"),
    (FIXED, sequences(state("past", "y", "dims: [4, 8]")), "its shapes are fixed"),
    (None, sequences(state("keys", "values_out", "dims: [4, -1, 4]")),
     "output 'values_out' is not input 'keys' with tokens added"),
    (None, sequences(states_of_net()[0]), "'values' grows with the other states"),
    (None, sequences(*states_of_net()) + "output { name: 'keys_out' data_type: TYPE_FP32 dims: [4, -1, 4] }",
     "output 'keys_out' stays in its place and is not sent"),
    (None, sequences(*states_of_net()) + 'parameters { key: "threads" value { string_value: "2" } }',
     "write the parameter threads: 1"),
    (None, sequences(state("keys", "keys_out", "dims: [4, -1, 5]"), states_of_net()[1]),
     "input 'keys' has shape .1, 4, 1, 5., the model takes .batch, 4, P, 4."),
    (None, sequences(state("keys", "keys_out", "dims: [4, 2, 4]"), states_of_net()[1]), "'P' is one extent"),
    (None, sequences(*states_of_net(), more="oldest { max_candidate_sequences: 65536 }") + capacity(1 << 24),
     "parameter state_capacity: 65536 sequences of up to 16777216 tokens"),
], ids=["no cache", "fixed shapes", "another output", "one of two", "a visible state", "threads", "another depth",
        "unequal tokens", "too large"])
def test_a_model_whose_states_cannot_grow_fails_to_load_with_the_reason(
        tmp_path: Path, net: bytes, model: onnx.ModelProto | None, config: str, reason: str) -> None:
    write(tmp_path, "m", plan_of(model, tmp_path / "m.plan") if model else net, config)
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        (status,) = client.get_model_repository_index().models
    assert status.state == "UNAVAILABLE" and re.search(reason, status.reason), status.reason


@pytest.mark.parametrize(("text", "reason"), [
    ("backend: 'python' " + sequences(*states_of_net()), "only an engine's states grow in place"),
    (sequences(*states_of_net("")) + capacity(8), "no state of sequence_batching has use_growable_memory"),
    (sequences(*states_of_net()) + capacity(0), "state_capacity: expected a number of tokens, got '0'"),
    (sequences(*states_of_net()) + capacity(1 << 25), "33554432 is more than the limit of 16777216"),
])
def test_configurations_that_make_no_sense_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ModelConfigError, match=reason):
        from_message(parsed(text))
