"""The status page at / and its data: static files, and JSON that its script fetches every two seconds."""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from importlib.resources import files

from infer_server.endpoints.http.messages import JSON, HttpRequest, HttpResponse
from infer_server.endpoints.status.snapshot import Snapshots

Answer = Callable[[HttpRequest], Awaitable[HttpResponse]]
# Only the page's own files run and are fetched: text of others in the page, however it came there, does nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_FILES = {"/": ("page.html", "text/html; charset=utf-8"), "/status/page.css": ("page.css", "text/css; charset=utf-8"),
          "/status/page.js": ("page.js", "text/javascript; charset=utf-8"),
          "/status/icon.svg": ("icon.svg", "image/svg+xml")}


def status_pages(snapshots: Snapshots) -> dict[str, Answer]:
    """Return what answers each path of the page."""
    folder = files("infer_server.endpoints.status").joinpath("static")
    pages: dict[str, Answer] = {path: partial(_static, HttpResponse(
        (folder.joinpath(name).read_bytes(),), HTTPStatus.OK, content_type, _HEADERS))
        for path, (name, content_type) in _FILES.items()}
    return {**pages, "/status/data.json": partial(_data, snapshots.current),
            "/status/history.json": partial(_data, snapshots.past)}


async def _static(response: HttpResponse, _: HttpRequest) -> HttpResponse:
    return response


async def _data(make: Callable[[], Awaitable[bytes]], _: HttpRequest) -> HttpResponse:
    return HttpResponse((await make(),), HTTPStatus.OK, JSON, {
        "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
