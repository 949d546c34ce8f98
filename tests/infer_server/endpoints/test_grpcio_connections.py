"""Tests of what is done to gRPC's connections from outside the library."""
from __future__ import annotations

import socket

from infer_server.endpoints.grpc.grpcio.connections import _GOAWAY, _is_writable, _send_goaway
from infer_server.protos.http2 import GoAwayReceived, client_connection, server_connection


def test_a_connection_whose_client_does_not_read_is_not_writable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()), \
            listener.accept()[0] as connection:
        assert _is_writable(connection)
        connection.setblocking(False)
        try:
            while True:
                connection.send(bytes(1 << 16))
        except BlockingIOError:
            assert not _is_writable(connection)


def test_goaway_is_a_frame_that_lets_open_calls_go_on() -> None:
    client, server = client_connection(1 << 16), server_connection(100, 1 << 16)
    stream = client.send_request([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x")],
                                 end_stream=True)
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    client.events()
    server_socket, client_socket = socket.socketpair()
    with server_socket, client_socket:
        _send_goaway(server_socket)
        assert client_socket.recv(100) == _GOAWAY
    client.receive_data(_GOAWAY)
    (event,) = client.events()
    assert isinstance(event, GoAwayReceived) and event.last_stream_id >= stream and not event.error_code
