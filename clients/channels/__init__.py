"""Channels: unary gRPC calls as bytes, on libnghttp2 or grpcio, for threads or for asyncio."""
from __future__ import annotations

import logging
from typing import Protocol

from infer_server.clients.channels.options import ChannelOptions, Message, Metadata
from infer_server.clients.channels.status import StatusError
from infer_server.protos import http2

__all__ = ["AsyncChannel", "Channel", "ChannelOptions", "Metadata", "StatusError", "open_async_channel", "open_channel"]

log = logging.getLogger(__name__)


class Channel(Protocol):
    """Channel for calls from any thread."""

    def call(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = ()
             ) -> bytes:
        """Return the serialised response. Raises StatusError."""

    def close(self) -> None: ...


class AsyncChannel(Protocol):
    """Channel for calls on one event loop."""

    async def call(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = ()
                   ) -> bytes:
        """Return the serialised response. Raises StatusError."""

    async def close(self) -> None: ...


def open_channel(url: str, options: ChannelOptions) -> Channel:
    """Create a channel to the servers of `url`; it connects when it is first used."""
    if _uses_nghttp2(options):
        from infer_server.clients.channels import blocking
        return blocking.BlockingChannel(url, options)
    from infer_server.clients.channels import grpcio
    return grpcio.GrpcioChannel(url, options)


def open_async_channel(url: str, options: ChannelOptions) -> AsyncChannel:
    """Create a channel to the servers of `url` for the event loop that first uses it."""
    if _uses_nghttp2(options):
        from infer_server.clients.channels import aio
        return aio.AioChannel(url, options)
    from infer_server.clients.channels import grpcio
    return grpcio.AsyncGrpcioChannel(url, options)


def _uses_nghttp2(options: ChannelOptions) -> bool:
    if options.transport is None and not http2.is_installed:
        log.warning("ngh2 is not installed: gRPC goes over grpcio")
    return http2.is_installed if options.transport is None else options.transport == "nghttp2"
