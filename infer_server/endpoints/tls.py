"""Encrypted ports: the server's certificate, and whose clients' certificates it asks for."""
from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True)
class Tls:
    """PEM files. Reading them raises OSError; ssl.SSLError is one, too."""
    certificate: Path
    key: Path
    clients: Path | None = None         # the authorities that clients' certificates are from; None: clients need none

    def grpc_credentials(self) -> grpc.ServerCredentials:
        self.context()                  # says what is wrong with the files; gRPC opens no port and says nothing
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
