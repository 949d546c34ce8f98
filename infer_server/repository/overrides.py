"""Files that come with the request to load a model, instead of those in the repository: parameters named
"file:<version>/<file>".

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""
from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from infer_server.config.kinds import Kind
from infer_server.config.paths import is_name
from infer_server.errors import InvalidRequestError, UnavailableError
from infer_server.repository.folders import Source, read_model
from protos import model_config

PREFIX = "file:"
_MOST_PARTS = 8                 # of a path
_OF_NAMES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)     # one where another needs a folder


@contextmanager
def written(name: str, files: Mapping[str, bytes]) -> Iterator[Path]:
    """A repository with that model alone, for as long as it takes to load it: models run from memory.

    Raises InvalidRequestError: a name or a path that would lie elsewhere; UnavailableError: the disk does not take it.
    """
    if not is_name(name):
        raise InvalidRequestError(f"'{name}' is no name of a model that comes with its files")
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
        kind = InvalidRequestError if error.errno in _OF_NAMES else UnavailableError
        raise kind(f"{failed}: {error.strerror}") from error


def read_written(folder: Path, name: str, message: model_config.ModelConfig | None) -> Sequence[Source]:
    """The versions of a model in such a repository. Raises InvalidRequestError: what would execute one is code that
    came with the request, whatever its file is called; otherwise as read_model()."""
    sources = [replace(source, is_of_request=True) for source in read_model(folder, name, message)]
    for source in sources:
        if source.config.kind is not Kind.ENSEMBLE and not source.is_onnx:
            raise InvalidRequestError(f"'{PREFIX}{source.version}/{source.file.name}': code is not taken from "
                                      "requests: no Python model, and no plan, which is machine code; send a "
                                      "model.onnx, or put the model into the repository")
    return sources


def _checked(path: str) -> PurePosixPath:
    """The path of a file in the model's folder, "1/model.onnx"."""
    parts = path.split("/")
    if not 1 < len(parts) <= _MOST_PARTS or not all(map(is_name, parts)):
        raise InvalidRequestError(f"'{PREFIX}{path}': expected a path in the model's folder, such as "
                                  f"'{PREFIX}1/model.onnx'")
    return PurePosixPath(path)
