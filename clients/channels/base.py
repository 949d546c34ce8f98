"""State that the thread and asyncio channels on libnghttp2 share."""
from __future__ import annotations

import functools
import math

from infer_server.clients.channels.addresses import RoundRobin, parse_url
from infer_server.clients.channels.call import RequestEncoder
from infer_server.clients.channels.connection import Keepalive
from infer_server.clients.channels.options import ChannelOptions
from infer_server.clients.channels.retry import Attempts, Throttle


class ChannelBase:
    """Addresses, options and policies of a channel."""

    def __init__(self, url: str, options: ChannelOptions) -> None:
        """Parse the URL and the options. Raises ValueError, or OSError for unusable certificates."""
        self._addresses = RoundRobin(parse_url(url))
        self._options, self._config = options, options.config()
        self._throttle = Throttle(self._config)
        self._tls = options.tls_context()
        self._encoder = RequestEncoder(self._addresses.addresses[0].name, options)
        self._keepalive = Keepalive(math.inf if options.keepalive_secs is None else options.keepalive_secs,
                                    options.keepalive_timeout_secs)
        self._method = functools.cache(self._config.method)
        self._is_closed = False

    def _attempts(self, path: str, timeout: float | None) -> Attempts:
        return Attempts(self._method(path), self._throttle, timeout)
