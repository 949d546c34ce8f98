"""Access control of calls: secrets in headers, and protection of the HTTP port against foreign web pages.

Each category of calls may require a header with a secret value. Categories have Triton's names, so that its command
lines keep their meaning.

A web page that a user of this machine visits must not change the server. A browser sends requests that need no
preflight to any address (cross-site request forgery), and any request to the page's own host name, which may have been
pointed at this machine (DNS rebinding). HostCheck rejects both.

https://fetch.spec.whatwg.org/#http-cors-protocol
"""
from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from infer_server.errors import ContentTypeError, RestrictedError

CATEGORIES = ("health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics",
              "trace", "logging")
CATEGORY_BY_CALL = {            # category of every call of the service
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
    """Secrets that the categories of calls require in one protocol."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    prefix: str = ""            # prefix of the header's name in this protocol

    def check(self, category: str, header: Callable[[str], str | bytes | None]) -> None:
        """Raise RestrictedError if a call lacks the secret of its category. header: returns the value of a header."""
        secret = self.secrets.get(category)
        if secret is None:
            return
        name = self.prefix + secret.header
        value = header(name) or ""
        if not hmac.compare_digest(value if isinstance(value, bytes) else value.encode(), secret.value.encode()):
            interface = "protocol" if self.prefix else "API"    # Triton's messages for gRPC and HTTP
            raise RestrictedError(f"This {interface} is restricted, expecting header '{name}'")


class HostCheck:
    """Check that rejects HTTP calls that a browser makes for a foreign page."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        """Allow host names in addition to this machine's: "infer.example.org", "*.example.org" or "*" for any."""
        self._allowed = {_plain(name) for name in allowed}
        self._own = {"localhost", _plain(socket.gethostname())}

    def check(self, headers: Mapping[str, str]) -> None:
        """Check a call that changes the server by its headers, whose names are in lower case.

        Raises RestrictedError if its Host is not this server's or it comes from a page of another site,
        ContentTypeError if a page could send its type of body without a preflight.
        """
        host = headers.get("host", "")
        if host and not self._allows(_name_of(host)):
            raise RestrictedError(f"Host '{host[:_MAX_QUOTED]}' is not a name of this server; if it is one, start the "
                                  f"server with --allowed-hosts {_name_of(host)[:_MAX_QUOTED]}")
        origin = headers.get("origin") or _origin_of(headers.get("referer", ""))
        if origin and not self._is_own(origin, host):
            raise RestrictedError(f"a page of '{origin[:_MAX_QUOTED]}' may not change this server; if it may, start "
                                  "the server with --allowed-hosts and its host name")
        if not origin and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise RestrictedError("a page of another site may not change this server")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in _FORMS:
            raise ContentTypeError(f"Content-Type '{kind}' is not served here; send application/json")

    def _allows(self, name: str) -> bool:
        """Return True for a host name that foreign DNS cannot point at this machine.

        These are addresses, names of one label or in private zones, this machine's own name and the allowed names.
        """
        return ("." not in name or name in self._own or name.endswith(_PRIVATE_ZONES) or _is_address(name)
                or self._lists(name))

    def _lists(self, name: str) -> bool:
        labels = name.split(".")
        above = {"*." + ".".join(labels[count:]) for count in range(1, len(labels))}
        return bool(self._allowed & {"*", name, *above})

    def _is_own(self, origin: str, host: str) -> bool:
        """Return True for a page of this server itself, or of an allowed host."""
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            return False
        return bool(netloc) and (_plain(netloc) == _plain(host) or self._lists(_name_of(netloc)))


# Content types of HTML forms. The third, application/x-www-form-urlencoded, is omitted because `curl -d` sends it;
# browsers send an Origin with it.
_FORMS = ("text/plain", "multipart/form-data")
_PRIVATE_ZONES = (".localhost", ".internal", ".svc", ".cluster.local")      # the last two are Kubernetes's
_MAX_QUOTED = 100               # maximum number of a client's characters in an error


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _name_of(host: str) -> str:
    """Return the name or address in a Host header, without its port and brackets."""
    host = _plain(host)
    if _is_address(host):
        return host
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return _plain(name) if name and port.isdecimal() else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _origin_of(referer: str) -> str:
    try:
        parts = urlsplit(referer)
    except ValueError:
        return referer
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else ""


def parsed(texts: Iterable[str]) -> dict[str, Secret]:
    """Parse texts "<category>,...:<header>=<value>" to secrets by category. Raises ValueError."""
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
