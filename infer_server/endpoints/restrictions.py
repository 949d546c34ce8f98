"""Calls that only clients with a secret may make: each category of them may ask for a header with a value.

Categories and their names are Triton's, so that its command lines go on meaning the same.
"""
from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from infer_server.errors import RestrictedError

CATEGORIES = ("health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics",
              "trace", "logging")
OF_CALL = {                     # of every call of the service, by its name
    "ServerLive": "health", "ServerReady": "health", "ModelReady": "health",
    "ServerMetadata": "metadata", "ModelMetadata": "metadata",
    "ModelInfer": "inference", "ModelStreamInfer": "inference",
    "SystemSharedMemoryStatus": "shared-memory", "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory", "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "ModelConfig": "model-config",
    "RepositoryIndex": "model-repository", "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "ModelStatistics": "statistics", "TraceSetting": "trace", "LogSettings": "logging",
}


@dataclass(frozen=True)
class Secret:
    header: str                 # in lower case
    value: str = field(repr=False)


@dataclass(frozen=True)
class Restrictions:
    """Of a protocol: which categories ask for what."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    prefix: str = ""            # of the header's name in this protocol

    def check(self, category: str, header: Callable[[str], str | bytes | None]) -> None:
        """header: the value of a header of the call, by its name. Raises RestrictedError."""
        secret = self.secrets.get(category)
        if secret is None:
            return
        name = self.prefix + secret.header
        given = header(name) or ""
        if not hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), secret.value.encode()):
            what = "protocol" if self.prefix else "API"         # in Triton's words, of gRPC and of HTTP
            raise RestrictedError(f"This {what} is restricted, expecting header '{name}'")


def parsed(texts: Iterable[str]) -> dict[str, Secret]:
    """The secrets by category, of texts "<category>,...:<header>=<value>". Raises ValueError."""
    secrets: dict[str, Secret] = {}
    for text in texts:
        names, colon, pair = text.partition(":")
        header, equals, value = pair.partition("=")
        if not (colon and equals and header and value):
            raise ValueError(f"'{text}': expected <category>,...:<header>=<value>")
        for name in names.split(","):
            if name not in CATEGORIES:
                raise ValueError(f"'{name}' is none of {', '.join(CATEGORIES)}")
            if name in secrets:
                raise ValueError(f"'{name}' is restricted twice")
            secrets[name] = Secret(header.lower(), value)
    return secrets
