"""A small HTTP/1.1 server of GET pages: metrics, and health on the port where HTTP inference will be."""
from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import unquote

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 16 << 10
_BACKLOG = 1024                 # connections that were not accepted yet
_TIMEOUT_SECS = 10.0            # for a client to say what it wants


@dataclass(frozen=True)
class Page:
    body: str = ""
    content_type: str = "application/json"
    status: HTTPStatus = HTTPStatus.OK


def error_page(status: HTTPStatus, message: str) -> Page:
    """An error as Triton's HTTP endpoint words it."""
    return Page(json.dumps({"error": message}), status=status)


async def serve_pages(host: str, port: int, pages: Callable[[str], Page | None], otherwise: Page) -> asyncio.Server:
    """Serves GET and HEAD of `pages`, a function of the path; what has no page, and other methods, get `otherwise`.

    Raises OSError if the port is taken.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            page, body = await _page(reader, pages, otherwise)
            head = (f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n"
                    f"Content-Length: {len(page.body.encode())}\r\nConnection: close\r\n\r\n")
            writer.write(head.encode() + body.encode())
            await writer.drain()
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("HTTP client went away: %s", error)
        finally:
            writer.close()

    if ":" in host:                     # asyncio itself would take :: for IPv6 alone; gRPC takes it for both
        ipv6 = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=host == "::")
        return await asyncio.start_server(serve, sock=ipv6, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG)
    return await asyncio.start_server(serve, host, port, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG)


async def _page(reader: asyncio.StreamReader, pages: Callable[[str], Page | None],
                otherwise: Page) -> tuple[Page, str]:
    """The page that is asked for, and the body to send: none for HEAD."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_SECS)
    except asyncio.LimitOverrunError:
        page = error_page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_HEAD_BYTES} bytes of headers")
        return page, page.body
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3:
        page = error_page(HTTPStatus.BAD_REQUEST, "not an HTTP request")
        return page, page.body
    method, target, _ = words
    page = (pages(unquote(target.partition("?")[0])) if method in ("GET", "HEAD") else None) or otherwise
    return page, "" if method == "HEAD" else page.body
