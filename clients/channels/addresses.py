"""The addresses of a channel, and which of them a call goes to.

References
----------
https://github.com/grpc/grpc/blob/master/doc/naming.md
https://github.com/grpc/grpc/blob/master/doc/connection-backoff.md
"""
from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from functools import cached_property

_FIRST_BACKOFF_SECS, _BACKOFF_FACTOR, _MOST_BACKOFF_SECS, _JITTER = 1.0, 1.6, 120.0, 0.2


@dataclass
class Address:
    r"""Address of a server: host and port, or the path of a Unix socket (with "\0" in front: an abstract one)."""
    host: str
    port: int = 0
    path: str = ""
    _failures: int = field(default=0, repr=False)
    _left_out_until: float = field(default=0.0, repr=False)

    @cached_property
    def name(self) -> str:
        """Return the address in the form of URLs."""
        return f"unix:{self.path}" if self.path else f"[{self.host}]:{self.port}" if ":" in self.host else (
            f"{self.host}:{self.port}")

    @property
    def is_left_out(self) -> bool:
        """True while no call goes to the address, because its connection failed."""
        return self._left_out_until > time.monotonic()

    def succeeded(self) -> None:
        self._failures, self._left_out_until = 0, 0.0

    def failed(self) -> None:
        """Leave the address out for a time that grows with each failure in a row."""
        secs = min(_FIRST_BACKOFF_SECS * _BACKOFF_FACTOR ** self._failures, _MOST_BACKOFF_SECS)
        self._failures += 1
        self._left_out_until = time.monotonic() + secs * random.uniform(1 - _JITTER, 1 + _JITTER)


class RoundRobin:
    """Round-robin choice of a channel's addresses."""

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self.addresses = addresses
        self._next = -1

    def next(self, failed: Address | None) -> Address:
        """Return the next address in turn, left out or not, other than `failed`, the address of the last attempt."""
        self._next += 1
        address = self.addresses[self._next % len(self.addresses)]
        return self.next(None) if address is failed else address

    def candidates(self, first: Address) -> list[Address]:
        """Return the addresses to try for a call, starting at `first`; those that are left out come last."""
        at = self.addresses.index(first)
        return sorted(self.addresses[at:] + self.addresses[:at], key=lambda address: address.is_left_out)


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
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        names = names.removeprefix(scheme)
    return tuple(_address(url, name) for name in names.removeprefix("///").split(","))


def _address(url: str, name: str) -> Address:
    host, _, port = name.strip().rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16 or "/" in host:
        raise ValueError(f"'{url}' is not HOST:PORT, HOST:PORT,HOST:PORT,... or unix:PATH")
    return Address(host.strip("[]"), int(port))
