"""The server caches the layouts of requests and responses."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import serving


@pytest.mark.parametrize("library", [tritonclient.grpc, tritonclient.http], ids=["gRPC", "HTTP"])
def test_requests_that_differ_in_their_parameters_have_what_is_kept_of_responses_in_common(
        library: Any, tmp_path: Path) -> None:
    """Requests of sequences differ in their parameters, e.g. the sequence id.

    Formerly each of the last 4096 requests had a cache entry of its own, with the outputs of models replaced since.
    """
    write_model(tmp_path, "affine")
    tensor = library.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
    with serving(tmp_path) as server:
        port = server.ports.grpc if library is tritonclient.grpc else server.ports.http
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for i in range(8):
                client.infer("affine", [tensor], parameters={"number": i})
        model = server.server.repository.find("affine")
        assert len(model.prepared) == 8
        (served,) = model.served.values()
        assert all(each.served is served for each in model.prepared.values())
