"""The wire protocol: KServe v2 / Triton over gRPC, and gRPC's health check.

    from infer_server.protos import health, inference, model_config
    request = inference.ModelInferRequest(model_name="resnet")
    protos.methods("inference.GRPCInferenceService")        # paths and message classes, for stubs and handlers
"""
from infer_server.protos._pool import Method, methods, pool

INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"

__all__ = ["HEALTH_SERVICE", "INFERENCE_SERVICE", "Method", "methods", "pool"]
