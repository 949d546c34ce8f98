"""Requests with different shapes share a batch: ragged inputs, batch inputs with their shapes, scattered outputs."""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from tritonclient.utils import InferenceServerException

from infer_server.backend import load_plan
from infer_server.batching.request import Request
from infer_server.config.autocomplete import complete
from infer_server.config.config import from_message
from infer_server.config.ragged import ragged_of
from infer_server.config.signature import Items, ModelSignature
from infer_server.engines import build_engine
from infer_server.engines.errors import InputError, ModelError
from infer_server.engines.ir.graph import Array
from infer_server.errors import ExecutionError, InvalidRequestError, ModelConfigError
from infer_server.protocol.codec import DATATYPES, InputTensor
from infer_server.protos import model_config
from infer_server.repository.kinds.ragged import RaggedExecutor
from scripts.testing.numpy_engine import NumpyEngine, NumpyTensor
from tests.engines.compiler.open_models import node
from tests.engines.compiler.small_models import small_model
from tests.infer_server.serving import RunningServer, serving

# Exported as Triton's own examples are: what leads inputs has one name, though it is longer in x than in the others.
SUMS = small_model(
    [node("Shape", "x", "n"), node("Squeeze", "n", "count"), node("Cast", "count", "most", to=1),
     node("Range", "zero most one", "at"), node("Unsqueeze", "ends axis", "to"),
     node("Unsqueeze", "sizes axis", "size"), node("Sub", "to size", "from"),
     node("GreaterOrEqual", "at from", "behind"), node("Less", "at to", "before"),
     node("And", "behind before", "mine"), node("Cast", "mine", "mask", to=1), node("Unsqueeze", "x axis", "column"),
     node("MatMul", "mask column", "sum"), node("Mul", "x two", "doubled"), node("Add", "shapes two", "rows")],
    {"x": ["N"], "ends": ["N"], "sizes": ["N"], "shapes": ["N", 2]}, ["sum", "doubled", "rows"],
    {"zero": np.array(0, np.float32), "one": np.array(1, np.float32), "two": np.array(2, np.float32),
     "axis": np.array([1])})
BOUNDS = {"x": ((1,), (16,), (20,)), "ends": ((1,), (4,), (8,)), "sizes": ((1,), (4,), (8,)),
          "shapes": ((1, 2), (4, 2), (8, 2))}
CONFIG = """max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [-1, 2] allow_ragged_batch: true }
    output { name: "doubled" data_type: TYPE_FP32 dims: [-1, 2] }
    batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "x" }
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "sizes" data_type: TYPE_FP32 source_input: "x" }
    batch_input { kind: BATCH_ITEM_SHAPE target_name: "shapes" data_type: TYPE_FP32 source_input: "x" }
    batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "doubled" source_input: "x" }
    dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 600000000 }
    """


def parsed(text: str) -> model_config.ModelConfig:
    return text_format.Parse(text, model_config.ModelConfig())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "sums" / "1").mkdir(parents=True)
    (folder / "sums" / "config.pbtxt").write_text(CONFIG)
    build = build_engine(SUMS, ragged=("x",), profiles=[BOUNDS], timing=False, cache=False)
    build.save(folder / "sums" / "1" / "model.plan")
    with serving(folder, load_plan) as running:
        yield running


def random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def of_items(items: int, inputs: Mapping[str, Array]) -> Request:
    return Request(inputs=inputs, items=items, shape_key=(), encode=dict, reply=Mock())


def fail() -> None:
    raise MemoryError("the GPU has no memory left")


def request(x: Array) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


@pytest.mark.parametrize("lengths", [(3, 1, 5), (4, 2, 6)], ids=["together", "more than the plan takes together"])
def test_requests_of_unequal_shapes_are_executed_as_one_tensor(served: RunningServer, lengths: tuple[int, ...]) -> None:
    sent = [random(1, length, 2) for length in lengths]
    with (triton.InferenceServerClient(served.address) as client, ThreadPoolExecutor(len(sent)) as pool):
        def executions() -> int:
            return client.get_inference_statistics("sums").model_stats[0].execution_count

        before = executions()
        for x, answer in zip(sent, pool.map(lambda x: client.infer("sums", request(x)), sent), strict=True):
            np.testing.assert_array_equal(answer.as_numpy("doubled"), 2 * x)
            np.testing.assert_allclose(answer.as_numpy("sum"), [[x.sum()]], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(answer.as_numpy("rows"), [[x.shape[1] + 2, 4]])
        assert executions() == before + 1


def test_clients_see_no_made_inputs_and_the_shapes_of_their_requests(served: RunningServer) -> None:
    with triton.InferenceServerClient(served.address) as client:
        metadata = client.get_model_metadata("sums")
        assert [(each.name, list(each.shape)) for each in metadata.inputs] == [("x", [-1, -1, 2])]
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'x'"):
            client.infer("sums", request(random(1, 3)))
        with pytest.raises(InferenceServerException, match="'x.0' is 22, and the plan was built for 1 to 20"):
            client.infer("sums", request(random(1, 11, 2)))


PAIR = """name: "pair" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
    input { name: "z" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
    input { name: "p" data_type: TYPE_FP32 dims: 1 }
    output { name: "y" data_type: TYPE_FP32 dims: 1 }
    batch_input { kind: BATCH_ITEM_SHAPE target_name: "shapes" data_type: TYPE_INT32 source_input: "z" }"""


def test_all_inputs_of_a_request_have_as_many_items_ragged_or_not() -> None:
    signature = ModelSignature(from_message(parsed(PAIR)), Items(True, 8))

    def fit(x: int, z: int, p: int) -> int:
        return signature.fit([InputTensor(name, DATATYPES["FP32"], shape) for name, shape in (
            ("x", (x, 5)), ("z", (z, 2)), ("p", (p, 1)))]).items

    assert fit(2, 2, 2) == 2
    for items, refusal in (((2, 1, 1), "input 'z' batch size does not match .* it has 1, and those before it 2"),
                           ((2, 2, 1), "input 'p' batch size does not match .* it has 1"),
                           ((0, 2, 2), "input 'z' batch size does not match .* it has 2")):
        with pytest.raises(InvalidRequestError, match=refusal):
            fit(*items)


def test_no_request_is_answered_with_the_rows_of_another_that_has_more_items_than_it_says() -> None:
    config = from_message(parsed(PAIR))
    assert config.ragged
    batch = [of_items(1, {"x": random(1, 5), "z": random(rows, 2), "p": random(1, 1)}) for rows in (2, 1)]
    with pytest.raises(ExecutionError, match=r"'z' has other items than its requests: .* \[2, 2\], \[1, 2\]"):
        RaggedExecutor(Mock(), config, config.ragged).execute(batch)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_in_a_part_of_a_batch_ends_the_requests_of_that_part(failing: int) -> None:
    config, context = from_message(parsed(PAIR)), Mock()
    assert config.ragged
    lying = {"x": (5,), "z": (2,), "p": (1, 1), "shapes": (1, 1)}
    context.at.side_effect = [InputError("together they are too long"), context, context]
    context.input.side_effect = lambda name, _: np.empty(lying[name], np.float32)
    context.output.return_value = np.ones((1, 1), np.float32)
    context.execute.side_effect = lambda _: fail() if context.execute.call_count == failing + 1 else None
    batch = [of_items(1, {"x": random(1, 5), "z": random(1, 2), "p": random(1, 1)}) for _ in range(2)]
    outcomes, execution = RaggedExecutor(context, config, config.ragged, gpu=3).execute(batch)
    assert [request for request, _ in outcomes] == batch
    assert [isinstance(result, ExecutionError) for _, result in outcomes] == [failing == 0, failing == 1]
    assert outcomes[1 - failing][1] == {"y": [[1]]}
    assert execution and (execution.items, execution.gpu) == (1, 3)


@pytest.mark.parametrize(("kind", "values"), [
    ("BATCH_ELEMENT_COUNT", [6, 4]), ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10]),
    ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10]), ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 6),
    ("BATCH_ITEM_SHAPE", [[3, 1], [3, 1], [2, 2]]), ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2]),
])
def test_made_inputs_are_what_triton_makes_of_the_requests_shapes(kind: str, values: list[Any]) -> None:
    ragged = ragged_of(parsed(
        f'batch_input {{ kind: {kind} target_name: "i" data_type: TYPE_INT32 source_input: "x" }}'))
    assert ragged
    created = ragged.computed[0].values([(2, 3, 1), (1, 2, 2)])
    assert created.dtype == np.int32
    np.testing.assert_array_equal(created, values)


INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }'


@pytest.mark.parametrize(("text", "refusal"), [
    ('batch_input { target_name: "ends" data_type: TYPE_FP32 }', "ELEMENT_COUNT: expected one source_input, got 0"),
    ('batch_input { target_name: "ends" data_type: TYPE_INT64 source_input: "x" }', "TYPE_INT32 or TYPE_FP32"),
    ('batch_input { data_type: TYPE_FP32 source_input: "x" }', "give target_name"),
    ('batch_input { target_name: ["e", "e"] data_type: TYPE_FP32 source_input: "x" }', "'e' is given twice"),
    ('batch_input { target_name: "ends" data_type: TYPE_INT32 source_input: "x" }', "but the model's is TYPE_FP32"),
    ('batch_input { target_name: "end" data_type: TYPE_FP32 source_input: "x" }', "Did you mean 'ends'?"),
    ('batch_input { target_name: "ends" data_type: TYPE_FP32 source_input: "z" }',
     "'z' is not an input; the inputs are x"),
    ('batch_output { target_name: "z" source_input: "x" }', "'z' is not an output; the outputs are y"),
    ('batch_output { target_name: ["y", "y"] source_input: "x" }', "'y' is given twice"),
    ('batch_output { target_name: "y" source_input: "x" } output { name: "y" data_type: TYPE_FP32 dims: [1, -1] }',
     "where they are -1"),
    ("sequence_batching {}", "requests of a sequence are not concatenated"),
])
def test_a_ragged_configuration_that_makes_no_sense_is_refused_by_name(text: str, refusal: str) -> None:
    flat = [NumpyTensor(name, "float32", (f"{name}.0",)) for name in ("x", "ends", "y")]
    with patch.multiple(NumpyEngine, inputs=flat[:2], outputs=flat[2:]), pytest.raises(
            ModelConfigError, match=re.escape(refusal)):
        complete(parsed(f"max_batch_size: 4 {INPUT} {text}"), "m", NumpyEngine(max_batch=0), "model.plan")


def test_an_engine_that_does_not_take_its_input_flat_is_refused_with_the_remedy() -> None:
    for text in (INPUT, 'batch_output { target_name: "y" source_input: "x" }'):
        with pytest.raises(ModelConfigError, match="rebuild it with --ragged x"):
            complete(parsed(f"max_batch_size: 4 {text}"), "m", NumpyEngine(), "model.plan")
    square = [NumpyTensor("x", "float32", ("N", 4))]
    with patch.multiple(NumpyEngine, inputs=square, outputs=square), pytest.raises(
            ModelConfigError, match=r"\['N', 4\]; export it to take \[-1\]"):
        complete(parsed(f"max_batch_size: 4 {INPUT}"), "m", NumpyEngine(max_batch=0), "model.plan")
    with pytest.raises(ModelError, match=r"the ragged input 'shapes' is \[N, 2\], but must have one dynamic extent"):
        build_engine(SUMS, ragged=("shapes",), timing=False, cache=False)
