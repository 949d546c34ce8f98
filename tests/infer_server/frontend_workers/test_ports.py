"""Processes of one server share its ports; other servers cannot use them."""
from __future__ import annotations

import socket
from contextlib import closing

import pytest

from infer_server.frontend_workers.ports import Reserved
from scripts.testing.numpy_engine import TIMEOUT_SECS


def listening(port: int) -> socket.socket:
    """Listen on a port as a frontend worker does."""
    return socket.create_server(("127.0.0.1", port), reuse_port=True)


def test_a_port_that_another_server_has_reserved_cannot_be_had() -> None:
    """Both servers may start at the same time, so a reserved port is refused even before the other's workers listen."""
    with closing(Reserved("127.0.0.1", 0)) as first:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{first.port}: Address already in use"):
            Reserved("127.0.0.1", first.port)
        with listening(first.port), listening(first.port):
            with pytest.raises(OSError, match="Address already in use"):
                Reserved("127.0.0.1", first.port)
            with pytest.raises(OSError, match="Address already in use"):
                socket.create_server(("127.0.0.1", first.port)).close()
    Reserved("127.0.0.1", first.port).close()


def test_a_port_is_had_again_whose_connections_the_system_has_not_forgotten() -> None:
    with (closing(Reserved("127.0.0.1", 0)) as first, listening(first.port) as worker,
          socket.create_connection(("127.0.0.1", first.port), TIMEOUT_SECS) as client):
        worker.accept()[0].close()          # who closes first waits for what may still come
        assert client.recv(1) == b""
    with closing(Reserved("127.0.0.1", first.port)) as second, listening(second.port):
        pass
