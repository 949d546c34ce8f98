"""Tests of models that receive images as encoded files, compared with preprocessing in the client."""
from __future__ import annotations

import io
import math
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from tritonclient.utils import InferenceServerException

from infer_server.batching.statistics import Failure
from infer_server.engines.preprocess import IMAGENET, PRESETS
from infer_server.errors import ModelConfigError
from infer_server.repository.folders import read_model
from infer_server.repository.kinds.image_model import ImageInput, image_input
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, load_numpy_engine, write_model
from tests.infer_server.endpoints.test_serving import eventually, statistics
from tests.infer_server.serving import RunningServer, serving

PICTURE = Path(__file__).parents[3] / "docs" / "benchmarks" / "peers.png"
SHAPE = ("batch", 3, 24, 32)
FILES = 'parameters { key: "image_input" value { string_value: "x" } }'
GRAY = FILES + ' parameters { key: "preprocess" value { string_value: "gray" } }'


def jpeg(left: int = 0, mode: str = "RGB") -> bytes:
    """Return a part of a photograph as a JPEG file."""
    with Image.open(PICTURE) as picture:
        part = picture.convert(mode).crop((left, 40, left + 200, 160))
    file = io.BytesIO()
    part.save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    recorded = {"preprocess": IMAGENET.fit(SHAPE).to_json()}
    write_model(repository, "recorded", config=FILES, shape=SHAPE[1:], metadata=recorded)
    write_model(repository, "pixels", config=FILES, shape=(24, 32, 3), dtype="uint8", kind="echo",
                metadata={"preprocess": IMAGENET.of_pixels.fit(("batch", 24, 32, 3)).to_json()})
    write_model(repository, "gray", config=GRAY, shape=(1, 12, 12))
    write_model(repository, "gated", config=FILES + " dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
                shape=SHAPE[1:], metadata=recorded, gate="pictures", max_batch=1)
    with serving(repository) as running:
        yield running


@pytest.fixture(params=[tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    port = server.ports.grpc if request.param is tritonclient.grpc else server.ports.http
    with request.param.InferenceServerClient(f"127.0.0.1:{port}") as connected:
        connected.library = request.param
        yield connected


def answer(client: Any, model: str, array: np.ndarray[Any, Any], datatype: str = "BYTES") -> Any:
    tensor = client.library.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor]).as_numpy("y")


def files(*contents: bytes) -> np.ndarray[Any, Any]:
    array = np.empty((len(contents), 1), np.object_)
    array[:, 0] = contents
    return array


def applied(file: bytes, preset: str = "imagenet", shape: Any = SHAPE) -> np.ndarray[Any, Any]:
    return PRESETS[preset].apply(Image.open(io.BytesIO(file)), shape)


def test_files_become_what_the_clients_preprocessing_makes_of_them(client: Any) -> None:
    first, second = jpeg(), jpeg(100)
    expected = np.concatenate([applied(first), applied(second)])
    np.testing.assert_array_equal(answer(client, "recorded", files(first, second)), expected * 2 + 1)
    np.testing.assert_array_equal(answer(client, "recorded", files(first)[0]), expected[:1] * 2 + 1)
    np.testing.assert_array_equal(answer(client, "recorded", expected, "FP32"), expected * 2 + 1)
    png = PICTURE.read_bytes()
    np.testing.assert_array_equal(answer(client, "gray", files(png)), applied(png, "gray", ("n", 1, 12, 12)) * 2 + 1)


def test_an_engine_of_pixels_gets_pixels(client: Any) -> None:
    file = jpeg(mode="L")
    pixels = IMAGENET.fit(SHAPE).pixels_of(Image.open(io.BytesIO(file)))[None]
    np.testing.assert_array_equal(answer(client, "pixels", files(file)), pixels)
    np.testing.assert_array_equal(answer(client, "pixels", pixels, "UINT8"), pixels)


def bomb(width: int, height: int) -> bytes:
    """Return the beginning of a PNG file whose header declares this size."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checksum = struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + checksum + bytes(4) + b"IDAT"


def test_what_is_no_picture_is_told(client: Any, server: RunningServer) -> None:
    failures = server.server.repository.find("recorded").statistics.snapshot
    before = failures().failures[Failure.OTHER]
    for array, output in ((files(b"not one"), "item 0 of 7 bytes is not a readable JPEG or PNG"),
                          (files(b""), "item 0 of 0 bytes"),
                          (files(jpeg(), jpeg()[:900]), "item 1 of 900 bytes"),
                          (files(b"GIF89a" + bytes(40)), "not a readable JPEG or PNG"),
                          (files(bomb(8192, 8193)), "8192x8193 are more than 67108864 pixels"),
                          (np.array([[b"a", b"b"]], np.object_), "of shape .N. or .N, 1."),
                          (files(*[jpeg()] * 9), "batch-size must be <= 8")):
        with pytest.raises(InferenceServerException, match=output):
            answer(client, "recorded", array)
    assert failures().failures[Failure.OTHER] == before + 7


def test_a_queue_of_pictures_has_its_bound_and_lets_go_of_who_leaves(server: RunningServer) -> None:
    model = server.server.repository.find("gated")
    ended: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(server.address) as client:
        def asked() -> Any:
            tensor = tritonclient.grpc.InferInput("x", [1, 1], "BYTES")
            tensor.set_data_from_numpy(files(jpeg()))
            return client.async_infer("gated", [tensor], lambda result, error: ended.append(error))
        with GATES["pictures"].closed():
            asked()
            assert GATES["pictures"].holds(1)
            waiting = asked()
            assert eventually(lambda: model.pending == 1)
            asked()
            assert eventually(lambda: len(ended) == 1) and "Exceeds maximum queue size" in str(ended[0])
            waiting.cancel()
            assert eventually(lambda: model.pending == 0)
        assert eventually(lambda: len(ended) == 3) and ended.count(None) == 1


def test_what_pictures_become_counts_as_held_until_they_are_answered(server: RunningServer) -> None:
    inflight, array = server.server._inflight, files(jpeg())
    assert eventually(lambda: inflight.held_bytes == 0), "the calls before have ended at their clients, and end here"
    with tritonclient.grpc.InferenceServerClient(server.address) as client:
        tensor = tritonclient.grpc.InferInput("x", [1, 1], "BYTES")
        tensor.set_data_from_numpy(array)
        with GATES["pictures"].closed():
            client.async_infer("gated", [tensor], lambda result, error: None)
            assert GATES["pictures"].holds(1)
            beside_its_file = inflight.held_bytes - len(array[0, 0])
            answer_bytes = decoded_bytes = 4 * math.prod(SHAPE[1:])
            assert 0 <= beside_its_file - 2 * answer_bytes - decoded_bytes < 200
        assert eventually(lambda: inflight.held_bytes == 0)


def test_a_picture_whose_client_leaves_while_it_is_decoded_is_not_queued(
        server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model, decoded, may_go_on = server.server.repository.find("recorded"), ImageInput.decoded, threading.Event()

    def held(image: ImageInput, contents: Any) -> Any:
        assert may_go_on.wait(TIMEOUT_SECS)
        return decoded(image, contents)

    monkeypatch.setattr(ImageInput, "decoded", held)
    before = model.statistics.snapshot()
    with tritonclient.grpc.InferenceServerClient(server.address) as client:
        tensor = tritonclient.grpc.InferInput("x", [1, 1], "BYTES")
        tensor.set_data_from_numpy(files(jpeg()))
        requested = client.async_infer("recorded", [tensor], lambda result, error: None)
        assert eventually(lambda: model.pending == 1)
        requested.cancel()
        assert eventually(lambda: model.pending == 0)
        may_go_on.set()
        answer_to_another = client.infer("recorded", [tensor])      # behind it
    after = statistics(server, "recorded")
    assert answer_to_another.as_numpy("y").shape == (1, *SHAPE[1:])
    assert after.failures[Failure.CANCELED] == before.failures[Failure.CANCELED] + 1
    assert after.inference_count == before.inference_count + 1


def test_a_server_that_stops_answers_the_pictures_that_it_has_accepted_and_takes_no_more(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = ImageInput.decoded

    def slowly(image: ImageInput, contents: Any) -> Any:
        time.sleep(0.02)
        return decoded(image, contents)

    monkeypatch.setattr(ImageInput, "decoded", slowly)
    write_model(tmp_path, "m", config=FILES, shape=SHAPE[1:], metadata={"preprocess": IMAGENET.fit(SHAPE).to_json()})
    tensor = tritonclient.grpc.InferInput("x", [1, 1], "BYTES")
    tensor.set_data_from_numpy(files(jpeg()))
    ended: list[str] = []

    def ask_until_refused() -> None:
        with tritonclient.grpc.InferenceServerClient(server.address) as client:
            while True:
                try:
                    client.infer("m", [tensor])
                    ended.append("OK")
                except InferenceServerException as error:
                    ended.append(error.status())
                    return

    with serving(tmp_path, exit_timeout_secs=TIMEOUT_SECS) as server, ThreadPoolExecutor(12) as clients:
        asking = [clients.submit(ask_until_refused) for _ in range(12)]
        assert eventually(lambda: len(ended) > 12)
        answered = server.stop()
    assert answered and all(client.result() is None for client in asking)
    assert set(ended) == {"OK", "StatusCode.UNAVAILABLE"}


@pytest.mark.parametrize(("parameters", "config", "said"), [
    ({"image_input": "z"}, "", "the model has no input 'z', but x"),
    ({"image_input": "x"}, "", "does not say how pictures become its input"),
    ({"image_input": "x", "preprocess": "imagenet"}, "", "don't fit an input of shape"),
    ({"image_input": "x", "preprocess": "imagnet"}, "", "neither a file nor a preset"),
    ({"image_input": "x", "preprocess": "gray"}, "sequence_batching {}", "of a sequence"),
    ({"image_input": "x", "preprocess": "gray"},
     'input { name: "x" data_type: TYPE_FP32 dims: 64 reshape { shape: [ 1, 8, 8 ] } }', "'x' has a reshape"),
])
def test_an_image_input_that_cannot_be_is_refused(
        tmp_path: Path, parameters: dict[str, str], config: str, said: str) -> None:
    text = " ".join(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
                    for name, value in parameters.items())
    write_model(tmp_path, "m", config=f"{config} {text}", shape=[1, 8, 8])
    (source,) = read_model(tmp_path, "m")
    with pytest.raises(ModelConfigError, match=said):
        image_input(source, load_numpy_engine(source.file, 1))


def test_threads_that_the_system_refuses_end_a_load_and_leave_none_of_the_others(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "refused/1 instance 1":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    write_model(tmp_path, "refused", config=GRAY + " instance_group { count: 2 }", shape=(1, 12, 12))
    with serving(tmp_path) as server:
        assert "no more threads" in server.server.failures()["refused version 1"]
    assert eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("refused/")])
