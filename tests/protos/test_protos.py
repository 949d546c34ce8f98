"""The protocol equals Triton's on the wire, and both definitions can be loaded in one process."""
from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2

from infer_server import protos
from infer_server.protos import health, inference, model_config


def _is_repeated(field: Any) -> bool:
    """Return True for a repeated field; protobuf 5 has only `label`, of which newer versions warn."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _oneof(field: Any) -> str:
    """Return the name of a field's oneof, or ""; the synthetic oneof of an `optional` field counts as none."""
    name = field.containing_oneof.name if field.containing_oneof else ""
    return "" if name == f"_{field.name}" else name


def _facts_of(message: Any) -> set[tuple[Any, ...]]:
    """Yield the wire properties of every field and enum value of a message type and its nested types."""
    fields = {(message.full_name, f.number, f.name, f.type, _is_repeated(f),
               f.message_type and f.message_type.full_name, _oneof(f))
              for f in message.fields}
    values = {(enum.full_name, value.name, value.number) for enum in message.enum_types for value in enum.values}
    return fields.union(values, *map(_facts_of, message.nested_types))


@pytest.mark.parametrize(("ours", "theirs"), [(inference, service_pb2), (model_config, model_config_pb2)])
def test_every_message_has_the_fields_of_the_message_that_tritons_client_sends(ours: Any, theirs: Any) -> None:
    """Older clients may lack fields of ours, but have no others."""
    for name, message in theirs.DESCRIPTOR.message_types_by_name.items():
        assert not _facts_of(message) - _facts_of(getattr(ours, name).DESCRIPTOR), name


def test_a_request_of_tritons_client_is_read_back_unchanged() -> None:
    theirs = service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"\0\1"])
    theirs.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    theirs.parameters["timeout"].int64_param = 5
    ours = inference.ModelInferRequest.FromString(theirs.SerializeToString())
    assert text_format.MessageToString(ours) == text_format.MessageToString(theirs)


def test_the_service_has_the_calls_of_tritons_service() -> None:
    file = FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(file)
    assert [m.name for m in protos.methods(protos.INFERENCE_SERVICE)] == [m.name for m in file.service[0].method]
    infer = next(m for m in protos.methods(protos.INFERENCE_SERVICE) if m.name == "ModelInfer")
    assert infer.path == "/inference.GRPCInferenceService/ModelInfer"
    assert (infer.request, infer.response) == (inference.ModelInferRequest, inference.ModelInferResponse)


def test_enums_are_known_by_name_and_by_number() -> None:
    assert model_config.TYPE_FP32 == 11
    assert model_config.DataType.Name(model_config.TYPE_FP32) == "TYPE_FP32"
    assert health.HealthCheckResponse.SERVING == 1
