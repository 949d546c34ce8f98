"""Tests of gRPC server reflection, as grpcurl uses it."""
from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from infer_server import protos
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.serving import serving

descriptors = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database",
                                  reason="grpcio-reflection is not installed")


def test_tools_find_services_and_messages(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_reflection=True) as running, grpc.insecure_channel(running.address) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_SECS)
        database = descriptors.ProtoReflectionDescriptorDatabase(channel)
        assert {protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE} <= set(database.get_services())
        file = database.FindFileContainingSymbol(protos.INFERENCE_SERVICE)
        assert "ModelInferRequest" in [message.name for message in file.message_type]
        assert list(file.dependency) == ["model_config.proto"]
        assert database.FindFileByName("model_config.proto").package == "inference"


def test_without_the_option_nothing_is_told(tmp_path: Path) -> None:
    with (serving(tmp_path) as running, grpc.insecure_channel(running.address) as channel,
          pytest.raises(grpc.RpcError, match="UNIMPLEMENTED")):
        descriptors.ProtoReflectionDescriptorDatabase(channel).get_services()
