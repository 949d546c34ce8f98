"""Tests of headers that become parameters of a request, as a Python model sees them."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

TELLS = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("said", np.array([request.parameters()], object))])
                for request in requests]
"""
TENSORS = """input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "said" data_type: TYPE_STRING dims: 1 }"""
RESERVED = "^sequence_id$|^priority$|^headers$|^triton_"
HEADERS = {"x_user": "me", "my-x_lane": "fast", "y": "no"}


def test_requests_with_other_parameters_are_not_answered_from_the_cache(tmp_path: Path) -> None:
    python_model(tmp_path, "tells", TELLS, TENSORS + " response_cache { enable: true }")
    with (serving(tmp_path, forwarded={"gRPC": re.compile("x_")}) as server,
          tritonclient.grpc.InferenceServerClient(server.address) as client):
        for user in ("me", "you", "me"):
            answer = client.infer("tells", [tensor_of(tritonclient.grpc)], headers={"x_user": user})
            assert json.loads(answer.as_numpy("said")[0]) == {"x_user": user}
        (output,) = client.get_inference_statistics("tells").model_stats
    assert (output.inference_stats.cache_hit.count, output.inference_stats.cache_miss.count) == (1, 2)


@pytest.fixture(scope="module", params=FRONTS + WORKERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, "tells", TELLS, TENSORS)
    forwarded = {"HTTP": re.compile(f"x_|{RESERVED}"), "gRPC": re.compile(f"^x_|{RESERVED}")}
    with serving(folder, grpc_front=request.param, forwarded=forwarded) as running:
        yield running


def tensor_of(library: Any) -> Any:
    tensor = library.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    return tensor


def test_headers_that_the_pattern_finds_are_parameters_beside_those_of_the_message(server: RunningServer) -> None:
    def said(client: Any, library: Any, headers: dict[str, str]) -> dict[str, Any]:
        answer = client.infer("tells", [tensor_of(library)], headers={**headers}, parameters={"own": 7})
        parameters: dict[str, Any] = json.loads(answer.as_numpy("said")[0])
        return parameters

    with (tritonclient.grpc.InferenceServerClient(server.address) as over_grpc,
          tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as over_http):
        for headers, actual in ((HEADERS, {"x_user": "me"}), ({"x_user": "you"}, {"x_user": "you"}), ({}, {})):
            assert said(over_grpc, tritonclient.grpc, headers) == {"own": 7, **actual}
        for headers, actual in ((HEADERS, {"x_user": "me", "my-x_lane": "fast"}), ({}, {})):
            assert said(over_http, tritonclient.http, headers) == {"own": 7, **actual}


def test_a_header_of_the_name_of_a_parameter_that_means_something_is_refused(server: RunningServer) -> None:
    with (tritonclient.grpc.InferenceServerClient(server.address) as over_grpc,
          tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as over_http):
        for client, library in ((over_grpc, tritonclient.grpc), (over_http, tritonclient.http)):
            for name in ("sequence_id", "priority", "headers", "triton_x"):
                with pytest.raises(InferenceServerException, match=f"Header '{name}' is reserved for Triton usage"):
                    client.infer("tells", [tensor_of(library)], headers={name: "1"})
            client.infer("tells", [tensor_of(library)], headers={"x_1": "1"})


def test_a_python_model_has_parameters_of_every_type_that_a_client_sends(tmp_path: Path) -> None:
    python_model(tmp_path, "tells", TELLS, TENSORS)
    parameters = {"a": 0.5, "b": True, "c": "d", "e": -1}
    with (serving(tmp_path) as server,
          tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as over_http):
        with tritonclient.grpc.InferenceServerClient(server.address) as over_grpc:
            tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
            tensor.set_data_from_numpy(np.zeros(1, np.float32))
            answer = over_grpc.infer("tells", [tensor], parameters=parameters)
        assert json.loads(answer.as_numpy("said")[0]) == parameters
        tensor = tritonclient.http.InferInput("x", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        parameters |= {"f": [1, None], "g": {"h": 2 ** 64}}
        answer = over_http.infer("tells", [tensor], parameters=parameters)
        assert json.loads(answer.as_numpy("said")[0]) == parameters
