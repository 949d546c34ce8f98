"""Load models from files that are sent in the load request, as parameters named "file:<version>/<file>".

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""
from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from infer_server.config.kinds import ModelKind
from infer_server.config.paths import is_name
from infer_server.errors import InvalidRequestError, UnavailableError
from infer_server.protos import model_config
from infer_server.repository.folders import Source, read_model

PREFIX = "file:"
_MAX_PARTS = 8                  # components of a path
_NAME_ERRNOS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)  # errors that the client's paths cause


@contextmanager
def temporary_repository(name: str, files: Mapping[str, bytes]) -> Iterator[Path]:
    """Create a temporary repository with only this model; it is deleted when the context exits.

    Parameters
    ----------
    name : str
        Name of the model.
    files : mapping of str to bytes
        Contents by path in the model's folder.

    Raises
    ------
    InvalidRequestError
        The name or a path is not valid.
    UnavailableError
        A file cannot be written.
    """
    if not is_name(name):
        raise InvalidRequestError(f"'{name}' is not a valid model name; use a plain folder name, without '/'")
    paths = {_checked(path): content for path, content in files.items()}
    with ExitStack() as until_loaded:
        try:
            folder = Path(until_loaded.enter_context(TemporaryDirectory(prefix="infer-server-")))
            (folder / name).mkdir()
        except OSError as error:
            raise UnavailableError(f"the files of '{name}' cannot be written: {error}") from error
        for path, content in paths.items():
            _write(folder / name / path, content, f"'{PREFIX}{path}' cannot be written")
        yield folder


def _write(file: Path, content: bytes, failed: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        kind = InvalidRequestError if error.errno in _NAME_ERRNOS else UnavailableError
        raise kind(f"{failed}: {error.strerror}") from error


def read_temporary(folder: Path, name: str, message: model_config.ModelConfig | None) -> Sequence[Source]:
    """Read the versions of a model in a temporary repository; otherwise as `read_model`.

    Raises
    ------
    InvalidRequestError
        The model is code, a Python model or a plan: code is never accepted from requests.
    """
    sources = [replace(source, is_of_request=True) for source in read_model(folder, name, message)]
    for source in sources:
        if source.config.kind is not ModelKind.ENSEMBLE and not source.is_onnx:
            raise InvalidRequestError(f"'{PREFIX}{source.version}/{source.file.name}': code is not taken from "
                                      "requests: no Python model, and no plan, which is machine code; send a "
                                      "model.onnx, or put the model into the repository")
    return sources


def _checked(path: str) -> PurePosixPath:
    """Validate and return the path of a file in the model's folder, such as "1/model.onnx"."""
    parts = path.split("/")
    if not 1 < len(parts) <= _MAX_PARTS or not all(map(is_name, parts)):
        raise InvalidRequestError(f"'{PREFIX}{path}': expected a path in the model's folder, such as "
                                  f"'{PREFIX}1/model.onnx'")
    return PurePosixPath(path)
