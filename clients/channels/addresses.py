"""The addresses of a channel, and the choice of one for each call.

References
----------
https://github.com/grpc/grpc/blob/master/doc/naming.md
https://github.com/grpc/grpc/blob/master/doc/connection-backoff.md
"""
from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from infer_server.clients.channels.status import StatusError

log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECS, _BACKOFF_FACTOR, _MAX_BACKOFF_SECS, _JITTER = 1.0, 1.6, 120.0, 0.2
_MAX_FAILURES = 100             # failures counted: the backoff of thousands would overflow a float
DNS = "dns:"                    # scheme of a name whose addresses are all used
LOOK_UP_SECS = 10.0             # age at which the addresses of a name are looked up again
_AFTER_FAILURE_SECS = 1.0       # age at which they are, after a connection failed: a replacement server may be listed
_TRY_SECS = 1.0                 # time for an address to be connected to while another one may be tried


@dataclass
class Address:
    r"""Address of a server: host and port, or the path of a Unix socket (with "\0" in front: an abstract one)."""
    host: str
    port: int = 0
    path: str = ""
    _failures: int = field(default=0, repr=False)
    _ejected_until: float = field(default=0.0, repr=False)

    @cached_property
    def name(self) -> str:
        """Return the address in the form of URLs."""
        return f"unix:{self.path}" if self.path else f"[{self.host}]:{self.port}" if ":" in self.host else (
            f"{self.host}:{self.port}")

    @property
    def is_ejected(self) -> bool:
        """True while the address is skipped, because a connection failed, if others are available."""
        return self._ejected_until > time.monotonic()

    def succeeded(self) -> None:
        self._failures, self._ejected_until = 0, 0.0

    def failed(self) -> None:
        """Eject the address for a time that grows with each failure in a row."""
        secs = min(_FIRST_BACKOFF_SECS * _BACKOFF_FACTOR ** self._failures, _MAX_BACKOFF_SECS)
        self._failures = min(self._failures + 1, _MAX_FAILURES)
        self._ejected_until = time.monotonic() + secs * random.uniform(1 - _JITTER, 1 + _JITTER)

    def mark_unhealthy(self) -> None:
        """Eject the address for a short time: its server accepts connections, but its health check fails."""
        self._failures = 0
        self.failed()


class RoundRobin:
    """Round-robin choice of a channel's addresses."""

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self.addresses = addresses
        self._next = -1

    def next(self, failed: Address | None) -> Address:
        """Return the next address in turn, left out or not, other than `failed`, the address of the last attempt."""
        self._next += 1
        addresses = self.addresses
        address = addresses[self._next % len(addresses)]
        return self.next(None) if address is failed else address

    def candidates(self, first: Address) -> list[Address]:
        """Return the addresses to try for a call, starting at `first`; ejected ones come last."""
        addresses = self.addresses
        at = addresses.index(first) if first in addresses else 0
        return sorted(addresses[at:] + addresses[:at], key=lambda address: address.is_ejected)


class DnsName(RoundRobin):
    """Round robin over the addresses of a DNS name, such as a headless Service. Safe to use from several threads."""

    def __init__(self, name: Address) -> None:
        super().__init__(())
        self._name = name
        self._lock = threading.Lock()
        self._due = float("-inf")
        self._looked_up_at = float("-inf")
        self.removed: list[Address] = []        # addresses that the name has lost, whose connections are to be closed

    def next(self, failed: Address | None) -> Address:
        """Return the next address as RoundRobin does, and start a look-up on a thread if one is due."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + LOOK_UP_SECS
            threading.Thread(target=self._try_look_up, name="look-up of servers", daemon=True).start()
        return super().next(failed)

    def has_failed(self) -> None:
        """Look the name up soon: a connection to one of its addresses has failed."""
        self._due = min(self._due, max(time.monotonic(), self._looked_up_at + _AFTER_FAILURE_SECS))

    def look_up(self) -> None:
        """Look the name up now. Raises StatusError if it has no address."""
        with self._lock:
            self._looked_up_at = time.monotonic()
            self._due = self._looked_up_at + LOOK_UP_SECS
            try:
                hosts = addresses_of(self._name.host, self._name.port)
            except OSError as error:
                raise StatusError("UNAVAILABLE", f"{self._name.name}: {error}") from error
            known = {address.host: address for address in self.addresses}
            addresses = tuple(known.get(host) or Address(host, self._name.port) for host in hosts)
            self.removed += [address for address in self.addresses if address not in addresses]
            self.addresses = addresses

    def _try_look_up(self) -> None:
        """Look the name up; the former addresses stay if that fails."""
        try:
            self.look_up()
        except StatusError as error:
            log.warning("the addresses of servers cannot be looked up again: %s", error)


def addresses_of(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a name, in the order of the resolver. Raises OSError."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in results))


def connect_limit(secs: float, others: Sequence[Address]) -> float:
    """Return the time for an address to be connected to, shorter than `secs` if one of `others` may be tried."""
    return min(secs, _TRY_SECS) if any(not other.is_ejected for other in others) else secs


def parse_url(url: str) -> tuple[Address, ...]:
    """Return the addresses of a comma-separated list of "HOST:PORT", or of gRPC's "unix:PATH".

    Raises ValueError.
    """
    for scheme in ("unix-abstract:", "unix:"):
        if url.startswith(scheme):
            path = url.removeprefix(scheme)
            path = "/" + path.lstrip("/") if path.startswith("//") else path
            return (Address("localhost", path=path if scheme == "unix:" else f"\0{path}"),)
    names = url
    for scheme in (DNS, "ipv4:", "ipv6:"):
        names = names.removeprefix(scheme)
    return tuple(_address(url, name) for name in names.removeprefix("///").split(","))


def _address(url: str, name: str) -> Address:
    host, _, port = name.strip().rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16 or "/" in host:
        raise ValueError(f"'{url}' is not HOST:PORT, HOST:PORT,HOST:PORT,..., dns:///NAME:PORT or unix:PATH")
    return Address(host.strip("[]"), int(port))
