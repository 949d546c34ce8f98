"""State that the thread and asyncio channels on libnghttp2 share."""
from __future__ import annotations

import functools
import math

from infer_server.clients.channels.addresses import DNS, Address, DnsName, RoundRobin, parse_url
from infer_server.clients.channels.call import RequestEncoder
from infer_server.clients.channels.connection import Keepalive
from infer_server.clients.channels.options import ChannelOptions, is_balanced
from infer_server.clients.channels.retry import Attempts, Throttle


class ChannelBase:
    """Addresses, options and policies of a channel."""

    def __init__(self, url: str, options: ChannelOptions) -> None:
        """Parse the URL and the options. Raises ValueError, or OSError for unusable certificates."""
        addresses = parse_url(url)
        if url.startswith(DNS) and len(addresses) > 1:
            raise ValueError(f"'{url}' has several names: {DNS}///NAME:PORT has one, HOST:PORT,HOST:PORT several")
        self._dns = DnsName(addresses[0]) if url.startswith(DNS) else None
        self._addresses = self._dns or RoundRobin(addresses)
        self._options, self._config = options, options.config(is_balanced(url))
        self._throttle = Throttle(self._config)
        self._tls = options.tls_context()
        self._encoder = RequestEncoder(addresses[0].name, options)
        self._tls_host = addresses[0].host if self._dns else None       # None: the host of each address
        self._keepalive = Keepalive(math.inf if options.keepalive_secs is None else options.keepalive_secs,
                                    options.keepalive_timeout_secs)
        self._method = functools.cache(self._config.method)
        self._is_closed = False

    def _failed(self, address: Address, is_connected: bool) -> None:
        """Leave an address out whose connection failed, or whose server is not serving."""
        if is_connected:
            address.mark_unhealthy()
        else:
            address.failed()
        if self._dns:
            self._dns.has_failed()

    def _attempts(self, path: str, timeout: float | None) -> Attempts:
        return Attempts(self._method(path), self._throttle, timeout)
