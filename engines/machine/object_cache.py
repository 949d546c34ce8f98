"""The object cache: a folder of compiled modules, each under a digest of all that its machine code depends on.

    with using(engine_cache.objects):       # for what this thread compiles inside the block
        build(...)

Entries are machine code that will run in this process: a folder is used only if it belongs to this user and nobody else
may write to it. $INFER_OBJECT_CACHE names another folder, for every build of the process; "off" disables the cache.
"""
from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from infer_server.engines.files import atomic_write

VARIABLE = "INFER_OBJECT_CACHE"
OFF = "off"
USUAL_BYTES = 1 << 30               # default limit for a folder named by $INFER_OBJECT_CACHE
_FORMAT = b"1"                      # format of an entry: its checksum, then the object
_CHECKSUM_BYTES = 20
_SLACK = 16                         # eviction leaves 1/16 of the limit free, and bounds what is written between scans
_ABANDONED_SECONDS = 3600           # a temporary file that is older has lost its writer
_ENTRY = re.compile(r"[0-9a-f]{40}\.object")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.object\..*")

_log = logging.getLogger(__name__)


class ObjectCache:
    """Objects by key. Processes and threads may share the folder: entries appear whole, and never change.

    The entries used longest ago are evicted when all together exceed `limit` bytes, or half of what they take and the
    disk has left. Several processes that write at the same time may exceed it by a sixteenth each.

    A cache only saves time: where the folder cannot be used, nothing is kept.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int = USUAL_BYTES) -> None:
        self.folder, self.limit = Path(folder), limit
        self.hits = self.misses = 0
        self._budget = 0                    # bytes that may be written before the folder is measured again
        self._trusted: bool | None = None   # None: the folder does not exist yet

    def fetch(self, key: str) -> bytes | None:
        """Return the object of a key, or None. An entry that is damaged or truncated is removed."""
        entry, code = self._entry(key), None
        if self._is_trusted():
            with suppress(OSError):
                content = entry.read_bytes()
                code = _checked(key, content)
                if code is None:
                    _log.warning("object cache: %s is damaged and is compiled again", entry)
                    entry.unlink()
                else:
                    os.utime(entry)         # the time of its last use
        self.hits += code is not None
        self.misses += code is None
        return code

    def store(self, key: str, code: bytes) -> None:
        """Keep an object under a key, if it fits and the folder can be written."""
        size = len(code) + _CHECKSUM_BYTES
        if size > self.limit:
            return
        try:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_trusted():
                return
            if size > self._budget and not self._evict(size):
                return
            with atomic_write(self._entry(key), durable=False) as file:     # a crash leaves what its checksum refuses
                file.write(_checksum(key, code) + code)
            self._budget -= size
        except OSError as error:
            _log.debug("object cache %s: %s", self.folder, error)

    def bytes(self) -> int:
        """Return the bytes that all entries take."""
        return sum(size for _, size, _ in self._entries())

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.object"

    def _is_trusted(self) -> bool:
        """Return True if the folder exists, is this user's and is writable for nobody else."""
        if self._trusted is None:
            with suppress(OSError):
                status = self.folder.stat()
                self._trusted = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not self._trusted:
                    _log.warning("the object cache %s is not used: the folder is of another user, or others may write "
                                 "to it; chmod go-w, or set %s", self.folder, VARIABLE)
        return bool(self._trusted)

    def _evict(self, size: int) -> bool:
        """Remove the entries used longest ago if `size` bytes do not fit. Return True if they do now."""
        entries = sorted(self._entries())
        taken = sum(size for _, size, _ in entries)
        limit = min(self.limit, (taken + shutil.disk_usage(self.folder).free) // 2)
        if taken + size > limit:
            for _, bytes_, path in entries:
                if taken + size <= limit - limit // _SLACK:
                    break
                path.unlink(missing_ok=True)
                taken -= bytes_
        self._budget = min(limit - taken, max(limit // _SLACK, size))
        return size <= self._budget

    def _entries(self) -> list[tuple[int, int, Path]]:
        """Return (time of last use, bytes, path) of every entry. Temporary files without a writer are removed."""
        found = []
        with suppress(OSError):         # no folder, or one that cannot be read
            for path in self.folder.iterdir():
                with suppress(FileNotFoundError):       # another process evicts, too
                    status = path.stat()
                    if _ENTRY.fullmatch(path.name):
                        found.append((status.st_mtime_ns, status.st_size, path))
                    elif _TEMPORARY.fullmatch(path.name) and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                        path.unlink()
        return found


def digest(*parts: str) -> str:
    """Return the key of an object: a digest of all that its machine code depends on."""
    hasher = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def _checksum(key: str, code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_CHECKSUM_BYTES, key=_FORMAT + key.encode()).digest()


def _checked(key: str, content: bytes) -> bytes | None:
    """Return the object of an entry's content; None if its checksum is not that of the key and the object."""
    code = content[_CHECKSUM_BYTES:]
    return code if content[:_CHECKSUM_BYTES] == _checksum(key, code) else None


# ---- which cache a build uses
_current: ContextVar[ObjectCache | None] = ContextVar("object cache", default=None)


@contextmanager
def using(cache: ObjectCache | None) -> Iterator[None]:
    """Use a cache, or none, for what this thread compiles inside the block."""
    token = _current.set(cache)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> ObjectCache | None:
    """Return the cache that this thread uses: that of $INFER_OBJECT_CACHE if it names one, else that of `using`."""
    named = os.environ.get(VARIABLE, "")
    if named == OFF:
        return None
    return _named(named) if named else _current.get()


@lru_cache(1)
def _named(folder: str) -> ObjectCache:
    return ObjectCache(folder)
