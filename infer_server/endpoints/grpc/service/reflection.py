"""gRPC server reflection, with which grpcurl and other tools read the protocol's definitions.

https://grpc.io/docs/guides/reflection
"""
from __future__ import annotations

from collections.abc import Mapping

from infer_server import protos
from infer_server.endpoints.grpc.context import CallContext, Serve
from infer_server.endpoints.grpc.errors import parsed


def is_installed() -> bool:
    try:
        import grpc_reflection.v1alpha.reflection  # noqa: F401
    except ImportError:
        return False
    return True


def reflection_methods() -> Mapping[str, Serve]:
    """Return the method of server reflection by path. Needs grpcio-reflection."""
    from grpc_reflection.v1alpha import reflection, reflection_pb2
    servicer = reflection.ReflectionServicer(
        (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE, reflection.SERVICE_NAME), protos.pool())

    async def answer(context: CallContext) -> None:
        while (data := await context.read()) is not None:
            request = parsed(reflection_pb2.ServerReflectionRequest, data)
            for response in servicer.ServerReflectionInfo(iter([request]), None):
                await context.write(response.SerializeToString())

    return {f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": answer}
