"""Atomic writes of plans and caches, and the user's cache folder."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str], durable: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` atomically when the block ends.

    The content is written to a temporary file in the same folder. If the block or the disk fails, it is removed and
    the old file stays. durable: call fsync before the rename.
    """
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def user_cache() -> Path:
    """Return infer-server's folder in the user's cache folder, $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):         # XDG: relative paths are to be ignored
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):         # a user without a home: an impossible folder, which a warning will name
        base = os.devnull
    return Path(base, "infer-server")
