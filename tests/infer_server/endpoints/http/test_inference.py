"""Tests of the HTTP/REST protocol, with Triton's own client."""
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.infer_server.endpoints.http.plain import CLOSE, ask, post
from tests.infer_server.serving import RunningServer

X = np.array([[1, 2, 3, 4]], np.float32)


def tensor(array: np.ndarray[Any, Any], datatype: str = "FP32", name: str = "x",
           binary: bool = True) -> triton.InferInput:
    created = triton.InferInput(name, list(array.shape), datatype)
    created.set_data_from_numpy(array, binary_data=binary)
    return created


@pytest.mark.parametrize("sent", [True, False], ids=["sent in binary", "sent as JSON"])
@pytest.mark.parametrize("asked", [True, False], ids=["answered in binary", "answered as JSON"])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_an_inference_is_answered_in_the_form_that_is_asked_for(
        client: triton.InferenceServerClient, sent: bool, asked: bool, coding: str | None) -> None:
    result = client.infer("affine", [tensor(np.repeat(X, 3, 0), binary=sent)], request_id="7",
                          outputs=[triton.InferRequestedOutput("y", binary_data=asked)],
                          request_compression_algorithm=coding, response_compression_algorithm=coding)
    np.testing.assert_array_equal(result.as_numpy("y"), np.repeat(X, 3, 0) * 2 + 1)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "affine", "1")
    assert ("data" in response["outputs"][0]) != asked


def test_several_tensors_and_other_dtypes_arrive_as_they_are(client: triton.InferenceServerClient) -> None:
    a, b = np.float32(np.random.default_rng(0).standard_normal((2, 2, 2, 3)))
    result = client.infer("two", [tensor(a, name="x"), tensor(b, name="x2", binary=False)])
    np.testing.assert_array_equal(result.as_numpy("sum"), a + b)
    half = client.infer("half", [tensor(np.float16(X), "FP16")]).as_numpy("y")
    assert half.dtype == np.float16 and (half == X * 2 + 1).all()
    whole = client.infer("truth", [tensor(np.array([[2 ** 40, -1]]), "INT64", binary=False)])
    assert whole.as_numpy("y").tolist() == [[2 ** 41 + 1, -1]]


def test_what_the_server_and_its_models_are_is_told(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and not client.is_server_ready(), "a model has failed"
    assert client.is_model_ready("affine") and client.is_model_ready("a model", "1")
    assert not client.is_model_ready("nobody") and not client.is_model_ready("corrupt")
    assert "statistics" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("affine")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = client.get_model_config("affine", "1")
    assert config["max_batch_size"] == 8 and config["input"][0]["dims"] == [4]
    client.infer("affine", [tensor(X)])
    (statistics,) = client.get_inference_statistics("affine")["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] > 0
    assert {each["name"] for each in client.get_inference_statistics()["model_stats"]} >= {"affine", "two"}


def test_models_are_listed_unloaded_and_loaded(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    states = {entry["name"]: entry.get("state") for entry in client.get_model_repository_index()}
    assert states["affine"] == "READY" and states["corrupt"] == "UNAVAILABLE"
    client.unload_model("a model")
    assert not client.is_model_ready("a model")
    client.load_model("a model", config=json.dumps({"max_batch_size": 2}))
    assert client.get_model_config("a model")["max_batch_size"] == 2
    with pytest.raises(InferenceServerException, match="not in the repository"):
        client.load_model("nobody")
    for path in ("index", "models/affine/load", "models/affine/unload"):
        answer = ask(server, post(f"/v2/repository/other/{path}", b"", CLOSE))
        assert answer.startswith(b"HTTP/1.1 501") and b"'repository_name'" in answer, path
    unknown = json.dumps({"parameters": {"zz": True}}).encode()
    assert b"parameter 'zz'" in ask(server, post("/v2/repository/models/affine/unload", unknown, CLOSE))
    assert client.is_model_ready("affine")


def test_an_inference_that_cannot_be_served_says_why(client: triton.InferenceServerClient) -> None:
    for model, inputs, status, output in (
            ("nobody", [tensor(X)], "404", "unknown model"),
            ("corrupt", [tensor(X)], "404", "has no available versions"),
            ("affine", [tensor(X, name="z")], "400", "unexpected inference input 'z'"),
            ("affine", [tensor(X[:, :2])], "400", "unexpected shape"),
            ("affine", [tensor(X.astype(np.float64), "FP64")], "400", "data-type is 'FP64'"),
            ("fragile", [tensor(-X)], "500", "a negative value"),
            ("large", [tensor(np.zeros((3, 1 << 18), np.float32))], "413", "maximum allowed input size of 2097152")):
        with pytest.raises(InferenceServerException, match=output) as caught:
            client.infer(model, inputs)
        assert caught.value.status() == status
    with pytest.raises(InferenceServerException, match="sending FP16 data via JSON is not supported"):
        client.infer("half", [tensor(np.float16(X), "FP16")],
                     outputs=[triton.InferRequestedOutput("y", binary_data=False)])
