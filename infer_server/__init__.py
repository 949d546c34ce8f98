"""A compiler of ONNX models to engine plans, and a server of them over Triton's protocols.

    from infer_server import build_engine, load_engine
    build_engine("model.onnx").save("model.plan")
    load_engine("model.plan").run({"input": array})

Importing this package imports nothing else: names are resolved on first access.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer_server.batch.scorer import Scorer
    from infer_server.calibration.target.search import AccuracyTarget
    from infer_server.calibration.workflow import Calibration
    from infer_server.clients.aio import AsyncInferenceClient
    from infer_server.clients.client import InferenceClient
    from infer_server.endpoints.grpc.errors import GrpcStatusError
    from infer_server.engines.compiler.build import EngineBuild, build_engine
    from infer_server.engines.compiler.engine_cache import EngineCache
    from infer_server.engines.compiler.weight_only.scheme import WeightOnly
    from infer_server.engines.loading import load_engine
    from infer_server.engines.runtime.context import ExecutionContext
    from infer_server.engines.runtime.engine import Engine
    from infer_server.server import Server, ServerOptions

_HOMES = {
    "build_engine": "engines.compiler.build", "EngineBuild": "engines.compiler.build",
    "EngineCache": "engines.compiler.engine_cache",
    "WeightOnly": "engines.compiler.weight_only.scheme", "Calibration": "calibration.workflow",
    "AccuracyTarget": "calibration.target.search",
    "load_engine": "engines.loading", "Engine": "engines.runtime.engine",
    "ExecutionContext": "engines.runtime.context",
    "InferenceClient": "clients.client", "AsyncInferenceClient": "clients.aio",
    "Scorer": "batch.scorer", "Server": "server", "ServerOptions": "server",
    "GrpcStatusError": "endpoints.grpc.errors"}
__all__ = ["AccuracyTarget", "AsyncInferenceClient", "Calibration", "Engine", "EngineBuild", "EngineCache",
           "ExecutionContext", "GrpcStatusError", "InferenceClient", "Scorer", "Server", "ServerOptions",
           "WeightOnly", "build_engine", "load_engine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
