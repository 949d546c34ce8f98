"""HTTP handlers for models and the model repository."""
from __future__ import annotations

import base64
from http import HTTPStatus
from typing import Any

from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, json_response, member
from infer_server.endpoints.service import ModelService
from infer_server.errors import InvalidRequestError
from infer_server.protocol.json_documents import LARGE_BYTES, read_members
from infer_server.protocol.json_values import JsonArray, Steps
from infer_server.protocol.parameters import set_parameter
from infer_server.protocol.protobuf_json import to_json
from infer_server.protos import inference
from infer_server.repository.overrides import PREFIX
from infer_server.workers import StepRunner

_BASE64_BYTES = 256 << 10       # characters decoded in one step; a multiple of four


class ModelPages:
    """Handlers of the paths of models and the repository; each makes the call that gRPC has, too."""

    def __init__(self, models: ModelService, steps: StepRunner) -> None:
        """Take the calls, and the runner that parses large bodies with the files of a model."""
        self._models, self._steps = models, steps

    async def server(self, _: HttpRequest) -> HttpResponse:
        return json_response(to_json(await self._models.ServerMetadata(inference.ServerMetadataRequest())))

    async def live(self, _: HttpRequest) -> HttpResponse:
        return _probe("live", (await self._models.ServerLive(inference.ServerLiveRequest())).live)

    async def ready(self, _: HttpRequest) -> HttpResponse:
        return _probe("ready", (await self._models.ServerReady(inference.ServerReadyRequest())).ready)

    async def model_ready(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        await self._models.check_ready(model, version)
        return json_response({"name": model, "ready": True})

    async def metadata(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        request = inference.ModelMetadataRequest(name=model, version=version)
        return json_response(to_json(await self._models.ModelMetadata(request)))

    async def config(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        request = inference.ModelConfigRequest(name=model, version=version)
        return json_response(to_json(await self._models.ModelConfig(request))["config"])

    async def statistics(self, _: HttpRequest, model: str = "", version: str = "") -> HttpResponse:
        request = inference.ModelStatisticsRequest(name=model, version=version)
        return json_response(to_json(await self._models.ModelStatistics(request)))

    async def index(self, request: HttpRequest, repository: str) -> HttpResponse:
        ready = bool(member(request.json(), "ready", bool, False))
        message = inference.RepositoryIndexRequest(repository_name=repository, ready=ready)
        return json_response([{name: value for name, value in to_json(entry).items() if value or name == "name"}
                              for entry in (await self._models.RepositoryIndex(message)).models])

    async def load(self, request: HttpRequest, repository: str, model: str) -> HttpResponse:
        message = inference.RepositoryModelLoadRequest(repository_name=repository, model_name=model)
        body = request.body
        _set_parameters(message.parameters, await self._steps.run(_read(body)) if len(body) > LARGE_BYTES
                        else request.json())
        await self._models.RepositoryModelLoad(message)
        return HttpResponse()

    async def unload(self, request: HttpRequest, repository: str, model: str) -> HttpResponse:
        message = inference.RepositoryModelUnloadRequest(repository_name=repository, model_name=model)
        _set_parameters(message.parameters, request.json())
        await self._models.RepositoryModelUnload(message)
        return HttpResponse()


def _probe(field: str, holds: bool) -> HttpResponse:
    """Return the response to a health probe: Triton's clients read the status, KServe's the body."""
    status = HTTPStatus.OK if holds else HTTPStatus.SERVICE_UNAVAILABLE
    return json_response({field: holds})._replace(status=status)


def _set_parameters(parameters: Any, body: Any) -> None:
    """Copy the member "parameters" of a load or unload request to a protobuf map."""
    for name, value in member(body, "parameters", dict, {}).items():
        is_text = name.startswith(PREFIX) and not isinstance(value, bytes)
        set_parameter(parameters[name], _decoded(name, value) if is_text else value)


def _read(body: bytes | bytearray) -> Steps[dict[str, Any]]:
    """Parse a large body in steps, decoding the files in it from base64."""
    document = yield from read_members(body, len(body), lambda count: None)     # the body is already counted
    parameters = member(document, "parameters", dict, {})
    for name, value in parameters.items():
        if isinstance(value, JsonArray):
            raise InvalidRequestError(f"parameter '{name}': expected a text, got a list")
        if isinstance(value, str) and name.startswith(PREFIX):
            parameters[name] = yield from _decoded_in_steps(name, value)
    return document


def _decoded_in_steps(name: str, text: str) -> Steps[bytes]:
    pieces: list[bytes] = []
    for at in range(0, len(text), _BASE64_BYTES):
        if at + _BASE64_BYTES < len(text) and "=" in text[at:at + _BASE64_BYTES]:
            raise InvalidRequestError(f"parameter '{name}': expected base64: it goes on behind its padding")
        pieces.append(_decoded(name, text[at:at + _BASE64_BYTES]))
        yield
    return b"".join(pieces)


def _decoded(name: str, text: Any) -> bytes:
    """Decode a file that is base64 text in JSON. Raises InvalidRequestError."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"parameter '{name}': expected base64: {error}") from error
