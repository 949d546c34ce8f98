"""A small HTTP/1.1 server of GET pages: metrics, and health on the port where HTTP inference will be."""
from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 16 << 10
_TIMEOUT_SECS = 10.0            # for a client to say what it wants


@dataclass(frozen=True)
class Page:
    body: str = ""
    content_type: str = "application/json"
    status: HTTPStatus = HTTPStatus.OK


def error_page(status: HTTPStatus, message: str) -> Page:
    """An error as Triton's HTTP endpoint words it."""
    return Page(json.dumps({"error": message}), status=status)


async def serve_pages(host: str, port: int, pages: Mapping[str, Callable[[], Page]], otherwise: Page) -> asyncio.Server:
    """Serves `pages` by path; any other path or method gets `otherwise`. Raises OSError if the port is taken."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            page = await _page(reader, pages, otherwise)
            head = (f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n"
                    f"Content-Length: {len(page.body.encode())}\r\nConnection: close\r\n\r\n")
            writer.write(head.encode() + page.body.encode())
            await writer.drain()
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("HTTP client went away: %s", error)
        finally:
            writer.close()

    return await asyncio.start_server(serve, host, port, limit=_MAX_HEAD_BYTES)


async def _page(reader: asyncio.StreamReader, pages: Mapping[str, Callable[[], Page]], otherwise: Page) -> Page:
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_SECS)
    except asyncio.LimitOverrunError:
        return error_page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_HEAD_BYTES} bytes of headers")
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3:
        return error_page(HTTPStatus.BAD_REQUEST, "not an HTTP request")
    method, target, _ = words
    page = pages.get(target.partition("?")[0]) if method == "GET" else None
    return page() if page else otherwise
