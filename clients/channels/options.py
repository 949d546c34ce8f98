"""Options of a channel."""
from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from infer_server.clients.channels.addresses import DNS
from infer_server.clients.channels.service_config import ServiceConfig, default_service_config

Message = bytes | tuple[bytes, ...]            # serialised, whole or in parts
Metadata = tuple[tuple[str, str | bytes], ...]


def is_balanced(url: str) -> bool:
    """Return True if a URL names several servers: a list of addresses, or a DNS name with the scheme dns:."""
    return "," in url or url.startswith(DNS)


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS.

    Parameters ---------- root_certificates : certificates of authorities that may sign the server's certificate; None
    for the system's. certificate, private_key : the client's own, for servers that require them.
    """
    root_certificates: str | Path | None = None
    certificate: str | Path | None = None
    private_key: str | Path | None = None

    def context(self) -> ssl.SSLContext:
        """Create the SSL context. Raises OSError with the name of an unusable file."""
        try:
            context = ssl.create_default_context(cafile=self.root_certificates)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.private_key)
        except OSError as error:                # ssl.SSLError, too
            raise OSError(f"the certificates cannot be used ({self}): {error}") from error
        return context


@dataclass(frozen=True)
class ChannelOptions:
    """Options of a channel; the clients take them as keyword arguments.

    Parameters
    ----------
    max_message_bytes : maximum size of sent and received messages, decompressed; -1: unlimited.
    tls : files, or a context of the standard library, which only libnghttp2 supports; None: no TLS.
    service_config : retries, timeouts and health checks in gRPC's form, as a mapping or as JSON; None: that of
        default_service_config() for several servers, an empty one for a single server.
    metadata : sent with every call; the values of names that end with -bin are bytes.
    compression : "gzip" compresses requests. Responses may always be compressed.
    connect_secs : seconds for a connection to be made.
    keepalive_secs : seconds without a byte, while a call is open, after which the server is pinged; None: never.
        Servers end connections that ping more often than they allow (by default every 300 s); the time then doubles.
    keepalive_timeout_secs : seconds after a ping without a byte after which the connection is lost.
    transport : "nghttp2" or "grpcio"; None: nghttp2 where ngh2 is installed.

    References
    ----------
    https://github.com/grpc/grpc/blob/master/doc/service_config.md
    https://github.com/grpc/grpc/blob/master/doc/keepalive.md
    """
    max_message_bytes: int = -1
    tls: Tls | ssl.SSLContext | None = None
    service_config: Mapping[str, Any] | str | None = None
    metadata: Metadata = ()
    compression: Literal["gzip"] | None = None
    connect_secs: float = 20.0
    keepalive_secs: float | None = None
    keepalive_timeout_secs: float = 20.0
    transport: Literal["nghttp2", "grpcio"] | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("compression", self.compression, ("gzip",)),
                                   ("transport", self.transport, ("nghttp2", "grpcio"))):
            if value is not None and value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        object.__setattr__(self, "metadata", tuple(map(tuple, self.metadata)))

    def config(self, is_balanced: bool) -> ServiceConfig:
        """Return the service config. Raises ValueError that names what is wrong with it."""
        if self.service_config is None:
            return ServiceConfig.read(default_service_config() if is_balanced else {})
        return ServiceConfig.read(self.service_config)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the SSL context for HTTP/2."""
        context = self.tls.context() if isinstance(self.tls, Tls) else self.tls
        if context:
            context.set_alpn_protocols(["h2"])
        return context
