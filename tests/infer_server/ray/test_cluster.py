"""A deployment on a cluster of this machine, behind HAProxy. Starting Ray takes minutes: INFER_SERVER_TEST_RAY=1."""
from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray")
if os.environ.get("INFER_SERVER_TEST_RAY") != "1":
    pytest.skip("starting a cluster takes minutes; INFER_SERVER_TEST_RAY=1 runs this", allow_module_level=True)

from infer_server.protos import inference
from scripts.scale._ray_cluster import Cluster
from tests.infer_server.ray.test_replica import CONFIG, INFER, MODEL, STREAM, doubled, request_of


@pytest.mark.slow
def test_a_deployment_answers_unary_calls_and_streams(tmp_path: Path) -> None:
    (tmp_path / "double" / "1").mkdir(parents=True)
    (tmp_path / "double" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "double" / "1" / "model.py").write_text(MODEL)
    with Cluster(port=9700, cpus=2) as cluster:
        cluster.deploy({"model_repository": str(tmp_path), "num_cpus": 0.5})
        cluster.wait_for(1)
        with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc}") as channel:
            assert doubled(channel.unary_unary(INFER)(request_of(), timeout=60))
            answers = list(channel.stream_stream(STREAM)(iter([request_of()] * 3), timeout=60))
            assert len(answers) == 3
            assert not any(inference.ModelStreamInferResponse.FromString(answer).error_message for answer in answers)
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(INFER)(request_of("nobody"), timeout=60)
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
