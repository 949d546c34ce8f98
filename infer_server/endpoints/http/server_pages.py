"""HTTP handlers for shared memory, the log and trace settings, and the status page at /."""
from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from infer_server.endpoints.http.messages import JSON, HttpRequest, HttpResponse, json_response, member
from infer_server.endpoints.memory_service import MemoryService
from infer_server.endpoints.settings import SettingsService
from infer_server.endpoints.status.snapshot import Snapshots
from infer_server.errors import InvalidRequestError
from infer_server.protocol.protobuf_json import to_json
from infer_server.protos import inference

Answer = Callable[[HttpRequest], Awaitable[HttpResponse]]
# The browser runs and fetches only the page's own files, so that injected text cannot execute.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_FILES = {"/": ("page.html", "text/html; charset=utf-8"), "/status/page.css": ("page.css", "text/css; charset=utf-8"),
          "/status/page.js": ("page.js", "text/javascript; charset=utf-8"),
          "/status/icon.svg": ("icon.svg", "image/svg+xml")}


class ServerPages:
    """Handlers of the paths of the server itself; each makes the call that gRPC has, too."""

    def __init__(self, memory: MemoryService, settings: SettingsService) -> None:
        self._memory, self._settings = memory, settings

    async def memory(self, _: HttpRequest, kind: str, region: str) -> HttpResponse:
        regions = to_json(
            await self._memory.SystemSharedMemoryStatus(inference.SystemSharedMemoryStatusRequest(name=region))
            if kind == "system" else
            await self._memory.CudaSharedMemoryStatus(inference.CudaSharedMemoryStatusRequest(name=region)))["regions"]
        return json_response(list(regions.values()))

    async def register_memory(self, request: HttpRequest, kind: str, region: str) -> HttpResponse:
        body = request.json()
        offset, byte_size = member(body, "offset", int, 0), member(body, "byte_size", int)
        if not 0 <= offset < 1 << 64 or not 0 <= byte_size < 1 << 64:
            raise InvalidRequestError(f"no region has {byte_size} bytes at {offset}")
        if kind == "cuda":
            await self._memory.CudaSharedMemoryRegister(inference.CudaSharedMemoryRegisterRequest(
                name=region, raw_handle=_handle(body), device_id=_device(body), byte_size=byte_size))
            return HttpResponse()
        await self._memory.SystemSharedMemoryRegister(inference.SystemSharedMemoryRegisterRequest(
            name=region, key=member(body, "key", str), offset=offset, byte_size=byte_size))
        return HttpResponse()

    async def unregister_memory(self, _: HttpRequest, kind: str, region: str) -> HttpResponse:
        if kind == "cuda":
            await self._memory.CudaSharedMemoryUnregister(inference.CudaSharedMemoryUnregisterRequest(name=region))
        else:
            await self._memory.SystemSharedMemoryUnregister(inference.SystemSharedMemoryUnregisterRequest(name=region))
        return HttpResponse()

    async def log(self, _: HttpRequest) -> HttpResponse:
        return await self._log(inference.LogSettingsRequest())

    async def set_log(self, request: HttpRequest) -> HttpResponse:
        message = inference.LogSettingsRequest()
        for name, value in _settings(request).items():
            if value is None:
                continue
            field = {bool: "bool_param", int: "uint32_param", str: "string_param"}.get(type(value))
            if field is None or (type(value) is int and not 0 <= value < 1 << 32):
                raise InvalidRequestError(f"log setting '{name}': unexpected {value}")
            setattr(message.settings[name], field, value)
        return await self._log(message)

    async def trace(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        return await self._trace(inference.TraceSettingRequest(model_name=model))

    async def set_trace(self, request: HttpRequest, model: str, version: str) -> HttpResponse:
        message = inference.TraceSettingRequest(model_name=model)
        for name, value in _settings(request).items():          # null clears a setting
            values = value if isinstance(value, list) else [] if value is None else [value]
            message.settings[name].value.extend(map(str, values))
        return await self._trace(message)

    async def _log(self, request: inference.LogSettingsRequest) -> HttpResponse:
        settings = (await self._settings.LogSettings(request)).settings
        return json_response({name: getattr(value, value.WhichOneof("parameter_choice") or "")
                              for name, value in settings.items()})

    async def _trace(self, request: inference.TraceSettingRequest) -> HttpResponse:
        settings = (await self._settings.TraceSetting(request)).settings
        return json_response({name: list(setting.value) if name == "trace_level" else setting.value[0]
                              for name, setting in settings.items()})


def _handle(body: Any) -> bytes:
    try:
        return b64decode(member(member(body, "raw_handle", dict), "b64", str), validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"raw_handle: b64 is no Base64: {error}") from error


def _device(body: Any) -> int:
    number: int = member(body, "device_id", int, 0)
    if not 0 <= number < 1 << 31:
        raise InvalidRequestError(f"device_id: there is no GPU {number}")
    return number


def _settings(request: HttpRequest) -> dict[str, Any]:
    body: Any = request.json()
    if not isinstance(body, dict):
        raise InvalidRequestError("expected a JSON object of settings")
    return body


def status_pages(snapshots: Snapshots) -> dict[str, Answer]:
    """Return the handler of each path of the status page."""
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
