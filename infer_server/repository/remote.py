"""Copy model repositories from remote storage: s3://, gs://, az:// and any other address that fsspec supports.

    <store>/<digest of the address>/<model>/...             local copies
    <store>/<digest of the address>/.manifests/<model>      version of each copied file, as JSON

A model is copied when it is loaded: the files whose version (ETag, checksum, generation, or size and time) differs from
the copy's. All are downloaded before the first one is replaced, so that no load sees a mix of versions. Several models
are downloaded at a time. The store is bounded: copies of the least recently used models are removed first, copies of
loaded models never. While the storage is unreachable, complete copies stand for the models that are not loaded yet.

https://filesystem-spec.readthedocs.io
"""
from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from infer_server.config.paths import CONFIG, CONFIGS, INITIAL_STATE, WARMUP, is_name
from infer_server.engines.errors import ConfigError
from infer_server.engines.files import atomic_write
from infer_server.engines.remote import open_file_system, within
from infer_server.errors import FetchError, RepositoryError, UnreachableError
from infer_server.repository.roots import RepositoryRoot

log = logging.getLogger(__name__)
T = TypeVar("T")

_FETCHES = 8                                # models that are downloaded at a time
_LISTING_SECS = 60.0                        # time for the storage to list files
_LISTING_OR_COPY_SECS = 10.0                # time for that where a copy will do
_AWAY_SECS = 5.0                            # time after an error for which copies are used without asking the storage
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)  # errors of the local disk
_MANIFESTS = ".manifests"
_NAMED = (CONFIGS, WARMUP, INITIAL_STATE)   # folders of a model that configurations refer to
# Keys under which the various file systems report the version of a file.
_VERSION = ("ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "crc32c", "checksum")
_TIME = ("mtime", "LastModified", "last_modified", "updated", "created", "modified")


def is_remote(address: str) -> bool:
    return "://" in address


class RemoteFolder(RepositoryRoot):
    """Model repository in an object store or on another machine."""
    outlines_models = False
    is_remote = True

    def __init__(self, address: str, store: Path, max_bytes: int) -> None:
        """Open and lock the copies of a repository.

        Parameters
        ----------
        address : str
            Address of the repository, with a scheme that fsspec supports.
        store : Path
            Local folder of the copies of all remote repositories.
        max_bytes : int
            Limit of the size of this repository's copies.

        Raises
        ------
        RepositoryError
            A package that the address needs is not installed, or another server uses the copies.
        """
        super().__init__()
        self._address = address.rstrip("/")
        try:
            self._files, self._root = open_file_system(self._address)
        except ConfigError as error:
            raise RepositoryError(str(error)) from error
        self._max_bytes = max_bytes
        self.path = store / hashlib.sha256(self._address.encode()).hexdigest()[:16]
        (self.path / _MANIFESTS).mkdir(parents=True, exist_ok=True)
        self._release_lock = weakref.finalize(self, _unlock, _lock(self.path))
        self._clear()
        self._lock = threading.Lock()               # guards the copies on the disk and the fields below
        self._in_use = set[str]()                   # models that are loaded or being loaded
        self._incoming = dict[str, int]()           # bytes that are being downloaded, by model
        self._fetches = threading.Semaphore(_FETCHES)
        self._turns: dict[str, threading.Lock] = {}         # by model, while it is fetched
        self._users = Counter[str]()                        # holders and waiters of each of these
        self._away_until = 0.0
        self._reported = False                      # the use of copies has been logged

    def __str__(self) -> str:
        return self._address

    def names(self) -> list[str]:
        return self._names(_LISTING_SECS)

    def _names(self, secs: float) -> list[str]:
        entries = self._call(f"model repository {self}", lambda: self._files.ls(self._root, detail=True), secs)
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"}
        return sorted(filter(is_name, names))

    def known(self) -> list[str]:
        copies = sorted(file.name for file in (self.path / _MANIFESTS).iterdir())
        try:
            return self._names(_LISTING_OR_COPY_SECS if copies else _LISTING_SECS)
        except UnreachableError as error:
            if not copies:
                raise
            if not self._reported:
                self._reported = True
                log.warning("%s: the models with complete copies are served: %s", error, ", ".join(copies))
            return copies

    def has(self, name: str) -> bool:
        if self._may_use_copy(name):
            return True
        try:
            return name in self.names()
        except UnreachableError:
            if self._is_copied(name):
                return True
            raise

    def fingerprint(self, name: str) -> Hashable:
        return tuple(sorted(_versions(self._about(name)).items()))

    def fetch(self, name: str) -> None:
        with self._fetches, self._turn(name):
            with self._lock:
                is_in_use = name in self._in_use
                self._in_use.add(name)
            if not is_in_use and self._may_use_copy(name):
                return
            began = time.monotonic()
            try:
                count = self._fetch(name, is_in_use)
            except UnreachableError as error:
                if is_in_use or not self._is_copied(name):
                    raise
                log.warning("%s: its copy is served", error)
                return
            except OSError as error:            # an error of the local disk
                raise FetchError(f"{self}/{name}: {error}") from error
            if count:
                self.fetched.add(time.monotonic() - began)
                log.info("copied %d files of %s/%s", count, self, name)

    def release(self, name: str) -> None:
        self._in_use.discard(name)              # without the lock, which is held while files are moved and removed

    def close(self) -> None:
        self._release_lock()

    @contextmanager
    def outline(self, name: str) -> Iterator[Path]:
        """Download the configuration files; model files, which may be large, become sparse files of their size."""
        about = self._about(name)
        if not about:
            raise FetchError(f"{self}/{name} has no files")
        with TemporaryDirectory(prefix=".outline-", dir=self.path) as folder:
            for path, entry in about.items():
                file = Path(folder, name, path)
                if path == CONFIG or path.split("/")[0] in _NAMED:
                    self._copy(f"{name}/{path}", file, _size(entry))
                else:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("wb") as empty:
                        empty.truncate(_size(entry))
            yield Path(folder)

    def _clear(self) -> None:
        """Remove incomplete copies that a killed server left, which no manifest accounts for."""
        for path in self.path.iterdir():
            if path.name != _MANIFESTS and path.is_dir() and not (self.path / _MANIFESTS / path.name).exists():
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Hold the lock of a model, which an ensemble may fetch at the same time."""
        with self._lock:
            turn = self._turns.setdefault(name, threading.Lock())
            self._users[name] += 1
        try:
            with turn:
                yield
        finally:
            with self._lock:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name], self._turns[name]

    def _is_copied(self, name: str) -> bool:
        """Return True if there is a complete copy of a model."""
        return is_name(name) and (self.path / _MANIFESTS / name).exists()

    def _may_use_copy(self, name: str) -> bool:
        """Return True for a model with a copy if the storage did not answer a moment ago."""
        return time.monotonic() < self._away_until and self._is_copied(name)

    def _call(self, label: str, call: Callable[[], T], secs: float) -> T:
        """Call the file system, in a limited time unless secs is 0, and note whether it is reachable.

        `label` begins the message of an error.

        Raises
        ------
        FetchError
            The file does not exist, or the local disk refuses it.
        UnreachableError
            Any other error: file systems raise their own exceptions.
        """
        try:
            self._files.invalidate_cache()
            result = within(secs, call) if secs else call()
        except Exception as error:
            text = f"{label}: {type(error).__name__}: {error}"
            if isinstance(error, FileNotFoundError) or isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
                raise FetchError(text) from error
            self.is_reachable, self._away_until = False, time.monotonic() + _AWAY_SECS
            raise UnreachableError(text) from error
        if not self.is_reachable:
            log.info("%s is reachable again", self)
        self.is_reachable, self._away_until, self._reported = True, 0.0, False
        return result

    def _fetch(self, name: str, is_in_use: bool) -> int:
        """Download the changed files of a model, and return how many. is_in_use: its copy is loaded or being loaded."""
        folder, manifest = self.path / name, self.path / _MANIFESTS / name
        about = self._about(name, _LISTING_OR_COPY_SECS if not is_in_use and self._is_copied(name) else _LISTING_SECS)
        versions = _versions(about)
        if not versions:
            raise FetchError(f"{self}/{name} has no files")
        here = _read_manifest(manifest)
        changed = [path for path, version in versions.items()
                   if here.get(path) != version or not (folder / path).is_file()]
        if changed:
            if not self._reserve(name, sum(_size(about[path]) for path in changed), is_in_use):
                return self._fetch(name, is_in_use)     # its old copy is removed: all files are copied
            try:
                with TemporaryDirectory(prefix=".incoming-", dir=self.path) as incoming:
                    for path in changed:
                        self._copy(f"{name}/{path}", Path(incoming, path), _size(about[path]))
                    if _versions(self._about(name)) != versions:
                        raise FetchError(f"{self}/{name} was changed while it was copied; load it again")
                    with self._lock:
                        self._install(Path(incoming), folder, manifest, changed, versions)
            finally:
                with self._lock:
                    del self._incoming[name]
        with self._lock:
            _remove_others(folder, versions)    # regardless of the manifest, which is absent after a failed copy
            with atomic_write(manifest) as new:     # the manifest's modification time is the time of last use
                new.write(json.dumps(versions).encode())
        return len(changed)

    def _install(self, incoming: Path, folder: Path, manifest: Path, changed: Sequence[str],
                 versions: Mapping[str, str]) -> None:
        """Move downloaded files into the copy of a model."""
        manifest.unlink(missing_ok=True)        # absent while the copy is incomplete
        _remove_others(folder, versions)        # first: an old file may have the name of a new folder
        for path in changed:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(incoming / path, folder / path)

    def _reserve(self, name: str, needed: int, is_in_use: bool) -> bool:
        """Reserve space for `needed` bytes of a model; return False if its own old copy was removed instead.

        Raises
        ------
        RepositoryError
            The limit is exceeded, and all other copies are in use.
        """
        with self._lock:
            try:
                self._evict_for(name, needed)
            except RepositoryError:
                folder = self.path / name
                if is_in_use or not folder.exists():
                    raise
                (self.path / _MANIFESTS / name).unlink(missing_ok=True)
                shutil.rmtree(folder)
                return False
            self._incoming[name] = needed
            return True

    def _about(self, name: str, secs: float = _LISTING_SECS) -> dict[str, Mapping[str, Any]]:
        """Return the file system's metadata of each file by its path in the model's folder, without hidden files."""
        root = f"{self._root}/{name}/"
        listing: dict[str, Mapping[str, Any]] = self._call(
            f"{self}/{name}", lambda: self._files.find(root, detail=True), secs)
        files = {path.partition(root)[2]: about for path, about in listing.items()
                 if not path.endswith("/") or _size(about)}         # skip empty objects that stand for folders
        for path in files:
            if not {"", ".", ".."}.isdisjoint(path.split("/")):     # object names are arbitrary strings
                raise RepositoryError(f"{self}/{name}: '{path}' is not a path in the model's folder; remove or rename "
                                      "the object")
        return {path: about for path, about in files.items() if all(map(is_name, path.split("/")))}

    def _copy(self, path: str, to: Path, size: int) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        self._call(f"{self}/{path}", lambda: self._files.get_file(f"{self._root}/{path}", str(to)), secs=0)
        if to.stat().st_size != size:
            raise FetchError(f"{self}/{path}: received {to.stat().st_size} of {size} bytes; load it again")

    def _evict_for(self, name: str, needed: int) -> None:
        """Remove copies of models that are not loaded, least recently used first, until `needed` bytes fit."""
        others = sorted((self.path / _MANIFESTS).iterdir(), key=lambda file: file.stat().st_mtime)
        sizes = {other.name: _bytes_in(self.path / other.name) for other in others}
        needed += sum(self._incoming.values())
        for other in others:
            if sum(sizes.values()) + needed <= self._max_bytes:
                return
            if other.name not in self._in_use:
                shutil.rmtree(self.path / other.name, ignore_errors=True)
                other.unlink()
                del sizes[other.name]
        if sum(sizes.values()) + needed > self._max_bytes:
            raise RepositoryError(f"{self}/{name}: its {needed >> 20} MiB and the models that are loaded exceed "
                                  f"--repository-cache-mib {self._max_bytes >> 20}; raise it")


def _lock(folder: Path) -> int:
    """Lock a folder of copies against other servers and return the file descriptor that holds the lock."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise RepositoryError(f"{folder} is another server's: give this one a --repository-cache of its own") from error
    return file


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)    # explicitly: a process forked by another thread may hold the descriptor, too
    os.close(file)


def _remove_others(folder: Path, versions: Mapping[str, str]) -> None:
    """Remove the files that `versions` does not list, and empty folders."""
    for file in list(folder.rglob("*")):
        if not file.is_dir() and file.relative_to(folder).as_posix() not in versions:
            file.unlink()
    for empty in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(empty.iterdir()):
            empty.rmdir()


def _read_manifest(file: Path) -> dict[str, str]:
    """Return the version of each copied file; {} if the manifest is missing or damaged, so that all are copied."""
    try:
        versions = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return versions if isinstance(versions, dict) else {}


def _size(about: Mapping[str, Any]) -> int:
    return int(about.get("size") or 0)


def _versions(files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {path: _version(about) for path, about in files.items()}


def _version(about: Mapping[str, Any]) -> str:
    """Return a string that changes when the file changes."""
    known = {key: str(about[key]) for key in _VERSION if about.get(key)}
    if not known:
        known = {key: str(about[key]) for key in _TIME if about.get(key)}
    return json.dumps({"size": about.get("size"), **known})


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
