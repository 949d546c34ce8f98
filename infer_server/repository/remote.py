"""Copy model repositories from remote storage: s3://, gs://, az:// and any other address that fsspec supports.

    <store>/<digest of the address>/<model>/...             local copies
    <store>/<digest of the address>/.manifests/<model>      version of each copied file, as JSON

A model is copied when it is loaded: the files whose version (ETag, checksum, generation, or size and time) differs from
the copy's. All are downloaded before the first one is replaced, so that no load sees a mix of versions. The store is
bounded: copies of the least recently used models are removed first, copies of loaded models never.

https://filesystem-spec.readthedocs.io
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infer_server.config.paths import CONFIG, CONFIGS, INITIAL_STATE, WARMUP, is_name
from infer_server.engines.files import atomic_write
from infer_server.errors import FetchError, RepositoryError
from infer_server.repository.roots import RepositoryRoot

log = logging.getLogger(__name__)

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

    def __init__(self, address: str, store: Path, most_bytes: int) -> None:
        """Open and lock the copies of a repository.

        Parameters
        ----------
        address : str
            Address of the repository, with a scheme that fsspec supports.
        store : Path
            Local folder of the copies of all remote repositories.
        most_bytes : int
            Limit of the size of this repository's copies.

        Raises
        ------
        RepositoryError
            A package that the address needs is not installed, or another server uses the copies.
        """
        self._address = address.rstrip("/")
        self._files, self._root = _open_file_system(self._address)
        self._most_bytes = most_bytes
        self.path = store / hashlib.sha256(self._address.encode()).hexdigest()[:16]
        (self.path / _MANIFESTS).mkdir(parents=True, exist_ok=True)
        self._release_lock = weakref.finalize(self, _unlock, _lock(self.path))
        self._clear()
        self._lock = threading.Lock()
        self._held = set[str]()                     # models that are loaded or being loaded

    def __str__(self) -> str:
        return self._address

    def names(self) -> list[str]:
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True)
        except Exception as error:                  # each file system raises exceptions of its own
            raise FetchError(f"model repository {self}: {type(error).__name__}: {error}") from error
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"}
        return sorted(filter(is_name, names))

    def fingerprint(self, name: str) -> Hashable:
        return tuple(sorted(_versions(self._about(name)).items()))

    def fetch(self, name: str) -> None:
        with self._lock:
            is_held = name in self._held
            self._held.add(name)
            try:
                self._fetch(name, is_held)
            except OSError as error:            # an error of the local disk
                raise FetchError(f"{self}/{name}: {error}") from error

    def release(self, name: str) -> None:
        self._held.discard(name)                # without the lock, which is held while another model is copied

    def close(self) -> None:
        self._release_lock()

    @contextmanager
    def outline(self, name: str) -> Iterator[Path]:
        """Download the configuration files; model files, which may be large, become sparse files of their size."""
        about = self._about(name)
        if not about:
            raise FetchError(f"{self}/{name} has no files")
        with TemporaryDirectory(prefix=".outline-", dir=self.path) as folder:
            for path, what in about.items():
                file = Path(folder, name, path)
                if path == CONFIG or path.split("/")[0] in _NAMED:
                    self._copy(f"{name}/{path}", file, _size(what))
                else:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("wb") as empty:
                        empty.truncate(_size(what))
            yield Path(folder)

    def _clear(self) -> None:
        """Remove incomplete copies that a killed server left, which no manifest accounts for."""
        for path in self.path.iterdir():
            if path.name != _MANIFESTS and path.is_dir() and not (self.path / _MANIFESTS / path.name).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, name: str, is_held: bool) -> None:
        """Download the changed files of a model; `is_held` is True if its copy is being served or loaded."""
        folder, manifest, about = self.path / name, self.path / _MANIFESTS / name, self._about(name)
        versions = _versions(about)
        if not versions:
            raise FetchError(f"{self}/{name} has no files")
        here = _read_manifest(manifest)
        changed = [path for path, version in versions.items()
                   if here.get(path) != version or not (folder / path).is_file()]
        if changed:
            try:
                self._evict_for(name, sum(_size(about[path]) for path in changed))
            except RepositoryError:
                if is_held or not folder.exists():
                    raise
                manifest.unlink(missing_ok=True)        # evict the model's own old copy and try again
                shutil.rmtree(folder)
                self._fetch(name, is_held)
                return
            with TemporaryDirectory(prefix=".incoming-", dir=self.path) as incoming:
                for path in changed:
                    self._copy(f"{name}/{path}", Path(incoming, path), _size(about[path]))
                if _versions(self._about(name)) != versions:
                    raise FetchError(f"{self}/{name} was changed while it was copied; load it again")
                manifest.unlink(missing_ok=True)    # absent while the copy is incomplete
                _remove_others(folder, versions)    # first: an old file may have the name of a new folder
                for path in changed:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(incoming, path), folder / path)
            log.info("copied %d files of %s/%s", len(changed), self, name)
        _remove_others(folder, versions)        # regardless of the manifest, which is absent after a failed copy
        with atomic_write(manifest) as new:     # the manifest's modification time is the time of last use
            new.write(json.dumps(versions).encode())

    def _about(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Return the file system's metadata of each file by its path in the model's folder, without hidden files."""
        root = f"{self._root}/{name}/"
        try:
            self._files.invalidate_cache()
            found: dict[str, Mapping[str, Any]] = self._files.find(root, detail=True)
        except Exception as error:
            raise FetchError(f"{self}/{name}: {type(error).__name__}: {error}") from error
        files = {path.partition(root)[2]: about for path, about in found.items()
                 if not path.endswith("/") or _size(about)}         # skip empty objects that stand for folders
        for path in files:
            if not {"", ".", ".."}.isdisjoint(path.split("/")):     # object names are arbitrary strings
                raise RepositoryError(f"{self}/{name}: '{path}' is not a path in the model's folder; remove or rename "
                                      "the object")
        return {path: about for path, about in files.items() if all(map(is_name, path.split("/")))}

    def _copy(self, path: str, to: Path, size: int) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._files.get_file(f"{self._root}/{path}", str(to))
        except Exception as error:
            raise FetchError(f"{self}/{path}: {type(error).__name__}: {error}") from error
        if to.stat().st_size != size:
            raise FetchError(f"{self}/{path}: received {to.stat().st_size} of {size} bytes; load it again")

    def _evict_for(self, name: str, needed: int) -> None:
        """Remove copies of models that are not loaded, least recently used first, until `needed` bytes fit."""
        others = sorted((self.path / _MANIFESTS).iterdir(), key=lambda file: file.stat().st_mtime)
        held = {other.name: _bytes_in(self.path / other.name) for other in others}
        for other in others:
            if sum(held.values()) + needed <= self._most_bytes:
                return
            if other.name not in self._held:
                shutil.rmtree(self.path / other.name, ignore_errors=True)
                other.unlink()
                del held[other.name]
        if sum(held.values()) + needed > self._most_bytes:
            raise RepositoryError(f"{self}/{name}: its {needed >> 20} MiB and the models that are loaded exceed "
                                  f"--repository-cache-mib {self._most_bytes >> 20}; raise it")


def _open_file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path within it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise RepositoryError(f"{address}: fsspec is not installed; install infer-server[remote], and what it needs "
                              "for such addresses (s3fs, gcsfs, adlfs, ...)") from error
    try:
        files, root = url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise RepositoryError(f"{address}: {error}") from error
    return files, root.rstrip("/")


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
