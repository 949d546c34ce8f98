"""Remove directories of this machine from error messages to clients; the log keeps them.

A path below a registered folder becomes relative to it (`/srv/models/m/1/model.onnx` -> `m/1/model.onnx`), any other
absolute path becomes its last component after an ellipsis (`/usr/lib/libx.so` -> `.../libx.so`). Names that only look
like paths are kept: tensors and nodes of ONNX models (`/model.0/conv/Conv`), paths of URLs, keys of shared memory.
"""
from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from infer_server.errors import ExecutionError, RepositoryError, ServeError, UnavailableError

# Errors whose text comes from the disk or an engine. Errors of Python models are redacted where they are received. The
# texts of other errors repeat what the client sent: redacting these would reveal which folders exist.
_SERVER_ERRORS = (RepositoryError, ExecutionError, UnavailableError)
# Folders at the root of a Unix system: Filesystem Hierarchy Standard and macOS.
_TOP = {"Applications", "Library", "System", "Users", "Volumes", "bin", "boot", "dev", "etc", "home", "lib", "lib32",
        "lib64", "media", "mnt", "nix", "opt", "private", "proc", "root", "run", "sbin", "snap", "srv", "sys", "tmp",
        "usr", "var"}
_OS_ERROR = re.compile(r"""(\[Errno -?\d+\] [^'"\n]*)(['"])(/.*?)\2""")
_QUOTED = re.compile(r"""(['"])(/.*?)\1""")
_BARE = re.compile(r"""(?<![\w/.~'"-])/[^\s'"`,;:()\[\]{}<>|/]+(?:/[^\s'"`,;:()\[\]{}<>|]*)?""")
_folders: list[str] = []                # longest first
_tops = set(_TOP)


def register(folders: Iterable[str | os.PathLike[str]]) -> None:
    """Register folders of this server, to which paths in errors become relative."""
    for folder in map(os.path.abspath, folders):
        if folder != "/" and folder not in _folders:
            _folders.append(folder)
            _tops.add(folder.split("/")[1])
    _folders.sort(key=len, reverse=True)


def redacted(text: str) -> str:
    """Return the text of an error without absolute paths of this machine."""
    if "/" not in text:
        return text
    for folder in _folders:
        if folder in text:
            text = re.sub(rf"(?<![\w/.~-]){re.escape(folder)}/+(?=[^\s'\"])", "", text)
            text = re.sub(rf"(?<![\w/.~-]){re.escape(folder)}(?![\w.-])",
                          os.path.basename(folder).replace("\\", r"\\"), text)
    text = _OS_ERROR.sub(lambda match: f"{match[1]}{match[2]}{_shortened(match[3])}{match[2]}", text)
    text = _QUOTED.sub(lambda match: f"{match[1]}{_if_path(match[2])}{match[1]}", text)
    return _BARE.sub(lambda match: _if_path(match[0]), text)


def public_text(error: ServeError) -> str:
    """Return the text of an error that clients may see."""
    return redacted(str(error)) if isinstance(error, _SERVER_ERRORS) else str(error)


def _if_path(text: str) -> str:
    """Return the text, shortened if it is a path below a folder at the root of the file system."""
    return _shortened(text) if text.split("/")[1] in _tops and "/" in text[1:].rstrip("/") else text


def _shortened(path: str) -> str:
    return f".../{path.rstrip('/').rpartition('/')[2]}"


def _surroundings() -> Iterator[str]:
    """Yield the folders of this process: code, temporary files, home."""
    yield from (path for path in sys.path if os.path.isabs(path))
    yield from (sys.prefix, sys.base_prefix)
    for find in (os.getcwd, tempfile.gettempdir, Path.home):
        with suppress(OSError, RuntimeError):       # the folder was deleted, is not writable, or there is no home
            yield str(find())


register(_surroundings())
