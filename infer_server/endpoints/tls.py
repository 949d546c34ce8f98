"""TLS of ports: the server's certificate, and the authorities of client certificates."""
from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True)
class ServerTls:
    """PEM files of a TLS port. Reading them raises OSError, of which ssl.SSLError is a subclass."""
    certificate: Path
    key: Path
    clients: Path | None = None         # authorities of client certificates; None: clients need no certificate

    def grpc_credentials(self) -> grpc.ServerCredentials:
        self.context()                  # reports errors in the files; gRPC would fail without a reason
        roots = self.clients.read_bytes() if self.clients else None
        return grpc.ssl_server_credentials([(self.key.read_bytes(), self.certificate.read_bytes())], roots,
                                           require_client_auth=roots is not None)

    def context(self, protocols: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
        """Return a context that offers these protocols by ALPN."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.clients:
                context.load_verify_locations(self.clients)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            files = ", ".join(str(file) for file in (self.certificate, self.key, self.clients) if file)
            raise OSError(f"certificates cannot be used ({files}): {error.strerror or error}") from error
        return context
