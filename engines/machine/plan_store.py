"""Plan store: plan files by key in a folder that machines share, behind any file system that fsspec supports.

    URL/<key>.plan          a plan file
    URL/<key>.sha256        its SHA-256 as `sha256sum --check` reads it, its size, and its HMAC if there is a secret

A reader sees whole files: they are put whole into object stores, and moved into place elsewhere. There are no locks: of
two machines that build the same plan, the last one wins. A plan is machine code. Without a secret, whoever may write to
the store decides what its readers execute; with a secret, only plans that were signed with it for this key are read.

A store only saves time: where it is unreachable, or holds something else, plans are built without it.
"""
from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infer_server.engines.errors import ConfigError
from infer_server.engines.files import atomic_write
from infer_server.engines.remote import open_file_system, shown, within

T = TypeVar("T")

LEAST_SECRET_BYTES = 16
_MOST_SECRET_BYTES = 4096
# File systems that show a file only when all of it has arrived. Elsewhere it is moved from a temporary name.
_PUT_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
_CALL_SECS = 20.0                   # time limit of a call, beside that for its bytes
_LEAST_RATE = 1 << 20               # bytes per second that a transfer must reach on average
_BLOCK = 32 << 20                   # bytes that are read at a time
_AWAY_SECS = 60.0                   # time for which a store that did not answer is not asked again
_MOST_ABOUT_BYTES = 1024
_ABOUT = re.compile(r"([0-9a-f]{64})  (\S+)\n# bytes (\d{1,15})\n(?:# hmac-sha256 ([0-9a-f]{64})\n)?")

_log = logging.getLogger(__name__)


class Refused(Exception):
    """Raised for an entry that may not be used; the message says why."""


class PlanStore:
    """Plan files by key, shared by machines. Thread-safe."""

    def __init__(self, url: str, secret: bytes = b"") -> None:
        """Use a folder; it is created when the first plan is stored.

        Parameters
        ----------
        url : str
            Address of a folder that fsspec supports (s3://bucket/plans), or a path.
        secret : bytes
            Key of the HMAC of entries; b"": entries are not signed, and signatures are not checked.

        Raises
        ------
        ConfigError
            fsspec or the package for the scheme is not installed, or the secret is too short.
        """
        if 0 < len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(f"the key of a plan store has {len(secret)} bytes, fewer than {LEAST_SECRET_BYTES}; make "
                              "one with: openssl rand -hex 32")
        self._files, self._root = open_file_system(url)
        self._name, self._secret = f"plan store {shown(url)}", secret
        protocol = self._files.protocol
        self._puts_whole = not _PUT_WHOLE.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
        self._away_until = 0.0

    def fetch(self, key: str, to: Path, most_bytes: int) -> bool:
        """Copy the plan of a key to a file; return False if there is none that may be used.

        Parameters
        ----------
        key : str
        to : Path
            The file, which appears whole.
        most_bytes : int
            Maximum size of the plan.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        if time.monotonic() < self._away_until:
            return False
        began = time.monotonic()
        try:
            about = self._about(key)
            with atomic_write(to) as file:
                self._download(key, about, most_bytes, file.write)
        except FileNotFoundError:
            _log.info("%s: miss: there is no plan %s", self._name, key)
        except Refused as error:
            _log.warning("%s: refused: plan %s %s; it is built here", self._name, key, error)
        except _Unreachable as error:
            self._away_until = time.monotonic() + _AWAY_SECS
            _log.warning("%s: unreachable: %s; plans are built here", self._name, error)
        else:
            _log.info("%s: hit: plan %s, %.1f MB in %.1f s", self._name, key, about.size / 1e6,
                      time.monotonic() - began)
            return True
        return False

    def store(self, key: str, plan: Path) -> None:
        """Copy a plan file to the store. An error is logged only: the plan is in use here already."""
        if time.monotonic() < self._away_until:
            return
        began = time.monotonic()
        try:
            size, sha256 = _digest(plan)
            about = self._signed(f"{sha256}  {key}.plan\n# bytes {size}\n")
            self._put(f"{key}.plan", lambda path: self._files.put_file(str(plan), path), size)
            self._put(f"{key}.sha256", lambda path: self._files.pipe_file(path, about), len(about))
        except (_Unreachable, OSError) as error:
            _log.warning("%s: plan %s is not stored: %s", self._name, key, error)
        else:
            _log.info("%s: stored plan %s, %.1f MB in %.1f s", self._name, key, size / 1e6, time.monotonic() - began)

    def _about(self, key: str) -> _About:
        """Read and check the digest of a key's plan. Raises FileNotFoundError, Refused, _Unreachable."""
        data = self._read(f"{key}.sha256", 0, _MOST_ABOUT_BYTES)
        text = data.decode("ascii", errors="replace")
        match = _ABOUT.fullmatch(text)
        if match is None or match[2] != f"{key}.plan":
            raise Refused(f"has a damaged {key}.sha256")
        if self._secret:
            if not match[4]:
                raise Refused("is not signed with the key (--plan-store-key)")
            if not hmac.compare_digest(self._signed(text[:match.start(4) - len("# hmac-sha256 ")]), data):
                raise Refused("is signed with another key (--plan-store-key)")
        return _About(match[1], int(match[3]))

    def _download(self, key: str, about: _About, most_bytes: int, write: Callable[[bytes], object]) -> None:
        """Read the plan of a key in blocks. Raises FileNotFoundError, Refused, _Unreachable."""
        if about.size > most_bytes:
            raise Refused(f"has {about.size >> 20} MiB, more than the {most_bytes >> 20} that the engine cache keeps")
        hasher, at = hashlib.sha256(), 0
        while at < about.size:
            end = min(at + _BLOCK, about.size)
            block = self._read(f"{key}.plan", at, end)
            if len(block) != end - at:
                raise Refused(f"has {at + len(block)} bytes, and {about.size} were stored")
            hasher.update(block)
            write(block)
            at = end
        # The plan may have been replaced since its digest was read: that is written after it.
        found = hasher.hexdigest()
        if found != about.sha256 and found != self._about(key).sha256:
            raise Refused("does not have the SHA-256 that was stored")

    def _read(self, name: str, start: int, end: int) -> bytes:
        """Read a part of a file, less if the file is shorter. Raises FileNotFoundError, _Unreachable."""
        path = f"{self._root}/{name}"
        data: bytes = self._call(lambda: self._files.cat_file(path, start=start, end=end), end - start)
        return data

    def _put(self, name: str, put: Callable[[str], object], size: int) -> None:
        """Put a file so that it appears whole. Raises _Unreachable."""
        path = f"{self._root}/{name}"
        if self._puts_whole:
            self._call(lambda: put(path), size)
            return
        temporary = f"{self._root}/.{name}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            self._call(lambda: self._files.makedirs(self._root, exist_ok=True), 0)
            self._call(lambda: put(temporary), size)
            self._call(lambda: self._files.mv(temporary, path), size)
        except (_Unreachable, OSError):
            with suppress(_Unreachable, OSError):
                self._call(lambda: self._files.rm_file(temporary), 0)
            raise

    def _signed(self, text: str) -> bytes:
        """Return the contents of a .sha256 file: the text, and its HMAC if there is a secret."""
        data = text.encode()
        if not self._secret:
            return data
        return data + f"# hmac-sha256 {hmac.new(self._secret, data, hashlib.sha256).hexdigest()}\n".encode()

    def _call(self, call: Callable[[], T], size: int) -> T:
        """Call the file system, with a time limit for `size` bytes. Raises FileNotFoundError, Refused, _Unreachable."""
        try:
            return within(_CALL_SECS + size / _LEAST_RATE, call)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.EINVAL:     # s3fs: the object ends before the range (416)
                raise Refused("is incomplete") from error
            raise _Unreachable(f"{type(error).__name__}: {error}") from error
        except Exception as error:              # each file system raises exceptions of its own
            raise _Unreachable(f"{type(error).__name__}: {error}") from error


class _Unreachable(Exception):
    """Raised if a call of the file system fails."""


@dataclass(frozen=True)
class _About:
    """Digest and size of a stored plan."""
    sha256: str
    size: int


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret in a file, without white space around it.

    Raises
    ------
    ConfigError
        It is shorter than LEAST_SECRET_BYTES, or too long.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as file:
        secret = file.read(_MOST_SECRET_BYTES + 1)
    if len(secret) > _MOST_SECRET_BYTES or len(secret.strip()) < LEAST_SECRET_BYTES:
        raise ConfigError(f"{path}: the key of a plan store has {LEAST_SECRET_BYTES} to {_MOST_SECRET_BYTES} bytes; "
                          "make one with: openssl rand -hex 32")
    return secret.strip()


def _digest(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
