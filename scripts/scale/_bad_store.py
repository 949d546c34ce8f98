"""Proxy in front of an S3 server that makes it slow, or closes connections within a body."""
from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_LEFT_OUT = ("transfer-encoding", "content-length", "connection")


class BadStore:
    """Faults of the proxy, which may be changed while it runs."""

    def __init__(self, port: int) -> None:
        """Pass requests on to a server on this machine."""
        self.server_port, self.port = port, 0
        self.delay_secs = 0.0       # delay of each response
        self.is_away = False        # connections are closed without a response
        self.requests = 0


@contextmanager
def bad_store(server_port: int) -> Iterator[BadStore]:
    """Run the proxy on a free port until the block ends."""
    store = BadStore(server_port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            store.requests += 1
            if store.is_away:
                self.close_connection = True
                return
            time.sleep(store.delay_secs)
            connection = http.client.HTTPConnection("127.0.0.1", store.server_port)
            length = int(self.headers.get("Content-Length") or 0)
            connection.request(self.command, self.path, self.rfile.read(length) if length else None, dict(self.headers))
            response = connection.getresponse()
            body = response.read()
            connection.close()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _LEFT_OUT:
                    self.send_header(name, value)
            self.send_header("Content-Length", response.getheader("Content-Length") or str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    store.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
