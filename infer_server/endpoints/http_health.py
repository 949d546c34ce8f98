"""KServe's GET pages for probes: the server's metadata, and whether it and its models are ready.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""
from __future__ import annotations

import json
import re
from http import HTTPStatus

from infer_server.endpoints.http_server import Page, error_page
from infer_server.errors import InvalidRequestError, ServeError, UnknownModelError
from infer_server.lifecycle import Lifecycle
from infer_server.repository.repository import Repository
from infer_server.version import NAME, VERSION

NOT_SERVED = error_page(HTTPStatus.NOT_IMPLEMENTED,
                        "only GET of /v2, /v2/health/{live,ready} and /v2/models/M[/versions/V]/ready is served; "
                        "use gRPC for all else")

_MODEL_READY = re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?/ready")


def health_page(path: str, lifecycle: Lifecycle, repository: Repository) -> Page | None:
    """The answer to GET of a path; None: there is no such page."""
    if path == "/v2":
        return Page(json.dumps({"name": NAME, "version": VERSION, "extensions": []}))
    if path == "/v2/health/live":
        return Page()
    if path == "/v2/health/ready":
        return Page(status=HTTPStatus.OK if lifecycle.ready else HTTPStatus.SERVICE_UNAVAILABLE)
    if match := _MODEL_READY.fullmatch(path):
        return _model_ready(repository, match["name"], match["version"] or "")
    return None


def _model_ready(repository: Repository, name: str, version: str) -> Page:
    try:
        repository.find(name, version)
    except UnknownModelError as error:
        return error_page(HTTPStatus.NOT_FOUND, str(error))
    except InvalidRequestError as error:
        return error_page(HTTPStatus.BAD_REQUEST, str(error))
    except ServeError as error:
        return error_page(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    return Page()
