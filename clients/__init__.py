"""Clients of an inference server: synchronous, asyncio, and a load test (clients.load).

    from clients import InferenceClient
"""
from clients.aio import AsyncInferenceClient
from clients.channels.options import Tls
from clients.client import InferenceClient
from clients.errors import ClientError

__all__ = ["AsyncInferenceClient", "ClientError", "InferenceClient", "Tls"]
