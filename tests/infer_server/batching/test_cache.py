"""Tests of the statistics of the response cache: hits and misses."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import serving


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http])
def test_a_cached_response_that_does_not_fit_its_place_is_a_failure_as_an_executed_one(
        tmp_path: Path, protocol: Any) -> None:
    write_model(tmp_path, "cached", shape=[4], config="max_batch_size: 8 response_cache { enable: true }")
    key = f"/client_cache_{os.getpid()}"
    region = shm.create_shared_memory_region("r", key, 16)
    try:
        with serving(tmp_path, allow_client_shm=True) as server:
            port = server.ports.grpc if protocol is tritonclient.grpc else server.ports.http
            with protocol.InferenceServerClient(f"127.0.0.1:{port}") as client:
                client.register_system_shared_memory("r", key, 16)
                tensor, output = protocol.InferInput("x", [1, 4], "FP32"), protocol.InferRequestedOutput("y")
                tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
                output.set_shared_memory("r", 8)
                for _ in range(2):
                    with pytest.raises(InferenceServerException):
                        client.infer("cached", [tensor], outputs=[output])
            counters = server.server.repository.find("cached").statistics.snapshot()
    finally:
        shm.destroy_shared_memory_region(region)
    assert (counters.success.count, counters.fail.count, counters.cache_hit.count) == (0, 2, 0)
    assert counters.cache_miss.count == 1
