"""Channels on grpcio, for machines without ngh2, or if grpcio is requested."""
from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from infer_server.clients.channels.addresses import parse_url
from infer_server.clients.channels.call import whole
from infer_server.clients.channels.options import ChannelOptions, Message, Metadata, Tls, is_balanced
from infer_server.clients.channels.status import StatusError


class GrpcioChannel:
    """Makes calls from any thread."""

    def __init__(self, url: str, options: ChannelOptions) -> None:
        self._channel = _open(grpc, url, options)
        self._metadata = options.metadata
        self._calls: dict[str, Callable[..., Any]] = {}

    def call(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = ()
             ) -> bytes:
        """Return the serialised response. Raises StatusError."""
        if path not in self._calls:
            self._calls[path] = self._channel.unary_unary(path)
        try:
            response: bytes = self._calls[path](whole(message), timeout=timeout,
                                            metadata=(*self._metadata, *metadata))
            return response
        except grpc.RpcError as error:
            raise _status_of(error) from error

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcioChannel:
    """Makes calls on one event loop."""

    def __init__(self, url: str, options: ChannelOptions) -> None:
        self._channel = _open(grpc.aio, url, options)
        self._metadata = options.metadata
        self._calls: dict[str, Callable[..., Any]] = {}

    async def call(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = ()
                   ) -> bytes:
        """Return the serialised response. Raises StatusError."""
        if path not in self._calls:
            self._calls[path] = self._channel.unary_unary(path)
        try:
            response: bytes = await self._calls[path](whole(message), timeout=timeout,
                                                  metadata=(*self._metadata, *metadata))
            return response
        except grpc.RpcError as error:
            raise _status_of(error) from error

    async def close(self) -> None:
        await self._channel.close()


def _status_of(error: Any) -> StatusError:
    return StatusError(error.code().name, error.details() or "")


def _open(library: Any, url: str, options: ChannelOptions) -> Any:
    """Open a channel of grpc or of grpc.aio."""
    arguments: dict[str, Any] = {"grpc.max_send_message_length": options.max_message_bytes,
                                 "grpc.max_receive_message_length": options.max_message_bytes}
    target, document = url, dict(options.config(is_balanced(url)).document)
    if is_balanced(url):
        document.setdefault("loadBalancingConfig", [{"round_robin": {}}])
    if "," in url:                                  # gRPC accepts several addresses only as numbers
        addresses = [(socket.gethostbyname(address.host), address.port) for address in parse_url(url)]
        target = "ipv4:" + ",".join(f"{host}:{port}" for host, port in addresses)
    arguments["grpc.service_config"] = json.dumps(document)
    if options.keepalive_secs is not None:
        arguments["grpc.keepalive_time_ms"] = round(options.keepalive_secs * 1e3)
        arguments["grpc.keepalive_timeout_ms"] = round(options.keepalive_timeout_secs * 1e3)
    compression = grpc.Compression.Gzip if options.compression else None
    if options.tls is None:
        return library.insecure_channel(target, options=list(arguments.items()), compression=compression)
    return library.secure_channel(target, _credentials(options.tls), options=list(arguments.items()),
                                  compression=compression)


def _credentials(tls: Any) -> grpc.ChannelCredentials:
    if not isinstance(tls, Tls):
        raise ValueError("grpcio takes certificates as files: tls=Tls(...) in place of an SSLContext")
    roots, chain, key = (path and Path(path).read_bytes()
                         for path in (tls.root_certificates, tls.certificate, tls.private_key))
    return grpc.ssl_channel_credentials(roots, key, chain)
