"""Files that are replaced whole: plans, cached engines, timing caches; and where the user's are kept."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str], durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` when the block ends: a reader finds the old content or the new, whole.

    It is written beside that name, under one of its own. If the block or the disk fails, the old file stays and the
    new one is removed. durable: the content is on the disk before it takes the name.
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
    """infer-server in the user's cache folder, $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):         # which the standard says to ignore
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):         # a user without a home: a folder that cannot be, which a warning will name
        base = os.devnull
    return Path(base, "infer-server")
