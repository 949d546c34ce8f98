"""Clients of an inference server: synchronous, asyncio, and a load test (infer_server.clients.load).

    from infer_server.clients import InferenceClient
"""
from infer_server.clients.aio import AsyncInferenceClient
from infer_server.clients.channels.options import Tls
from infer_server.clients.channels.service_config import default_service_config
from infer_server.clients.client import InferenceClient
from infer_server.clients.errors import ClientError

__all__ = ["AsyncInferenceClient", "ClientError", "InferenceClient", "Tls", "default_service_config"]
