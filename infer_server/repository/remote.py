"""Model repositories elsewhere: s3://, gs://, az:// and whatever else fsspec knows, copied to a local store.

    <store>/<digest of the address>/<model>/...             the copies
    <store>/<digest of the address>/.manifests/<model>      which version of each file is there, as JSON

A model is copied when it is loaded: the files whose version (ETag, checksum, generation, or size and time) is another
than that of the copy, all of them before the first is put into place, so that no load sees half a model. The store is
bounded: the copies of models that were used least recently go first, and never those of loaded ones.

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

from engines.files import atomic_write
from infer_server.config.paths import CONFIG, CONFIGS, INITIAL_STATE, WARMUP, is_name
from infer_server.errors import FetchError, RepositoryError
from infer_server.repository.places import Place

log = logging.getLogger(__name__)

_MANIFESTS = ".manifests"
_NAMED = (CONFIGS, WARMUP, INITIAL_STATE)   # folders of a model: its other configurations, and what one names
# What tells versions of a file apart, where a store has such a thing, under the names that stores have for it.
_VERSION = ("ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "crc32c", "checksum")
_TIME = ("mtime", "LastModified", "last_modified", "updated", "created", "modified")


def is_remote(address: str) -> bool:
    return "://" in address


class RemoteFolder(Place):
    """A folder of an object store, or of another machine."""
    outlines_models = False

    def __init__(self, address: str, store: Path, most_bytes: int) -> None:
        """store: the folder of all copies; most_bytes: of the copies of this one.

        Raises RepositoryError: what is needed to read it is not installed, or another server uses its copies.
        """
        self._address = address.rstrip("/")
        self._files, self._root = _opened(self._address)
        self._most_bytes = most_bytes
        self.path = store / hashlib.sha256(self._address.encode()).hexdigest()[:16]
        (self.path / _MANIFESTS).mkdir(parents=True, exist_ok=True)
        self._give_back = weakref.finalize(self, _unlock, _lock(self.path))
        self._clear()
        self._lock = threading.Lock()
        self._held = set[str]()                     # models that are loaded, or being loaded

    def __str__(self) -> str:
        return self._address

    def names(self) -> list[str]:
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True)
        except Exception as error:                  # every store has errors of its own
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
            except OSError as error:            # of the disk
                raise FetchError(f"{self}/{name}: {error}") from error

    def release(self, name: str) -> None:
        self._held.discard(name)                # without the lock: a copy of another model may take minutes

    def close(self) -> None:
        self._give_back()

    @contextmanager
    def outline(self, name: str) -> Iterator[Path]:
        """The models themselves, which may be large, are files of their sizes without contents."""
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
        """Removes what a server has left that was killed while it copied: nobody would count it, or make room of it."""
        for path in self.path.iterdir():
            if path.name != _MANIFESTS and path.is_dir() and not (self.path / _MANIFESTS / path.name).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, name: str, is_held: bool) -> None:
        """is_held: its copy is served, or about to be."""
        folder, manifest, about = self.path / name, self.path / _MANIFESTS / name, self._about(name)
        versions = _versions(about)
        if not versions:
            raise FetchError(f"{self}/{name} has no files")
        here = _read_manifest(manifest)
        changed = [path for path, version in versions.items()
                   if here.get(path) != version or not (folder / path).is_file()]
        if changed:
            try:
                self._make_room(name, sum(_size(about[path]) for path in changed))
            except RepositoryError:
                if is_held or not folder.exists():
                    raise
                manifest.unlink(missing_ok=True)        # what it was before makes room as any other
                shutil.rmtree(folder)
                self._fetch(name, is_held)
                return
            with TemporaryDirectory(prefix=".incoming-", dir=self.path) as incoming:
                for path in changed:
                    self._copy(f"{name}/{path}", Path(incoming, path), _size(about[path]))
                if _versions(self._about(name)) != versions:
                    raise FetchError(f"{self}/{name} was changed while it was copied; load it again")
                manifest.unlink(missing_ok=True)    # until all is in place
                _remove_others(folder, versions)    # one of which may be called as a folder of what comes
                for path in changed:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(incoming, path), folder / path)
            log.info("copied %d files of %s/%s", len(changed), self, name)
        _remove_others(folder, versions)        # whatever the manifest knew: it is gone after a copy that failed
        with atomic_write(manifest) as new:     # its time is that of the last use
            new.write(json.dumps(versions).encode())

    def _about(self, name: str) -> dict[str, Mapping[str, Any]]:
        """What the store says of each file of a model, by its path in the model's folder; hidden files are left out."""
        root = f"{self._root}/{name}/"
        try:
            self._files.invalidate_cache()
            found: dict[str, Mapping[str, Any]] = self._files.find(root, detail=True)
        except Exception as error:
            raise FetchError(f"{self}/{name}: {type(error).__name__}: {error}") from error
        files = {path.partition(root)[2]: about for path, about in found.items()
                 if not path.endswith("/") or _size(about)}         # which consoles of stores make for a folder
        for path in files:
            if not {"", ".", ".."}.isdisjoint(path.split("/")):     # the name of an object may be anything
                raise RepositoryError(f"{self}/{name}: '{path}' is no path in the model's folder")
        return {path: about for path, about in files.items() if all(map(is_name, path.split("/")))}

    def _copy(self, path: str, to: Path, size: int) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._files.get_file(f"{self._root}/{path}", str(to))
        except Exception as error:
            raise FetchError(f"{self}/{path}: {type(error).__name__}: {error}") from error
        if to.stat().st_size != size:
            raise FetchError(f"{self}/{path}: {to.stat().st_size} bytes came of {size}; load it again")

    def _make_room(self, name: str, wanted: int) -> None:
        """Removes copies of models that are not loaded, those used last at last, until there is room for a model."""
        others = sorted((self.path / _MANIFESTS).iterdir(), key=lambda file: file.stat().st_mtime)
        held = {other.name: _bytes_in(self.path / other.name) for other in others}
        for other in others:
            if sum(held.values()) + wanted <= self._most_bytes:
                return
            if other.name not in self._held:
                shutil.rmtree(self.path / other.name, ignore_errors=True)
                other.unlink()
                del held[other.name]
        if sum(held.values()) + wanted > self._most_bytes:
            raise RepositoryError(f"{self}/{name}: its {wanted >> 20} MiB and the models that are loaded exceed "
                                  f"--repository-cache-mib {self._most_bytes >> 20}; raise it")


def _opened(address: str) -> tuple[Any, str]:
    """The file system of an address, and its path there."""
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
    """What holds a folder until it is closed."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise RepositoryError(f"{folder} is another server's: give this one a --repository-cache of its own") from error
    return file


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)    # what another thread is forking has the file, too, until it executes a program
    os.close(file)


def _remove_others(folder: Path, versions: Mapping[str, str]) -> None:
    """Removes files that are not of these, and folders without files."""
    for file in list(folder.rglob("*")):
        if not file.is_dir() and file.relative_to(folder).as_posix() not in versions:
            file.unlink()
    for empty in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(empty.iterdir()):
            empty.rmdir()


def _read_manifest(file: Path) -> dict[str, str]:
    """The version of each file of a copy; of none where that is not known, so that all are copied again."""
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
    """What differs when a file is another."""
    known = {key: str(about[key]) for key in _VERSION if about.get(key)}
    if not known:
        known = {key: str(about[key]) for key in _TIME if about.get(key)}
    return json.dumps({"size": about.get("size"), **known})


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
